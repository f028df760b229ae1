"""Pairs of samples with similar pictures by the run's features, and which samples represent others.

The pairs are candidates for near-duplicates. Up to EXACT_SAMPLES every pair is compared, in products of blocks. Beyond,
faiss looks for the nearest in an index. A cluster's members agree with its representative, so that chains do not join.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ....trainer.errors import ConfigError
from .. import AnyArray, Bools, Float32s, Int64s, OnDone, silent
from ..features.features_file import FeaturesFile

if TYPE_CHECKING:
    import faiss

EXACT_SAMPLES = 1_000_000
MIN_SIMILARITY = 0.9
"""Cosine similarity of candidates."""
MAX_SIMILAR = 8
"""Candidates per sample at most, the most similar ones."""
_QUERIES = 1 << 14
"""Samples compared with all others in one pass over the file, at most: 64 MB of similarities a block."""
_TRAINING_ROWS = 1 << 18
"""Samples by which the index chooses its cells."""
_CELLS_VISITED = 16
_REPRESENTATIVES = 1024
"""Compared with each sample of a crowd, so that time does not grow with the square of its samples."""
Star = tuple[Int64s, Int64s]
"""Samples that another one represents, and that one, int64 [k] each."""


class SimilarPairs(NamedTuple):
    """Pairs of samples, `first` < `second`."""

    first: Int64s
    second: Int64s
    similarity: Float32s
    """Cosine similarity of the features of the pictures."""

    def of(self, which: AnyArray) -> SimilarPairs:
        """Return chosen pairs, by a mask or by indices."""
        return SimilarPairs(self.first[which], self.second[which], self.similarity[which])

    @staticmethod
    def joined(parts: Sequence[SimilarPairs]) -> SimilarPairs:
        return SimilarPairs(*map(np.concatenate, zip(*parts, strict=True)))


Confirm = Callable[[SimilarPairs], SimilarPairs]
"""Candidates -> the confirmed ones."""
NO_PAIRS = SimilarPairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def similar_pairs(features: FeaturesFile, left_out: Bools, scratch: Path) -> Iterator[tuple[int, SimilarPairs]]:
    """Yield the number of samples done and their pairs, block by block; from an index, a pair may come twice.

    A sample has up to MAX_SIMILAR candidates, those of similarity MIN_SIMILARITY or more. left_out: bool [n], samples
    to ignore. scratch: directory for the index, which takes 2 d + 8 bytes per sample and is removed at the end.
    Raises ConfigError if an index is needed and faiss is missing, RunError for a damaged file.
    """
    if features.samples <= EXACT_SAMPLES:
        yield from _compared(features, left_out)
        return
    with TemporaryDirectory(prefix=".index-", dir=scratch) as folder:
        yield from _searched(features, left_out, Path(folder))


def most_similar(features: FeaturesFile, sample_id: int, others: Int64s) -> SimilarPairs:
    """Return the pairs of a sample and those of `others`, int64 [m], that are candidates, as in `similar_pairs`."""
    similarity = features.rows(others)[:, 0] @ features.rows(np.array([sample_id]))[0, 0]
    nearest = np.argsort(-similarity, kind="stable")[:MAX_SIMILAR]
    nearest = nearest[similarity[nearest] >= MIN_SIMILARITY]
    ids = others[nearest]
    return SimilarPairs(np.minimum(ids, sample_id), np.maximum(ids, sample_id), similarity[nearest])


def _compared(features: FeaturesFile, left_out: Bools) -> Iterator[tuple[int, SimilarPairs]]:
    at_once = max(1024, min(_QUERIES, features.samples // 32))  # some progress also where there are few samples
    for start in range(0, features.samples, at_once):
        stop = min(start + at_once, features.samples)
        queries = _pictures(features, start, stop)
        best = NO_PAIRS
        # A pair is compared once: by its first sample.
        for first, block in features.blocks(start):
            similarity = queries @ block[:, 0].T
            rows, columns = np.nonzero(similarity >= MIN_SIMILARITY)
            found = SimilarPairs(start + rows, first + columns, similarity[rows, columns])
            pairs = SimilarPairs.joined([best, _usable(found, left_out)])
            order = np.lexsort((pairs.second, -pairs.similarity, pairs.first))  # of ties, the lowest ids
            sorted_first = pairs.first[order]
            rank = np.arange(len(order)) - np.searchsorted(sorted_first, sorted_first)
            best = pairs.of(order[rank < MAX_SIMILAR])
        yield stop, best


def _searched(features: FeaturesFile, left_out: Bools, folder: Path) -> Iterator[tuple[int, SimilarPairs]]:
    index = build_index(features, folder)
    for start in range(0, features.samples, _QUERIES):
        stop = min(start + _QUERIES, features.samples)
        similarity, ids = index.search(_pictures(features, start, stop), MAX_SIMILAR + 1)
        rows, columns = np.nonzero((similarity >= MIN_SIMILARITY) & (ids >= 0))
        found = SimilarPairs(start + rows, ids[rows, columns], similarity[rows, columns])
        # A sample may be among another's nearest and not the other way round; then the pair comes from one end only.
        ends = np.sort(np.stack([found.first, found.second]), axis=0)
        yield stop, _usable(SimilarPairs(ends[0], ends[1], found.similarity), left_out)


def build_index(features: FeaturesFile, folder: Path) -> faiss.IndexIVFScalarQuantizer:
    """Return an index of all pictures' features, float16, by inner product; its lists are a file in `folder`.

    Raises ConfigError if faiss is missing.
    """
    try:
        import faiss
    except ImportError:
        cure = "pip install 'thermopile[neighbours]'"
        raise ConfigError(f"a search among more than {EXACT_SAMPLES:,} samples needs faiss: {cure}") from None
    cells = max(1, min(1 << 14, int(4 * features.samples**0.5)))
    flat, half, product = faiss.IndexFlatIP(features.dim), faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexIVFScalarQuantizer(flat, features.dim, cells, half, product)
    drawn = np.random.default_rng(0).choice(features.samples, min(features.samples, _TRAINING_ROWS), replace=False)
    index.train(np.ascontiguousarray(features.rows(np.sort(drawn))[:, 0]))
    # The lists are not in memory, and not from a file that someone else could have written.
    lists = faiss.OnDiskInvertedLists(cells, index.code_size, str(folder / "lists"))
    index.replace_invlists(lists, True)
    lists.this.disown()  # type: ignore[attr-defined]  # the index frees them
    for start in range(0, features.samples, _TRAINING_ROWS):
        index.add(_pictures(features, start, min(start + _TRAINING_ROWS, features.samples)))
    index.nprobe = _CELLS_VISITED
    return index


def _pictures(features: FeaturesFile, start: int, stop: int) -> Float32s:
    """Return the features of pictures start … stop - 1, float32 [stop - start, d]."""
    found = np.empty((stop - start, features.dim), np.float32)
    for first, block in features.blocks(start, stop):
        found[first - start : first - start + len(block)] = block[:, 0]
    return found


def _usable(pairs: SimilarPairs, left_out: Bools) -> SimilarPairs:
    return pairs.of((pairs.first < pairs.second) & ~left_out[pairs.first] & ~left_out[pairs.second])


def star(ids: Int64s, group: Int64s, score: Float32s) -> Star:
    """Return the members of each group but its representative: the lowest score, float32 [n], of equals the lowest id.

    ids, group: int64 [m].
    """
    order = np.lexsort((ids, score[ids], group))
    ids, is_first = ids[order], np.diff(group[order], prepend=-1) != 0
    return ids[~is_first], ids[is_first][np.cumsum(is_first) - 1][~is_first]


def represent(
    near: SimilarPairs, score: Float32s, features: FeaturesFile, confirm: Confirm, on_progress: OnDone = silent
) -> Int64s:
    """Return the representative of every sample, int64 [n]: itself, or one that a confirmed pair links it with.

    Samples in `near`, the confirmed pairs, are walked by ascending score, float32 [n], then id: each joins the first
    representative that it is linked with, or becomes one. In a crowd, a sample has candidates among a few others only:
    without such a link it is first compared with the most similar ones among the representatives of the samples that
    it is linked with, and the first _REPRESENTATIVES of all that pairs connect it with.
    on_progress: called with the samples walked, and how many there are.
    """
    from scipy.sparse import coo_array  # late, as few inspections need it
    from scipy.sparse.csgraph import connected_components

    representative = np.arange(features.samples)
    ids, places = np.unique(np.concatenate(near[:2]), return_inverse=True)
    if not len(ids):
        return representative
    ends = np.split(places, 2)
    graph = coo_array((np.ones(len(ends[0]), np.int8), (ends[0], ends[1])), shape=(len(ids), len(ids))).tocsr()
    graph = graph + graph.T
    _, crowd = connected_components(graph, directed=False)
    walked_at: dict[int, int] = {}
    """Representative -> when it was walked."""
    firsts: defaultdict[int, list[int]] = defaultdict(list)
    """Crowd -> its first representatives."""
    for done, place in enumerate(np.lexsort((ids, score[ids])).tolist()):
        sample_id, others = int(ids[place]), firsts[crowd[place]]
        linked = ids[graph.indices[graph.indptr[place] : graph.indptr[place + 1]]]
        if others and walked_at.keys().isdisjoint(linked.tolist()):
            theirs = [one for one in representative[linked].tolist() if one in walked_at]
            candidates = np.array(list(dict.fromkeys([*others, *theirs])))
            linked = np.concatenate(confirm(most_similar(features, sample_id, candidates))[:2])
        found = min(walked_at.keys() & linked.tolist(), key=walked_at.__getitem__, default=sample_id)
        representative[sample_id] = found
        if found == sample_id:
            walked_at[sample_id] = done
            if len(others) < _REPRESENTATIVES:
                others.append(sample_id)
        on_progress(done + 1, len(ids))
    return representative
