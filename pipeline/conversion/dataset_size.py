"""Estimate a dataset's size before it is made, from samples that are stored in memory as the conversion does."""

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import islice

import numpy as np

from ..errors import BadSampleError
from ..row_records import MAX_BYTES, RECORD
from ..sources import Read, Sample
from ..sources.webdataset import WebDatasetSource
from .caption_lengths import CONTEXTS
from .images import to_stored
from .plan import MAX_SHARD_ROWS, MIN_SAMPLE_BYTES, AnySource, ConvertSettings, Selection, shard_count

SAMPLES, RUN, SECONDS = 200, 10, 1.0
"""Samples to store at most, neighbours among them where others are slow to read, and seconds after which to end."""
_ROW, _PIECE = 32, 24
"""Bytes in FFCV's tables of a row, and of each of its pieces: picture, first caption, further captions."""


def dataset_bytes(source: AnySource, selection: Selection, settings: ConvertSettings, stored: int | None) -> int | None:
    """Return about how many bytes a dataset will have, two standard errors above the mean; None if that is unknown.

    stored: bytes of the selected pictures in the source, or of all tars. Errors are left for the conversion to raise.
    """
    found, until = [(0, 0, 0)], math.inf
    with suppress(Exception):
        for _, sample, done, *_ in _drawn(source, selection, settings.seed):
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
        end += each + (-end % MAX_BYTES if end % MAX_BYTES + each > MAX_BYTES else 0)  # no row crosses a page
    if isinstance(source, WebDatasetSource):
        whole = source.stored_bytes()
        reserved = whole // MIN_SAMPLE_BYTES
    else:
        whole = reserved = len(selection) if isinstance(selection, np.ndarray) else len(source)
    times = whole / done.sum()
    shards = shard_count(round(times * (len(found) - 1)), stored)
    tables = np.ceil(min(MAX_SHARD_ROWS, reserved / shards) * _ROW / MAX_BYTES)
    pages = np.ceil(margin * times * paged.sum() * end / rows.sum() / shards / MAX_BYTES)
    return int(shards * (tables + pages) * MAX_BYTES + margin * times * beside.sum())


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


def _drawn(source: AnySource, selection: Selection, seed: int) -> Iterator[Read]:
    """Yield samples drawn from the whole source; of tars, the first ones of some, and none of those in a bucket."""
    rng = np.random.default_rng(seed)
    if isinstance(source, WebDatasetSource) and source.is_remote:
        return  # each sample would take requests of its own
    if isinstance(source, WebDatasetSource):
        for tar in (tars := rng.permutation(len(source.tars))[: SAMPLES // RUN].tolist()):
            yield from islice(source.from_start(tar), SAMPLES // len(tars))
        return
    places, run = selection if isinstance(selection, np.ndarray) else range(len(source)), 1
    if source.chunks() is not None:
        run, source = RUN, deepcopy(source)  # as workers get it, whose cache is soon freed
    starts = rng.choice(-(-len(places) // run), min(SAMPLES // run, -(-len(places) // run)), replace=False)
    for start in (starts * run).tolist():
        yield from source.read(np.array(places[start : start + run]))
