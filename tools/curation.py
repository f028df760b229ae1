"""Choose what to train on next by a run's state: drop misfits, thin duplicates, cap classes, weigh."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..pipeline.dataset.index import FINGERPRINT, FINGERPRINT_COLUMN
from ..pipeline.opening import Mixture
from ..state_store.schema import VISITS
from ..storage.files import written_aside
from ..storage.place import Place, Places
from ..trainer.errors import ConfigError, RunError
from ..trainer.metrics.step_report import percent
from ..trainer.run.selection_files import SAMPLE_ID, WEIGHT, selected_ids
from .inspection import Bools, Float32s, Int64s, OnTask, silent
from .inspection.duplicates.finding import NO_CLUSTERS, Clusters, read_clusters
from .inspection.findings import read_again
from .inspection.opening import Inspection, read_blocks
from .inspection.rows_export import KEEP, check_target, of_dataset, tagged_ids
from .inspection.temperatures.correlation import NO_GROUP
from .inspection.temperatures.groups import CLASS_COLUMN, check_columns, codes_of
from .inspection.temperatures.kinds import NEAR_FLOOR, KindRules
from .inspection.temperatures.misfits import HALF as HALF
from .inspection.temperatures.misfits import misfit_sentences, misfits, read_scores
from .progress import task_bars

ALWAYS_KEPT, KEPT, LISTED, IS_MISFIT, DUPLICATE, CLASS_FULL, NOT_TRAINED_ON = range(-1, 6)
REASONS = ("kept", "listed", "misfit", "duplicate", "class_full", "not_trained_on")
"""By code, from KEPT on. A dropped sample has the first reason that applies."""
ROWS_PER_GROUP = 1 << 20


@dataclass(frozen=True)
class CurationRules:
    """Rules that drop samples, in this order, and weigh the kept ones; None and 0 leave a rule out."""

    tags: Path | None = None
    """FiftyOne's samples.json, whose tags say what to drop, and what to keep whatever the other rules say."""
    drop: Path | None = None
    """Parquet file with the ids of samples to drop."""
    misfits: int | None = None
    """Drop this many samples at most, those with the highest log s over the whole run."""
    precision: float | None = None
    """Drop them only as far as their expected precision, 0 … 1, is no lower."""
    per_cluster: int | None = None
    """Keep at most this many samples of each cluster of duplicates: its representative, then those with the lowest
    log s, which fit their captions best. Samples with too few visits go first; without log s, the lowest ids stay."""
    per_class: int | None = None
    """Keep at most this many samples of each class, drawn at random."""
    class_column: str = CLASS_COLUMN
    """Column of the samples table whose values are the classes, or `folder`."""
    tau_power: float = 0.0
    """A sample's weight is its tau to this power: below 0 a low tau counts more, above 0 a high one."""


