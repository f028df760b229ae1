"""Choose what to train on next by what a run says of its samples: drop misfits, thin duplicates, cap classes, weigh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..files import written_aside
from ..pipeline.dataset_index import FINGERPRINT
from ..state_store.schema import VISITS
from ..trainer.errors import ConfigError, RunError
from ..trainer.selecting import SAMPLE_ID, WEIGHT, selected_ids
from .inspection.correlation import NO_GROUP
from .inspection.duplicates import NO_CLUSTERS, Clusters, read_clusters
from .inspection.findings import read_again
from .inspection.groups import CLASS_COLUMN, check_columns, codes_of
from .inspection.kinds import MISFIT, read_rules
from .inspection.predicted import refuse_other_dataset
from .inspection.rows_export import check_target
from .inspection.run import Inspection
from .inspection.state_blocks import read_blocks
from .progress import task_bars
from .report.duplicates import DUPLICATES

KEPT, LISTED, IS_MISFIT, DUPLICATE, CLASS_FULL, NOT_TRAINED_ON = range(6)
REASONS = ("kept", "listed", "misfit", "duplicate", "class_full", "not_trained_on")
"""By code. A dropped sample has the first reason that applies."""
ROWS_AT_ONCE = 1 << 20

Ids = NDArray[np.int64]
OnProgress = Callable[[str, int, int], None]
"""Task, samples done, total."""


@dataclass(frozen=True)
class CurationRules:
    """What to drop, in this order, and how to weigh what is kept; None and 0 leave a rule out."""

    drop: Path | None = None
    """Parquet file with the ids of samples to drop."""
    misfits: int | None = None
    """Drop as many misfits, those with the highest log s first; all if there are fewer."""
    per_cluster: int | None = None
    """Keep as many samples of a cluster of duplicates, those with the lowest log s: they fit their captions best."""
    per_class: int | None = None
    """Keep as many samples of a class, drawn at random."""
    class_column: str = CLASS_COLUMN
    """Column of the samples table whose values are the classes, or `folder`."""
    tau_power: float = 0.0
    """A sample's weight is its tau to this power: below 0 the rare ones count more, above 0 the common ones."""


@dataclass(frozen=True)
class Curation:
    """What became of each of the dataset's n samples."""

    reasons: NDArray[np.int8]
    """int8 [n]: places in REASONS."""
    misfits: Ids
    """int64: dropped misfits, by rank."""
    clusters: Clusters
    weights: NDArray[np.float32] | None
    """float32 [kept], mean 1, by ascending id; None without a power of tau."""
    fingerprint: str
    """Of the dataset."""
    tag: str
    """Of the snapshot."""

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of samples by reason, in order, without reasons that no sample has."""
        counts = np.bincount(self.reasons, minlength=len(REASONS)).tolist()
        return {name: count for name, count in zip(REASONS, counts, strict=True) if count}


def curate_run(
    run: Path, keep: Path, rules: CurationRules, *, at: str, data: Path | None, overwrite: bool
) -> tuple[Curation, Path]:
    """Apply the rules to a run and write both files, with progress on stderr; return also the path of the dropped ones.

    Raises as `curate`, `read_run`, `read_clusters`; ConfigError if a file cannot be written there.
    """
    dropped = keep.with_name(f"{keep.stem}.dropped.parquet")
    for path in (keep, dropped):
        check_target(path, [".parquet"], overwrite=overwrite)
    refuse_other_dataset("curate", run, data)

    def read(inspection: Inspection) -> tuple[Inspection, Curation]:
        clusters = NO_CLUSTERS
        if rules.per_cluster and inspection.dataset:
            clusters = read_clusters(inspection.run.report / DUPLICATES, inspection.dataset)
        with task_bars() as on_progress:
            return inspection, curate(inspection, rules, clusters, on_progress)

    _, found = read_again(read, run, at, data)
    write_curation(found, keep, dropped)
    return found, dropped


def curate(
    inspection: Inspection, rules: CurationRules, clusters: Clusters, on_progress: OnProgress = lambda *_: None
) -> Curation:
    """Apply the rules to a snapshot's samples. Takes 17 bytes of memory per sample, and 24 more with `per_class`.

    clusters: duplicates to thin, if the rules say so. Raises RunError without a snapshot, or if nothing would be kept;
    ConfigError if the state lacks what a rule needs, or for bad ids; DatasetError, DamagedChunkError,
    SnapshotNotFoundError if the run deletes the snapshot meanwhile.
    """
    reader, dataset = inspection.reader, inspection.dataset
    if reader is None or dataset is None:
        raise RunError(f"curating needs a snapshot and the run's dataset. {' '.join(inspection.notes)}")
    check_columns(dataset, [rules.class_column])
    state = _State.read(inspection, rules, on_progress)
    reasons = np.where(state.is_kept, KEPT, NOT_TRAINED_ON).astype(np.int8)
    if rules.drop:
        listed = selected_ids(rules.drop, dataset.index, "drop")
        reasons[listed[reasons[listed] == KEPT]] = LISTED
    misfits = np.flatnonzero(state.is_misfit & (reasons == KEPT))
    misfits = misfits[np.argsort(-state.score[misfits], kind="stable")][: rules.misfits or 0]
    reasons[misfits] = IS_MISFIT
    if rules.per_cluster:
        alive = reasons[clusters.sample_ids] == KEPT
        ids, of = clusters.sample_ids[alive], clusters.cluster[alive]
        reasons[ids[_beyond(rules.per_cluster, of, state.score[ids])]] = DUPLICATE
    if rules.per_class:
        codes, names = codes_of(
            dataset, rules.class_column, lambda done: on_progress("reading classes", done, dataset.n)
        )
        if not names:
            raise ConfigError(f"no sample of {dataset.path} has a {rules.class_column} to cap by")
        ids = np.flatnonzero((reasons == KEPT) & (codes != NO_GROUP))
        drawn = np.random.default_rng(inspection.config.seed).random(len(ids), np.float32)
        reasons[ids[_beyond(rules.per_class, codes[ids], drawn)]] = CLASS_FULL
    kept = reasons == KEPT
    if not kept.any():
        raise RunError("nothing would be kept; choose weaker rules")
    weights = None if state.weights is None else _of_mean_1(state.weights[kept])
    return Curation(reasons, misfits, clusters, weights, reader.dataset_fingerprint, reader.snapshot.tag)


@dataclass(frozen=True)
class _State:
    """What the rules need of the state of n samples."""

    is_kept: NDArray[np.bool_]
    """bool [n]: the run trains on it."""
    is_misfit: NDArray[np.bool_]
    """bool [n]: by the state alone."""
    score: NDArray[np.float32]
    """float32 [n]: sum of log s over the sides; 0 without log s."""
    weights: NDArray[np.float32] | None
    """float32 [n]: the geometric mean of tau over the sides, to the power; NaN without a visit or a usable tau."""

    @classmethod
    def read(cls, inspection: Inspection, rules: CurationRules, on_progress: OnProgress) -> _State:
        reader = inspection.reader
        assert reader is not None
        n, name = reader.samples, inspection.config.objective.name
        kinds = read_rules(inspection, lambda done: on_progress("reading tau", done, n))
        taus = [f"{side}/tau" for side in inspection.sides] if rules.tau_power else []
        if rules.misfits and not kinds.log_s:
            raise ConfigError(f"the objective {name} keeps no log s, by which misfits are found; leave them in")
        if rules.tau_power and not taus:
            raise ConfigError(
                f"the objective {name} keeps no temperature per sample to weigh by; leave --tau-power out"
            )
        is_kept, is_misfit = np.zeros((2, n), np.bool_)
        score, weights = np.zeros(n, np.float32), np.ones(n if taus else 0, np.float32)
        for block, rows in read_blocks(reader, list(dict.fromkeys([*kinds.columns, *taus]))):
            here = slice(block.start, block.stop)
            is_kept[here] = reader.is_kept(block.start, block.stop)
            is_misfit[here], score[here] = kinds.kinds(rows) == MISFIT, kinds.score(rows)
            if taus:
                weights[here] = _weights(rows[VISITS] > 0, [rows[tau] for tau in taus], rules.tau_power)
            on_progress("reading the state", block.stop, n)
        return cls(is_kept, is_misfit, score, weights if taus else None)


def _weights(visited: NDArray[np.bool_], taus: list[NDArray[np.float32]], power: float) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):  # a row may be damaged, and an objective's own tau may be 0
        mean_log = np.mean([np.log(tau.astype(np.float64)) for tau in taus], axis=0)
    return np.exp(power * np.where(visited & np.isfinite(mean_log), mean_log, np.nan))


def _of_mean_1(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale weights [m]; those that are not known get the mean of the others."""
    known = np.isfinite(weights)
    mean = weights[known].mean(dtype=np.float64) if known.any() else 1.0
    return np.where(known, weights / mean, 1).astype(np.float32)


