"""Duplicates among a run's samples: exact copies, near ones whose pixels agree once aligned, and blank pictures."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ....pipeline.dataset.index import FINGERPRINT
from ....pipeline.opening import Dataset
from ....storage.files import open_regular, refuse_link, written_aside
from ....trainer.errors import RunError, one_line
from ....trainer.run_directory import RunDirectory
from .. import Float32s, Int64s, OnTask, silent
from ..features.features_file import FeaturesFile
from .same_pictures import MAX_DIFFERENCE, MIN_CORRELATION, Agreement, Thumbnails, blank_pictures, exact_copies
from .similar_pairs import MIN_SIMILARITY, NO_PAIRS, SimilarPairs, Star, represent, similar_pairs, star

DUPLICATES = "duplicates.parquet"
"""Name of the file in RUN/report."""
THRESHOLDS = {"similarity": MIN_SIMILARITY, "correlation": MIN_CORRELATION, "difference": MAX_DIFFERENCE}
"""Thresholds of near duplicates: lower, lower, upper."""
_METADATA = {f"thermopile.threshold.{name}".encode(): str(value).encode() for name, value in THRESHOLDS.items()}
EXACT, NEAR, BLANK = range(3)
REASONS = ("exact", "near", "blank")
"""By code."""
MAX_PAIRS = 1 << 28
"""Read from a file: some gigabytes of memory."""


class Clusters(NamedTuple):
    """Samples that are duplicates of others, m of them."""

    sample_ids: Int64s
    """int64 [m], ascending."""
    cluster: Int64s
    """int64 [m]: the representative of each, which is the same for all of a cluster."""


NO_CLUSTERS = Clusters(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Duplicates:
    """Pairs of duplicates, sorted by cluster and ids. Arrays have one element per pair."""

    pairs: SimilarPairs
    """similarity: NaN for exact copies and blank pictures, whose features need no comparison."""
    reason: NDArray[np.int8]
    """Places in REASONS. Exact copies and blank pictures are in pairs with their representative only."""
    agreement: Agreement
    """How well the aligned pictures agree; 1 and 0 for exact copies, NaN for blank pictures."""
    cluster: Int64s
    """Id of the sample that represents both; -1, last, if they have different representatives."""
    compared: int
    """Candidates whose pixels were compared."""
    samples: int

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of pairs by reason."""
        return dict(zip(REASONS, np.bincount(self.reason, minlength=len(REASONS)).tolist(), strict=True))

    @property
    def sizes(self) -> dict[int, int]:
        """Return the number of samples of each cluster, the largest first."""
        members = _members(self.pairs.first, self.pairs.second, self.cluster)
        names, counts = np.unique(members.cluster, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return dict(zip(names[order].tolist(), counts[order].tolist(), strict=True))

    def members(self, clusters: list[int]) -> dict[int, list[int]]:
        """Return the ids of the samples of these clusters: the representative, then the others, ascending."""
        ids, of = _members(self.pairs.first, self.pairs.second, self.cluster)
        return {cluster: [cluster, *ids[(of == cluster) & (ids != cluster)].tolist()] for cluster in clusters}


def find_duplicates(
    dataset: Dataset, features: FeaturesFile, score: Float32s, scratch: Path, on_progress: OnTask = silent
) -> Duplicates:
    """Look for duplicates among all samples.

    Exact copies have the same JPEG. Near duplicates are similar by their features and agree in their pixels up to a
    scale of a few per cent, a shift, brightness, contrast and encoding: a correlation of MIN_CORRELATION or more and a
    difference of at most MAX_DIFFERENCE. Blank pictures, of one colour, are duplicates of each other alone.
    score: float32 [n], the lowest of duplicates represents the others; if empty, ids decide. scratch: a directory.
    Memory: 45 bytes per sample, and 40 per pair found.
    Raises DatasetError, RunError, OSError, ConfigError as similar_pairs.
    """
    n = dataset.n
    score = score if len(score) else np.zeros(n, np.float32)
    copies, originals = exact_copies(dataset, partial(on_progress, "checksums"))
    flat = blank_pictures(dataset, partial(on_progress, "blank pictures"))
    blank = star(flat, np.zeros(len(flat), np.int64), score)
    left_out = np.zeros(n, np.bool_)
    left_out[flat] = True
    copies, originals = copies[~left_out[copies]], originals[~left_out[copies]]
    firsts = np.unique(originals)
    exact = star(np.concatenate([firsts, copies]), np.concatenate([firsts, originals]), score)
    left_out[exact[0]] = True
    near, agreed, compared = [NO_PAIRS], [Agreement(*np.empty((2, 0), np.float32))], 0
    with Thumbnails(dataset) as thumbnails:

        def confirmed(candidates: SimilarPairs) -> SimilarPairs:
            nonlocal compared
            compared += len(candidates.first)
            found = thumbnails.compared(candidates)
            near.append(candidates.of(found.same))
            agreed.append(found.of(found.same))
            return near[-1]

        for done, candidates in similar_pairs(features, left_out, scratch):
            confirmed(candidates)
            on_progress("similar pictures", done, n)
        on_walk = partial(on_progress, "clusters of duplicates")
        representative = represent(SimilarPairs.joined(near), score, features, confirmed, on_walk)
    of_near = Agreement(*map(np.concatenate, zip(*agreed, strict=True)))
    return _sorted(exact, blank, SimilarPairs.joined(near), of_near, representative, compared)


def _sorted(
    exact: Star, blank: Star, near: SimilarPairs, agreed: Agreement, representative: Int64s, compared: int
) -> Duplicates:
    samples = len(representative)
    # An index may find a pair from both ends.
    _, once = np.unique(near.first * samples + near.second, return_index=True)
    ends = np.concatenate([exact, blank, [near.first[once], near.second[once]]], axis=1)
    reason = np.repeat(np.array([EXACT, BLANK, NEAR], np.int8), [len(exact[0]), len(blank[0]), len(once)])
    figures = np.full((3, len(reason)), np.nan, np.float32)
    figures[1:, reason == EXACT] = [[1], [0]]
    figures[:, reason == NEAR] = np.stack([near.similarity, *agreed])[:, once]
    # Those that are no candidates are represented as the second one of their pair.
    one, other = np.where(reason == NEAR, representative[ends], representative[ends[1]])
    cluster = np.where(one == other, one, -1)
    first, second = np.sort(ends, axis=0)
    order = np.lexsort((second, first, cluster, cluster < 0))
    pairs = SimilarPairs(first, second, figures[0]).of(order)
    return Duplicates(pairs, reason[order], Agreement(*figures[1:]).of(order), cluster[order], compared, samples)


def _members(first: Int64s, second: Int64s, cluster: Int64s) -> Clusters:
    """Return the samples in pairs of a cluster, and their clusters."""
    is_in_one = cluster >= 0
    ids, places = np.unique(np.concatenate([first[is_in_one], second[is_in_one]]), return_index=True)
    return Clusters(ids, np.tile(cluster[is_in_one], 2)[places])


def read_clusters(run: RunDirectory, dataset: Dataset, most: int = MAX_PAIRS) -> Clusters:
    """Read the clusters in a run's file of write_duplicates, of up to `most` pairs.

    Raises RunError if it is missing, damaged or another dataset's, NotRegularFileError if it is a link, OSError.
    """
    refuse_link(path := run.report / DUPLICATES)
    cure = f"`thermopile inspect {quote(str(run.path))} --duplicates` makes it"

    def unusable(why: str) -> RunError:
        return RunError(f"{path} cannot be used: {why}; {cure} again")

    try:
        with open_regular(path) as file, pq.ParquetFile(file) as parquet:
            if parquet.metadata.num_rows > most:
                raise unusable(f"it has {parquet.metadata.num_rows:,} pairs, more than {most:,}")
            table = parquet.read(columns=["cluster", "first_id", "second_id"])
        table = table.filter(pc.is_valid(table["cluster"]))
        columns = [column.to_numpy() for column in table.columns]
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; {cure}") from None
    except (pa.ArrowException, ValueError, KeyError) as error:  # KeyError: a column is missing
        raise unusable(one_line(error)[:200].rstrip(".")) from error
    if table.schema.types != [pa.int64()] * 3 or any(column.null_count for column in table.columns):
        raise unusable("its ids are not whole numbers")
    metadata = table.schema.metadata or {}
    if metadata.get(FINGERPRINT.encode()) != dataset.index.fingerprint.encode():
        raise unusable(f"it is not of the dataset {dataset.place}")
    if any(len(column) and not 0 <= column.min() <= column.max() < dataset.n for column in columns):
        raise unusable(f"it names samples that {dataset.place} does not have")
    if not _METADATA.items() <= metadata.items():
        raise unusable("another version made it, by other thresholds")
    cluster, first, second = columns
    return _members(first, second, cluster)


def write_duplicates(path: Path, found: Duplicates, fingerprint: str) -> None:
    """Write one row per pair as Parquet, atomically; docs/run_files.md describes the columns. Raises OSError."""
    near, blank = found.reason == NEAR, found.reason == BLANK
    table = pa.table(
        {
            "cluster": pa.array(found.cluster, mask=found.cluster < 0),
            "first_id": found.pairs.first,
            "second_id": found.pairs.second,
            "reason": pa.DictionaryArray.from_arrays(found.reason, list(REASONS)).dictionary_decode(),
            "similarity": pa.array(found.pairs.similarity, mask=~near),
            "correlation": pa.array(found.agreement.correlation, mask=blank),
            "difference": pa.array(found.agreement.difference, mask=blank),
        }
    )
    with written_aside(path) as file:
        pq.write_table(table.replace_schema_metadata(_METADATA | {FINGERPRINT: fingerprint}), file)
