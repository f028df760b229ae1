"""Estimate a dataset's size before it is made, from samples that are stored in memory as the conversion does."""

import math
import time
from contextlib import suppress

import numpy as np

from ..dataset.row_records import PAGE_BYTES, RECORD
from ..errors import BadSampleError
from ..sources import Sample, Selection, Source
from ..sources.caption_lengths import CONTEXTS
from ..sources.shards import MAX_SHARD_ROWS, shard_count
from ..sources.webdataset import MIN_SAMPLE_BYTES
from .images import to_stored
from .plan import ConvertSettings

SAMPLES, RUN, SECONDS = 200, 10, 1.0
"""Samples to store at most, neighbours among them where others are slow to read, and seconds after which to end."""
_ROW, _PIECE = 32, 24
"""Bytes in FFCV's tables of a row, and of each of its pieces: picture, first caption, further captions."""


def dataset_bytes(source: Source, selection: Selection, settings: ConvertSettings, stored: int | None) -> int | None:
    """Return about how many bytes a dataset will have, two standard errors above the mean; None if that is unknown.

    stored: bytes of the selected pictures in the source, or of all tars. Errors are left for the conversion to raise.
    """
    found, until = [(0, 0, 0)], math.inf
    with suppress(Exception):
        for _, sample, done, *_ in source.some(selection, settings.seed, SAMPLES, RUN):
            found.append((done, *(_bytes_of(sample, source.mode, settings) if isinstance(sample, Sample) else (0, 0))))
            if (now := time.monotonic()) > until:
                break
            until = min(until, now + SECONDS)  # from the first one on, for which numba may compile
    done, paged, beside = np.array(found).T
    if not paged.any():
        return None
    size, together = paged + beside, np.arange(len(paged)) // (RUN if len(paged) > 5 * RUN else 1)
    errors = np.bincount(together, size - done * size.sum() / done.sum())
    margin = 1 + 2 * np.sqrt(errors @ errors) / size.sum()
    end = 0
    for each in (rows := np.resize(paged[paged > 0], 5_000)).tolist():
        end += each + (-end % PAGE_BYTES if end % PAGE_BYTES + each > PAGE_BYTES else 0)  # no row crosses a page
    if source.files_in_order:
        whole = source.stored_bytes() or 0
        reserved = whole // MIN_SAMPLE_BYTES
    else:
        whole = reserved = len(selection) if isinstance(selection, np.ndarray) else len(source)
    times = whole / done.sum()
    shards = shard_count(round(times * (len(found) - 1)), stored)
    tables = np.ceil(min(MAX_SHARD_ROWS, reserved / shards) * _ROW / PAGE_BYTES)
    pages = np.ceil(margin * times * paged.sum() * end / rows.sum() / shards / PAGE_BYTES)
    return int(shards * (tables + pages) * PAGE_BYTES + margin * times * beside.sum())


def _bytes_of(sample: Sample, mode: str, settings: ConvertSettings) -> tuple[int, int]:
    """Return the bytes of a row in its shard's pages, and beside them; none for an unusable picture."""
    try:
        jpeg = to_stored(sample.picture, settings.image).jpeg
    except BadSampleError:
        return 0, 0
    captions = max(len(sample.captions), mode == "pairs")
    texts = "".join((sample.uri, sample.key, sample.group or "", *sample.captions))
    picture = 1 if sample.tar_at is not None and jpeg is sample.picture else len(jpeg)
    in_pages = picture + 4 * captions * (settings.context_length or CONTEXTS[-1])
    return in_pages, RECORD.itemsize + _PIECE * (1 + min(captions, 2)) + len(texts.encode())
