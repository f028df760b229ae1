"""Pairs of samples with similar pictures by the run's features: the candidates for near-duplicates.

Up to EXACT_SAMPLES every pair is compared, in products of blocks. Beyond, faiss looks for the nearest in an index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....trainer.errors import ConfigError
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


class SimilarPairs(NamedTuple):
    """Pairs of samples, `first` < `second`."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    similarity: NDArray[np.float32]
    """Cosine similarity of the features of the pictures."""

    def of(self, which: NDArray[Any]) -> SimilarPairs:
        """Return chosen pairs, by a mask or by indices."""
        return SimilarPairs(self.first[which], self.second[which], self.similarity[which])

    @staticmethod
    def joined(parts: Sequence[SimilarPairs]) -> SimilarPairs:
        return SimilarPairs(*map(np.concatenate, zip(*parts, strict=True)))


NO_PAIRS = SimilarPairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


def similar_pairs(
    features: FeaturesFile, left_out: NDArray[np.bool_], scratch: Path, exact_samples: int = EXACT_SAMPLES
) -> Iterator[tuple[int, SimilarPairs]]:
    """Yield the number of samples done and their pairs, block by block; from an index, a pair may come twice.

    A sample has up to MAX_SIMILAR candidates, those of similarity MIN_SIMILARITY or more. left_out: bool [n], samples
    to ignore. scratch: directory for the index, which takes 2 d + 8 bytes per sample and is removed at the end.
    Raises ConfigError if an index is needed and faiss is missing, RunError for a damaged file.
    """
    if features.samples <= exact_samples:
        yield from _compared(features, left_out)
        return
    with TemporaryDirectory(prefix=".index-", dir=scratch) as folder:
        yield from _searched(features, left_out, Path(folder))


def most_similar(features: FeaturesFile, sample_id: int, others: NDArray[np.int64]) -> SimilarPairs:
    """Return the pairs of a sample and those of `others`, int64 [m], that are candidates, as in `similar_pairs`."""
    similarity = features.rows(others)[:, 0] @ features.rows(np.array([sample_id]))[0, 0]
    nearest = np.argsort(-similarity, kind="stable")[:MAX_SIMILAR]
    nearest = nearest[similarity[nearest] >= MIN_SIMILARITY]
    ids = others[nearest]
    return SimilarPairs(np.minimum(ids, sample_id), np.maximum(ids, sample_id), similarity[nearest])


def _compared(features: FeaturesFile, left_out: NDArray[np.bool_]) -> Iterator[tuple[int, SimilarPairs]]:
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


def _searched(features: FeaturesFile, left_out: NDArray[np.bool_], folder: Path) -> Iterator[tuple[int, SimilarPairs]]:
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
        raise ConfigError(
            f"a search among more than {EXACT_SAMPLES:,} samples needs faiss: pip install 'thermopile[neighbours]'"
        ) from None
    cells = max(1, min(1 << 14, int(4 * features.samples**0.5)))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(features.dim), features.dim, cells, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
    )
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


def _pictures(features: FeaturesFile, start: int, stop: int) -> NDArray[np.float32]:
    """Return the features of pictures start … stop - 1, float32 [stop - start, d]."""
    found = np.empty((stop - start, features.dim), np.float32)
    for first, block in features.blocks(start, stop):
        found[first - start : first - start + len(block)] = block[:, 0]
    return found


def _usable(pairs: SimilarPairs, left_out: NDArray[np.bool_]) -> SimilarPairs:
    return pairs.of((pairs.first < pairs.second) & ~left_out[pairs.first] & ~left_out[pairs.second])
