"""The samples' pictures as data URIs: as large as the page may become, and no larger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO

from PIL import Image

from .html import data_uri

EDGES = (384, 288, 224, 160, 112, 80)
"""Pixels of a picture's longer side, from what is good to look at to what can just be told apart."""
JPEG_QUALITY = 80
SMALL_BYTES = 1 << 15
"""A file may be large although its picture is small: what else it holds need not be shown."""


def data_uris(read: Callable[[int], bytes], shown: Sequence[int], most_bytes: int) -> dict[int, str]:
    """The pictures of the samples by id, at the largest of EDGES at which all of them take at most `most_bytes`.

    read: a sample's JPEG. shown: ids, as often as each is shown. A picture that is smaller stays as it is stored.
    Raises OSError where a picture cannot be decoded, and what `read` raises.
    """
    stored = {sample_id: read(sample_id) for sample_id in dict.fromkeys(shown)}
    for edge in EDGES:
        found, left = {}, most_bytes
        for sample_id in shown:
            if sample_id not in found:
                found[sample_id] = data_uri(reduced(stored[sample_id], edge), "image/jpeg")
            left -= len(found[sample_id])
            if left < 0 and edge != EDGES[-1]:
                break
        else:
            break
    return found


def reduced(jpeg: bytes, edge: int) -> bytes:
    """A picture at most `edge` pixels wide and high. Raises OSError where it cannot be decoded."""
    try:
        with Image.open(BytesIO(jpeg), formats=["JPEG"]) as picture:
            if max(picture.size) <= edge and len(jpeg) <= SMALL_BYTES:
                return jpeg
            picture.draft("RGB", (edge, edge))  # lets the decoder leave out what is not needed
            picture.thumbnail((edge, edge))
            plain = picture.convert("RGB")
            plain.info.clear()  # comments and profiles would be written again
            smaller = BytesIO()
            plain.save(smaller, "JPEG", quality=JPEG_QUALITY)
    except Image.DecompressionBombError as error:
        raise OSError(str(error)) from error
    return smaller.getvalue()
