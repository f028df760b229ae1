"""History of single samples: their rows of the state at every snapshot of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...state_store import Snapshot, StateReader
from ...state_store.schema import VISITS
from ...trainer.errors import ConfigError
from .details import read_rows
from .run import Inspection
from .survey import Side
from .through_time import read_every_snapshot


class StateAt(NamedTuple):
    """A sample's row at one snapshot."""

    snapshot: Snapshot
    values: dict[str, float | int]
    """Column of the state -> value: the fields, `visits`, `last_step`. log_s is -inf while visits is 0."""


@dataclass(frozen=True)
class History:
    """One sample through all snapshots of a run."""

    sample_id: int
    states: list[StateAt]
    """Oldest first; empty if the run has no snapshot."""
    ranks: dict[str, float]
    """Side -> share of the visited samples with a lower tau at the inspected snapshot, 0 … 1. Empty if the sample
    was not visited or no survey was given."""


def read_histories(
    inspection: Inspection, sample_ids: Sequence[int], notes: list[str], sides: Sequence[Side] = ()
) -> list[History]:
    """Read samples at every snapshot, in the order of the ids, each once. `sides`: from a survey, to rank by.

    A snapshot that is damaged, or that the run deletes meanwhile, is left out and noted.
    Raises ConfigError for an id that neither the state nor the dataset has.
    """
    _check(inspection, sample_ids)
    reader, wanted = inspection.reader, sorted(set(sample_ids))
    if reader is None:
        return [History(sample_id, [], {}) for sample_id in dict.fromkeys(sample_ids)]

    def read(reader: StateReader) -> tuple[Snapshot, dict[int, dict[str, float | int]]]:
        return reader.snapshot, read_rows(reader, wanted)

    found = read_every_snapshot(inspection.run.state, read, notes)
    histories = []
    for sample_id in dict.fromkeys(sample_ids):
        states = [StateAt(snapshot, rows[sample_id]) for snapshot, rows in found]
        inspected = [state.values for state in states if state.snapshot.id == reader.snapshot.id]
        histories.append(History(sample_id, states, _ranks(inspected[0], sides) if inspected else {}))
    return histories


def _check(inspection: Inspection, sample_ids: Sequence[int]) -> None:
    known = inspection.reader or inspection.dataset
    if known is None:
        return
    samples = known.samples if isinstance(known, StateReader) else known.n
    if unknown := [sample_id for sample_id in sample_ids if not 0 <= sample_id < samples]:
        raise ConfigError(
            f"no such sample: {', '.join(map(str, unknown))}; the run has {samples:,} samples, "
            f"with ids 0 … {samples - 1}"
        )


def _ranks(values: dict[str, float | int], sides: Sequence[Side]) -> dict[str, float]:
    if not values[VISITS]:
        return {}
    return {side.name: side.tau.share_below(values[f"{side.name}/tau"]) for side in sides}