def _beyond(most: int, group: NDArray[np.integer], key: NDArray[np.floating]) -> Ids:
    """Return the places of all but the `most` lowest keys of each group, both [m]; of ties, the first stay."""
    order = np.lexsort((key, group))
    _, first, sizes = np.unique(group[order], return_index=True, return_counts=True)
    place: Ids = np.arange(len(order)) - np.repeat(first, sizes)
    return order[place >= most]


def write_curation(found: Curation, keep: Path, dropped: Path) -> None:
    """Write the kept samples, and the dropped ones with the reasons, as Parquet by ascending id. Raises OSError.

    Each file replaces another atomically. The kept ones come last: where they are, both are whole.
    """
    metadata = {FINGERPRINT: found.fingerprint, "thermopile.tag": found.tag}
    ids = np.flatnonzero((found.reasons != KEPT) & (found.reasons != NOT_TRAINED_ON))
    rank, cluster = np.zeros(len(ids), np.int64), np.full(len(ids), -1)
    rank[np.searchsorted(ids, found.misfits)] = np.arange(1, len(found.misfits) + 1)
    is_thinned = found.reasons[found.clusters.sample_ids] == DUPLICATE
    cluster[np.searchsorted(ids, found.clusters.sample_ids[is_thinned])] = found.clusters.cluster[is_thinned]
    reasons = pa.DictionaryArray.from_arrays(found.reasons[ids], list(REASONS)).dictionary_decode()
    table = pa.table({
        SAMPLE_ID: ids, "reason": reasons,
        "rank": pa.array(rank, mask=rank == 0), "cluster": pa.array(cluster, mask=cluster < 0),
    })  # fmt: skip
    with written_aside(dropped) as file:
        pq.write_table(table.replace_schema_metadata(metadata), file)
    columns: dict[str, NDArray[Any]] = {SAMPLE_ID: np.flatnonzero(found.reasons == KEPT)}
    columns |= {} if found.weights is None else {WEIGHT: found.weights}
    with written_aside(keep) as file:
        pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file, use_dictionary=False,
                       column_encoding={SAMPLE_ID: "DELTA_BINARY_PACKED"}, row_group_size=ROWS_AT_ONCE)  # fmt: skip
