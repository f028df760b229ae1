"""The samples' pictures as data URIs, reduced to fit the page's size limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from ...pipeline.dataset import Dataset
from ...pipeline.errors import DatasetError
from .html import data_uri

EDGES = (384, 288, 224, 160, 112, 80, 48)
"""Sizes to try for a picture's longer side, in pixels, from clear to barely recognisable."""
JPEG_QUALITY = 80
SMALL_BYTES = 1 << 15
"""A small picture in a larger file is re-encoded to drop what else the file holds."""


def read_pictures(dataset: Dataset, sample_ids: Iterable[int], notes: list[str]) -> dict[int, bytes]:
    """Return samples' JPEGs by id; those that cannot be read or decoded are left out and noted."""
    found: dict[int, bytes] = {}
    failed: dict[int, Exception] = {}
    for sample_id in dict.fromkeys(sample_ids):
        try:
            found[sample_id] = reduced(dataset.jpeg(sample_id), EDGES[0])
        except (DatasetError, OSError) as error:
            failed[sample_id] = error
    if failed:
        first, reason = next(iter(failed.items()))
        more = f", nor those of {len(failed) - 1:,} more" if len(failed) > 1 else ""
        notes.append(f"The picture of sample {first} cannot be shown{more}: {reason}")
    return found


def data_uris(pictures: Mapping[int, bytes], shown: Sequence[int], most_bytes: int) -> dict[int, str]:
    """Return pictures by id at the largest of EDGES at which all fit `most_bytes`; empty if none fits.

    pictures: JPEGs by id, from `read_pictures`. shown: ids, repeated as often as shown; some may have no picture.
    """
    for edge in EDGES:
        found: dict[int, str] = {}
        left = most_bytes
        for sample_id in shown:
            if sample_id in pictures and sample_id not in found:
                found[sample_id] = data_uri(reduced(pictures[sample_id], edge), "image/jpeg")
            left -= len(found.get(sample_id, ""))
            if left < 0:
                break
        else:
            return found
    return {}


def reduced(jpeg: bytes, edge: int) -> bytes:
    """Return a picture at most `edge` pixels wide and high. Raises OSError if it cannot be decoded."""
    try:
        with Image.open(BytesIO(jpeg), formats=["JPEG"]) as picture:
            is_small = max(picture.size) <= edge and len(jpeg) <= SMALL_BYTES
            picture.draft("RGB", (edge, edge))  # lets the decoder skip detail
            picture.load()
            if is_small:
                return jpeg
            picture.thumbnail((edge, edge))
            plain = picture.convert("RGB")
            plain.info.clear()  # comments and profiles would be written too
            smaller = BytesIO()
            plain.save(smaller, "JPEG", quality=JPEG_QUALITY)
    except Image.DecompressionBombError as error:
        raise OSError(str(error)) from error
    except UnidentifiedImageError as error:
        raise OSError("not a readable JPEG") from error
    return smaller.getvalue()
