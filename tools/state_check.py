"""Check a snapshot of the state: read every chunk and validate every value, one block at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pipeline.dataset_index import read_index
from ..pipeline.errors import DatasetError
from ..state_store import DamagedChunkError, StateReader
from ..state_store.chunks import ADVICE
from ..state_store.schema import LAST_STEP, VISITS
from ..trainer.config import TrainConfig
from .state_findings import MAX_IDS, ColumnReport, Problem, SnapshotReport


@dataclass(frozen=True)
class TauBounds:
    """Bounds of tau set by the run's objective; None if there is no such bound or it is unknown."""

    lowest: float | None = None
    highest: float | None = None


def check_snapshot(
    reader: StateReader, config: TrainConfig | None, on_progress: Callable[[int], None] = lambda done: None
) -> SnapshotReport:
    """Check a whole snapshot; config: the run's settings, if known.

    Calls on_progress with the number of rows checked so far.
    Raises SnapshotNotFoundError if the run deletes the snapshot meanwhile.
    """
    notes: list[str] = []
    tau = _tau_bounds(reader, config, notes)
    problems = _dataset_problems(reader, config, notes)
    return SnapshotReport(reader.snapshot, check_columns(reader, tau, on_progress), problems, notes)


def _tau_bounds(reader: StateReader, config: TrainConfig | None, notes: list[str]) -> TauBounds:
    if not any(_is_tau(name) for name in reader.fields):
        return TauBounds()
    if config is None:
        notes.append("No run settings were found beside the state, so tau was not checked against bounds.")
        return TauBounds()
    bounds = TauBounds(config.objective.settings.get("tau_min"), config.objective.settings.get("tau_max"))
    for bound, value in (("tau_min", bounds.lowest), ("tau_max", bounds.highest)):
        if value is None:
            notes.append(f"Objective {config.objective.name} has no {bound}, so tau was not checked against one.")
    return bounds


def _dataset_problems(reader: StateReader, config: TrainConfig | None, notes: list[str]) -> list[str]:
    made_for, written_for = reader.dataset_fingerprint, reader.snapshot.dataset_fingerprint
    problems = []
    if made_for != written_for:
        problems.append(f"the state is for dataset {_short(made_for)}, but this snapshot is for {_short(written_for)}")
    try:
        index = read_index(Path(config.data.path)) if config else None
    except DatasetError as error:
        notes.append(f"The run's dataset was not compared, because it cannot be read: {error}")
        return problems
    if config and index and index.fingerprint != made_for:
        problems.append(
            f"the state is for dataset {_short(made_for)} with {reader.samples:,} samples, but {config.data.path} "
            f"is {_short(index.fingerprint)} with {index.n:,}"
        )
    return problems


def _short(fingerprint: str) -> str:
    return f"{fingerprint[:12]}…"


def _is_tau(field_name: str) -> bool:
    return field_name.split("/")[-1] == "tau"


def check_columns(reader: StateReader, tau: TauBounds, on_progress: Callable[[int], None]) -> list[ColumnReport]:
    """Read a whole snapshot, one block in memory at a time, and report on every column.

    Calls on_progress with the number of rows checked so far. Columns with a wrong shape, dtype or chunking are not
    read. Raises SnapshotNotFoundError if the run deletes the snapshot meanwhile.
    """
    reports = {name: _open_column(reader, name) for name in reader.columns}
    readable = [report for report in reports.values() if report.sound]
    for start in range(0, reader.samples, reader.block_rows):
        block = range(start, min(start + reader.block_rows, reader.samples))
        visits = _read(reader, reports[VISITS], block) if reports[VISITS] in readable else None
        for report in readable:
            values = visits if report.name == VISITS else _read(reader, report, block)
            if values is not None:
                report.count(values, visits)
                _check_values(reader, report, values, visits, tau, block)
        on_progress(block.stop)
    return list(reports.values())


def _open_column(reader: StateReader, name: str) -> ColumnReport:
    """Compare an array's metadata with what the store expects."""
    wanted = "float32" if name in reader.fields else "uint32"
    report = ColumnReport(name, wanted)
    try:
        array = reader.array(name)
    except Exception as error:  # noqa: BLE001 (damaged metadata can fail in any way, and is what this looks for)
        report.add(Problem(name, f"array {name!r} is missing, or its metadata is damaged: {error!r}"))
        return report
    for what, have, want in (
        ("shape", array.shape, (reader.samples,)),
        ("dtype", str(array.dtype), wanted),
        ("chunks", array.chunks, (reader.block_rows,)),
    ):
        if have != want:
            report.add(Problem(name, f"array {name!r}: its {what} is {have}, but should be {want}"))
    return report


def _read(reader: StateReader, report: ColumnReport, block: range) -> NDArray[Any] | None:
    try:
        return reader.rows(block.start, block.stop, [report.name])[report.name]
    except DamagedChunkError as error:
        what = str(error).removesuffix(f" {ADVICE}")
        report.add(Problem(report.name, what, chunk=block.start // reader.block_rows))
        return None


def _check_values(
    reader: StateReader, report: ColumnReport, values: NDArray[Any], visits: NDArray[np.uint32] | None, tau: TauBounds,
    block: range,
) -> None:  # fmt: skip
    if report.name in reader.fields:
        bounds = tau if _is_tau(report.name) else TauBounds()
        faults = _field_faults(values, reader.initial[report.name], visits, bounds)
    elif report.name == LAST_STEP:
        faults = _last_step_faults(values, visits, reader.snapshot.step)
    else:
        return
    for what, at_fault in faults:
        places = np.flatnonzero(at_fault)
        if len(places):
            ids = tuple((places[:MAX_IDS] + block.start).tolist())
            report.add(Problem(report.name, what, block.start // reader.block_rows, len(places), ids))


def _field_faults(
    values: NDArray[np.float32], initial: float, visits: NDArray[np.uint32] | None, bounds: TauBounds
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """A field must be finite and hold its initial value until the first visit; a non-finite one only until then."""
    fresh = values == np.float32(initial)
    finite = np.isfinite(values)
    yield "not finite", ~finite & ~fresh
    if visits is not None:
        yield f"never visited, but not at the initial value {initial:g}", (visits == 0) & finite & ~fresh
        if not math.isfinite(initial):
            yield f"visited, but still {initial:g}", (visits > 0) & fresh
    # Compare in float32, as the objective clamps: the float32 nearest to a bound may lie beyond it.
    if bounds.lowest is not None:
        yield f"below tau_min {bounds.lowest:g}", finite & ~fresh & (values < np.float32(bounds.lowest))
    if bounds.highest is not None:
        yield f"above tau_max {bounds.highest:g}", finite & ~fresh & (values > np.float32(bounds.highest))


def _last_step_faults(
    last_step: NDArray[np.uint32], visits: NDArray[np.uint32] | None, step: int
) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    yield f"later than the snapshot's step {step:,}", last_step > step
    if visits is not None:
        yield "never visited, but with a last step", (visits == 0) & (last_step > 0)
        yield "visited, but without a last step", (visits > 0) & (last_step == 0)
