"""The number of shards of a source, and the samples of each in their order."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ...storage.arrays import Int64s

MAX_SHARD_ROWS = 131_072
MIN_SHARD_ROWS, MIN_SHARD_BYTES = 1_024, 4 << 20
"""FFCV pads header and end to whole pages of 2 MiB: smaller files would be mostly padding."""
MANY_SHARDS = 128
"""Enough shards to keep many processes busy, few enough to open at once."""
WINDOW_ROWS, WINDOW_BYTES = 2_048, 512 << 20
"""Samples are mixed within windows of this many, or of this many bytes if that is reached first."""


def shard_count(samples: int, stored_bytes: int | None) -> int:
    """Return a power of two, so that equal shards divide evenly among most numbers of processes."""
    wanted = max(1, samples // MIN_SHARD_ROWS)
    if stored_bytes is not None:
        wanted = max(1, min(wanted, stored_bytes // MIN_SHARD_BYTES))
    return max(min(MANY_SHARDS, 1 << (wanted.bit_length() - 1)), -(-samples // MAX_SHARD_ROWS))


def listings(
    samples: int, selection: Int64s | None, chunks: Int64s | None, seed: int, shards: int, *, picture_bytes: int = 0
) -> Iterator[Int64s]:
    """Yield the source indices of every shard in row order, int64 [rows of the shard].

    Sources are often sorted by class, and blocks of state are ranges of ids, so the listing is permuted before it is
    cut. If a source is read in chunks (see Source.chunks), whole chunks are permuted and cut into shards, and samples
    are permuted within windows of whole chunks that hold at least WINDOW_ROWS or WINDOW_BYTES. Each chunk is then read
    about once: its samples stay close to each other, but not in order.

    A source in chunks needs a shard's memory, others four bytes a sample.

    samples: number of samples in the source. selection: sorted indices to convert; None for all.
    chunks: prefix sums of the chunks' sizes. picture_bytes: average size of a picture in the source.
    """
    rng, count = np.random.default_rng(seed), samples if selection is None else len(selection)
    cuts = np.array([shard * count // shards for shard in range(shards + 1)])
    if chunks is None:
        places = np.arange(count, dtype=np.uint32 if count <= 1 << 32 else np.int64)
        rng.shuffle(places)
        for start, end in pairwise(cuts.tolist()):
            piece = places[start:end].astype(np.int64)
            yield piece if selection is None else selection[piece]
        return
    # Places of the chunks' first samples among the selected ones.
    first = chunks if selection is None else np.searchsorted(selection, chunks)
    order = np.argsort(rng.permutation(len(chunks) - 1))
    order = order[np.diff(first)[order] > 0]
    ends = np.cumsum([0, *np.diff(first)[order]])  # in the permuted listing
    # Each cut is moved to the nearest chunk boundary, unless that makes a shard empty or too large.
    above = np.searchsorted(ends, cuts)
    below = np.maximum(above - 1, 0)
    moved = np.where(ends[above] - cuts < cuts - ends[below], ends[above], ends[below])
    sizes, window = np.diff(moved), min(WINDOW_ROWS, WINDOW_BYTES // max(picture_bytes, 1))
    for start, end in pairwise((moved if sizes.min() > 0 and sizes.max() <= MAX_SHARD_ROWS else cuts).tolist()):
        held, mixed = [], []
        begun, ended = int(np.searchsorted(ends, start, side="right")) - 1, int(np.searchsorted(ends, end))
        for place in range(begun, ended):
            piece = np.arange(max(start, ends[place]), min(end, ends[place + 1])) + first[order[place]] - ends[place]
            held.append(piece if selection is None else selection[piece])
            if sum(map(len, held)) >= window or place == ended - 1:
                mixed.append(rng.permutation(np.concatenate(held)))
                held = []
        yield np.concatenate(mixed)


def in_runs(count: int, most: int, run: int = 100) -> Int64s:
    """Return at most `most` of `count` places, sorted: all, or evenly spaced runs of neighbours, which are cheap to
    read."""
    if count <= most:
        return np.arange(count)
    starts = np.linspace(0, count - run, most // run).astype(np.int64)
    return (starts[:, None] + np.arange(run)).ravel()
