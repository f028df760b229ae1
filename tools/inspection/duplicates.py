"""Duplicates among a run's samples: exact copies, and near ones whose pixels agree once aligned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ...files import open_regular, refuse_link, written_aside
from ...pipeline.dataset import Dataset
from ...pipeline.dataset_index import FINGERPRINT
from ...trainer.errors import RunError
from .exact_copies import exact_copies
from .features_file import FeaturesFile
from .picture_agreement import EDGE, MAX_DIFFERENCE, MIN_CORRELATION, NO_AGREEMENT, Agreement, agreement, prepare
from .similar_pairs import MIN_SIMILARITY, NO_PAIRS, Pairs, similar_pairs

DUPLICATES = "duplicates.parquet"
"""Name of the file in RUN/report."""
THRESHOLDS = {"similarity": MIN_SIMILARITY, "correlation": MIN_CORRELATION, "difference": MAX_DIFFERENCE}
"""What near duplicates keep to: at least, at least, at most."""
EXACT, NEAR = "exact", "near"
_PAIRS_AT_ONCE = 256
MAX_PAIRS = 1 << 28
"""Read from a file: some gigabytes of memory."""

OnProgress = Callable[[str, int, int], None]
"""Task, done, total."""


class Clusters(NamedTuple):
    """Samples that are duplicates of others, m of them."""

    sample_ids: NDArray[np.int64]
    """int64 [m], ascending."""
    cluster: NDArray[np.int64]
    """int64 [m]: the lowest id of the cluster of each."""


NO_CLUSTERS = Clusters(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Duplicates:
    """Pairs of duplicates, sorted by cluster and ids. Arrays have one element per pair."""

    pairs: Pairs
    """similarity: NaN for exact copies, whose features need no comparison."""
    is_exact: NDArray[np.bool_]
    agreement: Agreement
    """How well the aligned pictures agree; exact copies have correlation 1 and difference 0."""
    cluster: NDArray[np.int64]
    """Lowest sample id of the cluster: samples connected by pairs."""
    compared: int
    """Candidates whose pixels were compared."""
    samples: int

    @property
    def sizes(self) -> dict[int, int]:
        """Return the number of samples of each cluster, the largest first."""
        names, counts = np.unique(
            _members(self.pairs.first, self.pairs.second, self.cluster).cluster, return_counts=True
        )
        order = np.argsort(-counts, kind="stable")
        return dict(zip(names[order].tolist(), counts[order].tolist(), strict=True))

    def members(self, clusters: list[int]) -> dict[int, list[int]]:
        """Return the ids of the samples of these clusters, ascending."""
        ids, of = _members(self.pairs.first, self.pairs.second, self.cluster)
        return {cluster: ids[of == cluster].tolist() for cluster in clusters}


def find_duplicates(
    dataset: Dataset, features: FeaturesFile, scratch: Path,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Duplicates:  # fmt: skip
    """Look for duplicates among all samples.

    Exact copies have the same JPEG. Near duplicates are similar by their features and agree in their pixels but for a
    scale of a few per cent, a shift, brightness, contrast and encoding: a correlation of MIN_CORRELATION or more and a
    difference of at most MAX_DIFFERENCE. Memory: 9 bytes per sample, and 40 per pair found. scratch: a directory.
    Raises DatasetError, RunError, OSError, ConfigError as similar_pairs. A dataset of format 1 has no exact copies.
    """
    n = dataset.n
    copies, originals = np.empty(0, np.int64), np.empty(0, np.int64)
    if dataset.index.format > 1:
        copies, originals = exact_copies(dataset, lambda done: on_progress("checksums", done, 2 * n))
    is_copy = np.zeros(n, np.bool_)
    is_copy[copies] = True
    near, agreed, compared = [NO_PAIRS], [NO_AGREEMENT], 0
    with Thumbnails(dataset) as thumbnails:
        for done, candidates in similar_pairs(features, is_copy, scratch):
            for start in range(0, len(candidates.first), _PAIRS_AT_ONCE):
                pairs = candidates.of(np.arange(start, min(start + _PAIRS_AT_ONCE, len(candidates.first))))
                found = agreement(*thumbnails.of(pairs))
                near.append(pairs.of(found.same))
                agreed.append(found.of(found.same))
            compared += len(candidates.first)
            on_progress("similar pictures", done, n)
    exact = Pairs(originals, copies, np.full(len(copies), np.nan, np.float32))
    return _sorted(exact, Pairs.joined(near), Agreement.joined(agreed), compared, n)


class Thumbnails:
    """Decodes the pictures of pairs: the largest central square, reduced to what `agreement` compares."""

    def __init__(self, dataset: Dataset) -> None:
        from ...pipeline.augment import Recipe
        from ...pipeline.loading.ffcv_loader import ViewMaker

        plain = Recipe(scale=(1, 1), ratio=(1, 1), flip=0, mean=(0, 0, 0), std=(1 / 255,) * 3)
        self._maker = ViewMaker(dataset, recipe=plain, image_size=EDGE, views=1)

    def of(self, pairs: Pairs) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the prepared pictures of the first and of the second samples, float32 [p, 32, 32] each.

        Raises DatasetError for a picture that does not decode.
        """
        ids, places = np.unique(np.concatenate([pairs.first, pairs.second]), return_inverse=True)
        pictures = prepare(self._maker.make(ids, epoch=0).views[0].numpy())
        first, second = np.split(places, 2)
        return pictures[first], pictures[second]

    def __enter__(self) -> Thumbnails:
        return self

    def __exit__(self, *_: object) -> None:
        self._maker.close()


