"""Single samples: their rows of the samples table and of the state, at one snapshot and at all of a run's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ....pipeline.dataset.samples_table import PLACE_IN_SHARD
from ....state_store.history import Snapshot
from ....state_store.reader import StateReader
from ....state_store.schema import VISITS
from .. import silent
from ..opening import Inspection, check_ids
from .kinds import KIND_NAMES
from .survey import Survey
from .through_time import read_every_snapshot

StateRow = dict[str, float | int]
"""Column of the state -> value: the fields, `visits`, `last_step`. log_s is -inf while visits is 0."""


class StateAt(NamedTuple):
    """A sample's row at one snapshot."""

    snapshot: Snapshot
    values: StateRow


@dataclass(frozen=True)
class InspectedSample:
    sample_id: int
    state: StateRow
    """At the inspected snapshot; empty before the first one."""
    table: dict[str, Any]
    """Column of the samples table -> value: uri, key, caption, group, …; empty without the dataset."""
    history: list[StateAt] = field(default_factory=list)
    """Oldest first; empty if the run has no snapshot, if only the inspected one was read."""
    ranks: dict[str, float] = field(default_factory=dict)
    """Side -> share of the visited samples with a lower tau at the inspected snapshot, 0 … 1. Empty if the sample
    was not visited or no survey was given."""
    kind: str | None = None
    """By the state alone. None without a survey, if its kinds say too little, or if the run does not train on it."""


def read_samples(inspection: Inspection, sample_ids: Iterable[int]) -> dict[int, InspectedSample]:
    """Return samples at the inspected snapshot by id, 0 … n - 1, each once.

    Raises DatasetError, DamagedChunkError, SnapshotNotFoundError.
    """
    ids = sorted(set(sample_ids))
    rows = inspection.dataset.rows(ids) if inspection.dataset else [{} for _ in ids]
    for row in rows:
        row.pop(PLACE_IN_SHARD, None)
    state = read_rows(inspection.reader, ids, inspection.columns) if inspection.reader else {}
    return {id: InspectedSample(id, state.get(id, {}), row) for id, row in zip(ids, rows, strict=True)}


def read_histories(
    inspection: Inspection, sample_ids: Sequence[int], survey: Survey | None = None
) -> list[InspectedSample]:
    """Read samples at every snapshot, in the order of the ids, each once. `survey`: for ranks and kinds.

    A snapshot that is damaged, or that the run deletes meanwhile, is left out and noted.
    Raises ConfigError for an id that neither the state nor the dataset has, and as `read_samples` does.
    """
    reader, dataset = inspection.reader, inspection.dataset
    count = reader.samples if reader else dataset.n if dataset else None
    if count is not None:
        check_ids(sample_ids, count)
    samples, kinds, ids = read_samples(inspection, sample_ids), dict[int, str](), [*dict.fromkeys(sample_ids)]
    if reader:
        kept = np.array([id for id in ids if reader.is_kept(id, id + 1).all()], np.int64)
        not_kept = f"is not among the {reader.kept:,} that the run trains on."
        inspection.notes.extend(f"Sample {id} {not_kept}" for id in ids if id not in kept)
        if survey and survey.kinds and survey.kinds.worth_showing:
            codes = survey.kinds.rules.kinds(reader.rows_at(kept, survey.kinds.rules.columns), kept)
            kinds = {id: KIND_NAMES[code] for id, code in zip(kept.tolist(), codes, strict=True)}

    def read(reader: StateReader) -> tuple[Snapshot, dict[int, StateRow]]:
        return reader.snapshot, read_rows(reader, list(samples), reader.columns)

    found = read_every_snapshot(inspection, read, silent) if reader else []
    taus, histories = {side.name: side.tau for side in survey.sides} if survey else {}, list[InspectedSample]()
    for sample in (samples[id] for id in ids):
        history = [StateAt(snapshot, rows[sample.sample_id]) for snapshot, rows in found]
        ranked = taus if sample.state.get(VISITS, 1) else {}
        ranks = {side: tau.share_below(sample.state[f"{side}/tau"]) for side, tau in ranked.items()}
        histories.append(replace(sample, history=history, ranks=ranks, kind=kinds.get(sample.sample_id)))
    return histories


def read_rows(reader: StateReader, sample_ids: Sequence[int], columns: Sequence[str]) -> dict[int, StateRow]:
    """Return rows of the state by id."""
    found = reader.rows_at(np.array(sample_ids, np.int64), columns)
    values = zip(*(column.tolist() for column in found.values()), strict=True)
    return {id: dict(zip(found, row, strict=True)) for id, row in zip(sample_ids, values, strict=True)}
