"""The samples with the lowest and the highest temperatures: which they are, and their pictures."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .temperatures import Side

SHEET_SAMPLES = 24
LONGEST_EDGE = 192
"""Pixels; larger pictures are reduced, so that a report of large photographs stays small."""
JPEG_QUALITY = 80

End = Literal["lowest", "highest"]
ENDS: tuple[End, ...] = ("lowest", "highest")


class Sheet(NamedTuple):
    """The samples at one end of one side's temperatures, the most extreme first; among equals, the lowest id."""

    side: Side
    end: End
    sample_ids: list[int]
    not_shown: int
    """Samples left out although their tau equals that of the last one shown."""


def choose_sheet(side: Side, visited: NDArray[np.bool_], end: End) -> Sheet:
    """Choose up to 24 of the visited samples; visited: bool [n], at least one set."""
    ids = np.flatnonzero(visited)
    ascending = side.tau[ids] if end == "lowest" else -side.tau[ids]
    order = np.argsort(ascending, kind="stable")[:SHEET_SAMPLES]
    tied = ascending == ascending[order[-1]]
    return Sheet(side, end, ids[order].tolist(), int(tied.sum() - tied[order].sum()))


def thumbnail(jpeg: bytes) -> str:
    """A data URI of a picture at most 192 pixels wide and high; a smaller one stays as it is.

    Raises OSError where the picture cannot be decoded.
    """
    with Image.open(BytesIO(jpeg)) as picture:
        if max(picture.size) > LONGEST_EDGE:
            picture.thumbnail((LONGEST_EDGE, LONGEST_EDGE))
            reduced = BytesIO()
            picture.save(reduced, "JPEG", quality=JPEG_QUALITY)
            jpeg = reduced.getvalue()
    return data_uri(jpeg, "image/jpeg")


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