def _sorted(exact: Pairs, near: Pairs, agreed: Agreement, compared: int, samples: int) -> Duplicates:
    # An index may find a pair from both ends.
    _, once = np.unique(near.first * samples + near.second, return_index=True)
    perfect = Agreement(np.ones(len(exact.first), np.float32), np.zeros(len(exact.first), np.float32))
    pairs, agreed = Pairs.joined([exact, near.of(once)]), Agreement.joined([perfect, agreed.of(once)])
    cluster = clusters(pairs.first, pairs.second)
    order = np.lexsort((pairs.second, pairs.first, cluster))
    is_exact = np.arange(len(cluster)) < len(exact.first)
    return Duplicates(pairs.of(order), is_exact[order], agreed.of(order), cluster[order], compared, samples)


def clusters(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each pair the lowest id of its cluster, int64 [pairs]: samples connected through pairs."""
    from scipy.sparse import coo_array  # late, as few inspections need it
    from scipy.sparse.csgraph import connected_components

    ids, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    if not len(ids):
        return np.empty(0, np.int64)
    one, other = places.reshape(2, -1)
    graph = coo_array((np.ones(len(one), np.int8), (one, other)), shape=(len(ids), len(ids)))
    _, label = connected_components(graph, directed=False)
    lowest = np.full(label.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, label, ids)
    return np.asarray(lowest[label[one]])


def _members(first: NDArray[np.int64], second: NDArray[np.int64], cluster: NDArray[np.int64]) -> Clusters:
    """Return the samples in pairs, and their clusters."""
    ids, places = np.unique(np.concatenate([first, second]), return_index=True)
    return Clusters(ids, np.tile(cluster, 2)[places])


def read_clusters(path: Path, dataset: Dataset) -> Clusters:
    """Read the clusters in a file of write_duplicates.

    Raises RunError if it is missing, damaged or another dataset's, NotRegularFileError if it is a link, OSError.
    """
    refuse_link(path)
    try:
        with open_regular(path) as file, pq.ParquetFile(file) as parquet:
            if parquet.metadata.num_rows > MAX_PAIRS:
                raise _unusable(path, f"it has {parquet.metadata.num_rows:,} pairs, more than {MAX_PAIRS:,}")
            table = parquet.read(columns=["cluster", "first_id", "second_id"])
        columns = [column.to_numpy() for column in table.columns]
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; make it with `thermopile inspect RUN --duplicates`") from None
    except (pa.ArrowException, ValueError) as error:
        raise _unusable(path, " ".join(str(error).split())[:200]) from error
    if table.schema.types != [pa.int64()] * 3 or any(column.null_count for column in table.columns):
        raise _unusable(path, "its ids are not whole numbers")
    if (table.schema.metadata or {}).get(FINGERPRINT.encode()) != dataset.index.fingerprint.encode():
        raise _unusable(path, f"it is not of the dataset {dataset.place}")
    if any(len(column) and not 0 <= column.min() <= column.max() < dataset.n for column in columns):
        raise _unusable(path, f"it names samples that {dataset.place} does not have")
    cluster, first, second = columns
    return _members(first, second, cluster)


def _unusable(path: Path, why: str) -> RunError:
    return RunError(f"{path} cannot be used: {why}. Make it again with `thermopile inspect RUN --duplicates`")


def write_duplicates(path: Path, found: Duplicates, fingerprint: str) -> None:
    """Write one row per pair as Parquet, atomically; docs/formats.md describes the columns. Raises OSError."""
    reasons = np.where(found.is_exact, EXACT, NEAR)
    similarity = pa.array(found.pairs.similarity, pa.float32(), mask=found.is_exact)
    table = pa.table({
        "cluster": found.cluster, "first_id": found.pairs.first, "second_id": found.pairs.second,
        "reason": pa.array(reasons, pa.string()), "similarity": similarity,
        "correlation": found.agreement.correlation, "difference": found.agreement.difference,
    })  # fmt: skip
    metadata = {f"thermopile.threshold.{name}": str(value) for name, value in THRESHOLDS.items()}
    with written_aside(path) as file:
        pq.write_table(table.replace_schema_metadata(metadata | {FINGERPRINT: fingerprint}), file)