@dataclass(frozen=True)
class Curation:
    """The outcome for each of the n samples of an inspected run's dataset."""

    inspection: Inspection
    reasons: NDArray[np.int8]
    """int8 [n]: places in REASONS."""
    misfits: Int64s
    """int64: those dropped by the rule on misfits, by rank."""
    clusters: Clusters
    weights: Float32s | None
    """float32 [kept], mean 1, by ascending id; None without a power of tau."""
    notes: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of samples by reason, in order."""
        return dict(zip(REASONS, np.bincount(self.reasons, minlength=len(REASONS)).tolist(), strict=True))

    @property
    def dropped(self) -> Int64s:
        """Return the ids of the dropped samples, ascending."""
        return np.flatnonzero((self.reasons != KEPT) & (self.reasons != NOT_TRAINED_ON))


def curate_run(
    run: Place, keep: Path, rules: CurationRules, *, at: str, data: Places | None, overwrite: bool
) -> tuple[Curation, Path]:
    """Apply the rules to a run and write both files, with progress on stderr; return also the path of the dropped ones.

    Raises as `curate`, `read_run`; ConfigError if a file cannot be written there, OSError.
    """
    check_target(keep, [".parquet"], overwrite=overwrite)
    dropped = keep.with_name(f"{keep.stem}.dropped.parquet")
    check_target(dropped, [".parquet"], overwrite=overwrite)
    if rules.drop and rules.drop.resolve() in (keep.resolve(), dropped.resolve()):
        raise ConfigError(f"{rules.drop} would be replaced; choose another name for --keep")

    def read(inspection: Inspection) -> Curation:
        with task_bars() as on_progress:
            return curate(inspection, rules, on_progress)

    found = read_again(read, run, at, data)
    write_curation(found, keep, dropped)
    return found, dropped


def curate(inspection: Inspection, rules: CurationRules, on_progress: OnTask = silent) -> Curation:
    """Apply the rules to a snapshot's samples. Takes about 24 bytes of memory per sample, and 50 more with `per_class`.

    Raises RunError without a snapshot, as `read_clusters`, or if nothing would be kept; ConfigError if the state lacks
    what a rule needs, or for bad ids; DatasetError, DamagedChunkError, SnapshotNotFoundError if the run deletes the
    snapshot meanwhile.
    """
    reader, dataset = inspection.reader, inspection.dataset
    if reader is None or dataset is None:
        raise RunError(f"curating needs a snapshot and the run's dataset. {' '.join(inspection.notes)}")
    clusters = read_clusters(inspection.run, dataset) if rules.per_cluster else NO_CLUSTERS
    check_columns(dataset, [rules.class_column])
    is_kept, is_new, at_floor, log_tau = _state(inspection, rules, on_progress)
    reasons = np.where(is_kept, np.int8(KEPT), np.int8(NOT_TRAINED_ON))
    if rules.tags:
        for tag, ids in tagged_ids(rules.tags, dataset).items():  # of both tags, the first counts
            reasons[ids[reasons[ids] == KEPT]] = ALWAYS_KEPT if tag == KEEP else LISTED
    if rules.drop:
        listed = selected_ids(rules.drop, dataset, "drop")
        reasons[listed[reasons[listed] == KEPT]] = LISTED
    dropped = _misfits(inspection, rules, on_progress)  # which may add notes
    reasons[dropped := dropped[reasons[dropped] == KEPT]] = IS_MISFIT
    notes = inspection.notes[:]
    if rules.per_cluster:
        alive = reasons[clusters.sample_ids] == KEPT
        ids, of = clusters.sample_ids[alive], clusters.cluster[alive]
        score = np.where(ids == of, -np.inf, read_scores(inspection)[1][ids])
        reasons[ids[_beyond(rules.per_cluster, of, score)]] = DUPLICATE
    if rules.per_class:
        codes, names = codes_of(dataset, rules.class_column, partial(on_progress, "reading classes"))
        if not names:
            raise ConfigError(f"no sample of {dataset.place} has a {rules.class_column} to cap by")
        ids = np.flatnonzero((reasons == KEPT) & (codes != NO_GROUP))
        drawn = np.random.default_rng(inspection.config.seed).random(dataset.n, np.float32)  # whatever was dropped
        reasons[ids[_beyond(rules.per_class, codes[ids], drawn[ids])]] = CLASS_FULL
    reasons[reasons == ALWAYS_KEPT] = KEPT
    kept = reasons == KEPT
    if not kept.any():
        raise RunError("nothing would be kept; choose weaker rules")
    weights = _weights(log_tau[kept], at_floor[kept], rules.tau_power) if rules.tau_power else None
    if number := int(at_floor[kept].sum()):
        notes.append(f"Samples at tau_min keep the weight 1: {number:,}. A bound says nothing about its sample.")
    if few := int(is_new[kept].sum()):
        least = KindRules.of(inspection).least_visits
        visits = f"{least} visit{'s' * (least > 1)}"
        notes.append(f"Kept samples with fewer than {visits}, too few to be judged, or planted: {few:,}.")
    return Curation(inspection, reasons, dropped, clusters, weights, notes)


def _misfits(inspection: Inspection, rules: CurationRules, on_progress: OnTask) -> Int64s:
    """Return the misfits to drop. Raises ConfigError without an order, or if it is not known how many are wrong."""
    if not rules.misfits and not rules.precision:
        return np.empty(0, np.int64)
    name, kinds = inspection.config.objective.name, KindRules.of(inspection)
    if not kinds.log_s:
        raise ConfigError(f"the objective {name} keeps no log s, by which misfits are found; leave them in")
    if kinds.why_none:
        raise ConfigError(f"there are no misfits yet: {kinds.why_none}. Or leave --drop-misfits out")
    order, wrong, at_tau_min = misfits(inspection, on_progress)
    if rules.precision is None:
        return order[: rules.misfits]
    if wrong is None:
        raise ConfigError(f"{misfit_sentences(inspection, None, at_tau_min)[0]} Or give a number: --drop-misfits N")
    if not (longest := wrong.longest(rules.precision)):
        inspection.notes.append(
            f"No misfit is dropped: no list of them is known to have {percent(rules.precision)} of wrong captions."
        )
    return order[: rules.misfits][:longest]


def _state(inspection: Inspection, rules: CurationRules, on_progress: OnTask) -> tuple[NDArray[Any], ...]:
    """Return of n samples which the run trains on, which cannot be judged, with too few visits or planted, and which
    have a tau at tau_min, bool [n] each, and the mean of log tau over the sides, float32 [n], not finite without a
    usable one; the last two are 0 if no temperature is needed."""
    reader, kinds = inspection.state, KindRules.of(inspection)
    taus = [f"{side}/tau" for side in inspection.sides] if rules.tau_power else []
    if rules.tau_power and not taus:
        name = inspection.config.objective.name
        raise ConfigError(f"the objective {name} keeps no temperature per sample to weigh by; leave --tau-power out")
    is_kept, is_new, at_floor = np.zeros((3, reader.samples), np.bool_)
    lowest, log_tau = inspection.settings.get("tau_min") or np.inf, np.zeros(reader.samples, np.float32)
    for block, rows in read_blocks(reader, [VISITS, *taus]):
        here, visits = slice(block.start, block.stop), kinds.judged(rows, block)[VISITS]
        is_kept[here], is_new[here] = reader.is_kept(block.start, block.stop), visits < kinds.least_visits
        if taus:
            with np.errstate(divide="ignore", invalid="ignore"):  # a row may be damaged, and an objective's own tau 0
                mean = np.mean([np.log(rows[tau].astype(np.float64)) for tau in taus], axis=0)
            log_tau[here] = np.where(visits > 0, mean, np.nan)
            at_floor[here] = np.any([np.isclose(rows[tau], lowest, NEAR_FLOOR - 1) for tau in taus], axis=0)
        on_progress("reading the state", block.stop, reader.samples)
    return is_kept, is_new, at_floor, log_tau


def _weights(log_tau: Float32s, at_floor: Bools, power: float) -> Float32s:
    """Return exp(power · log_tau) with mean 1, [m]; where that is unknown or at a floor, 1. Raises RunError if none is
    left."""
    known = np.isfinite(log_tau) & ~at_floor
    if not known.any():
        lacks = "above tau_min, and a bound says nothing about its sample" if at_floor.any() else "yet"
        raise RunError(f"no kept sample has a temperature {lacks}; leave --tau-power out, or choose a later snapshot")
    exponents = power * log_tau[known].astype(np.float64)
    weights, of_known = np.ones(len(log_tau), np.float32), np.exp(exponents - exponents.max())
    weights[known] = of_known / of_known.mean()
    return weights


def _beyond(most: int, group: NDArray[np.integer], key: NDArray[np.floating]) -> Int64s:
    """Return the places of all but the `most` lowest keys of each group, both [m]; of ties, the first stay."""
    order = np.lexsort((key, group))
    _, first, sizes = np.unique(group[order], return_index=True, return_counts=True)
    place: Int64s = np.arange(len(order)) - np.repeat(first, sizes)
    return order[place >= most]


def write_curation(found: Curation, keep: Path, dropped: Path) -> None:
    """Write the kept samples, and the dropped ones with the reasons, as Parquet by ascending id. Raises OSError.

    Each file replaces another atomically, the kept ones last.
    """
    reader, dataset, ids = found.inspection.state, found.inspection.dataset, found.dropped
    metadata = {FINGERPRINT: reader.dataset_fingerprint, "thermopile.tag": reader.snapshot.tag}
    parts_of = dataset.parts_of if isinstance(dataset, Mixture) else lambda ids: {}
    rank, cluster = np.zeros(len(ids), np.int64), np.full(len(ids), -1)
    rank[np.searchsorted(ids, found.misfits)] = np.arange(1, len(found.misfits) + 1)
    is_thinned = found.reasons[found.clusters.sample_ids] == DUPLICATE
    cluster[np.searchsorted(ids, found.clusters.sample_ids[is_thinned])] = found.clusters.cluster[is_thinned]
    reasons = pa.DictionaryArray.from_arrays(found.reasons[ids], list(REASONS)).dictionary_decode()
    ranks, clusters = pa.array(rank, mask=rank == 0), pa.array(cluster, mask=cluster < 0)
    table = pa.table({SAMPLE_ID: ids, "reason": reasons, "rank": ranks, "cluster": clusters, **parts_of(ids)})
    with written_aside(dropped) as file:
        pq.write_table(of_dataset(table, metadata), file)
    ids = np.flatnonzero(found.reasons == KEPT)
    columns: dict[str, Any] = {SAMPLE_ID: ids, **parts_of(ids)}
    columns |= {} if found.weights is None else {WEIGHT: found.weights}
    table, encoding = of_dataset(pa.table(columns), metadata), {SAMPLE_ID: "DELTA_BINARY_PACKED"}
    how: dict[str, Any] = {"use_dictionary": [FINGERPRINT_COLUMN], "column_encoding": encoding}
    with written_aside(keep) as file:
        pq.write_table(table, file, row_group_size=ROWS_PER_GROUP, **how)
