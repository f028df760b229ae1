"""Check a snapshot: read every chunk and validate every value, one block at a time."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..storage.arrays import Bools, Uint32s
from ..storage.mixed_rows import MixedRows
from ..storage.selection import SelectionError
from .errors import DamagedChunkError
from .history import Snapshot
from .reader import ADVICE, StateReader
from .schema import LAST_STEP, VISITS

MAX_PROBLEMS = 20
"""Maximum problems listed per column; the rest are counted."""
MAX_IDS = 5
"""Maximum sample ids named per problem."""


@dataclass(frozen=True)
class Problem:
    """A fault of a column, in one chunk or in the whole array."""

    what: str
    chunk: int | None = None
    rows: int = 0
    """Number of affected rows in the chunk; 0 if the problem does not concern rows."""
    first_ids: tuple[int, ...] = ()


@dataclass
class ColumnReport:
    name: str
    dtype: str
    rows: int = 0
    """Readable rows."""
    unseen: int = 0
    """Readable rows known to have 0 visits."""
    lowest: float | None = None
    highest: float | None = None
    """Range of the finite values; None without finite values."""
    problems: list[Problem] = field(default_factory=list)
    problems_not_listed: int = 0

    @property
    def sound(self) -> bool:
        return not self.problems

    def add(self, problem: Problem) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
        else:
            self.problems_not_listed += 1

    def count(self, values: NDArray[Any], visits: Uint32s | None) -> None:
        self.rows += len(values)
        self.unseen += 0 if visits is None else int((visits == 0).sum())
        if len(finite := values[np.isfinite(values)]):
            lowest, highest = finite.min().item(), finite.max().item()
            self.lowest = lowest if self.lowest is None else min(self.lowest, lowest)
            self.highest = highest if self.highest is None else max(self.highest, highest)


@dataclass(frozen=True)
class SnapshotReport:
    """Findings for one snapshot. `notes` say which checks were impossible, and why."""

    snapshot: Snapshot
    columns: list[ColumnReport]
    other_problems: list[str]
    """Problems of the snapshot as a whole."""
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.other_problems and all(column.sound for column in self.columns)


def check_snapshot(reader: StateReader, bounds: dict[str, float], on_progress: Callable[[int], None]) -> SnapshotReport:
    """Read a whole snapshot, one block in memory at a time, and report on every column.

    bounds: the run's `tau_min` and `tau_max`, if known. Calls on_progress with the number of rows checked so far.
    Columns with a wrong shape, dtype or chunking are not read. Raises SnapshotNotFoundError if it is deleted meanwhile.
    """
    reader, selection = reader.of_rows(), reader.selection
    made_for, written_for = reader.dataset_fingerprint, reader.snapshot.dataset_fingerprint
    others = [f"the state is for dataset {made_for[:12]}…, but this snapshot is for {written_for[:12]}…"]
    columns = [_open_column(reader, name) for name in reader.columns]
    readable = [column for column in columns if column.sound]
    for start in range(0, reader.samples, reader.block_rows):
        stop = min(start + reader.block_rows, reader.samples)
        block = {column.name: _read(reader, column, start, stop) for column in readable}
        visits = block.get(VISITS)
        used = selection.are_used(np.arange(start, stop)) if isinstance(selection, MixedRows) else slice(None)
        for column in readable:
            if (values := block[column.name]) is None:
                continue
            column.count(values[used], None if visits is None else visits[used])
            for what, at_fault in _faults(reader, column.name, values, visits, bounds):
                if len(places := np.flatnonzero(at_fault)):
                    named = places[:MAX_IDS] + start
                    ids = tuple((named if selection is None else selection.ids_at(named)).tolist())
                    column.add(Problem(what, start // reader.block_rows, len(places), ids))
        on_progress(stop)
    problems = others if made_for != written_for else []
    if selection is not None:
        try:
            selection.verify()
        except SelectionError as error:
            problems.append(str(error))
    return SnapshotReport(reader.snapshot, columns, problems)


def _open_column(reader: StateReader, name: str) -> ColumnReport:
    """Compare an array's metadata with what the store expects."""
    report = ColumnReport(name, "float32" if name in reader.fields else "uint32")
    try:
        array = reader.stored(name)
    except Exception as error:  # noqa: BLE001 (damaged metadata can fail in any way, and must be reported)
        report.add(Problem(f"array {name!r} is missing, or its metadata is damaged: {error!r}"))
        return report
    for what, have, want in (
        ("shape", array.shape, (reader.samples,)),
        ("dtype", str(array.dtype), report.dtype),
        ("chunks", array.chunks, (reader.block_rows,)),
    ):
        if have != want:
            report.add(Problem(f"array {name!r}: its {what} is {have}, but should be {want}"))
    return report


def _read(reader: StateReader, column: ColumnReport, start: int, stop: int) -> NDArray[Any] | None:
    try:
        return reader.rows(start, stop, [column.name])[column.name]
    except DamagedChunkError as error:
        column.add(Problem(str(error).removesuffix(f" {ADVICE}"), chunk=start // reader.block_rows))
        return None


def _faults(
    reader: StateReader, name: str, values: NDArray[Any], visits: Uint32s | None, bounds: Mapping[str, float]
) -> Iterator[tuple[str, Bools]]:
    """Yield each kind of fault in a block and the faulty rows, bool [rows]."""
    if name == LAST_STEP:
        yield f"later than the snapshot's step {reader.snapshot.step:,}", values > reader.snapshot.step
        if visits is not None:
            yield "never visited, but with a last step", (visits == 0) & (values > 0)
            if not reader.has_carried_rows:
                yield "visited, but without a last step", (visits > 0) & (values == 0)
    if name not in reader.fields:
        return
    # A field holds its initial value until the first visit; only until then may it be non-finite.
    initial = reader.initial[name]
    fresh, finite = values == np.float32(initial), np.isfinite(values)
    yield "not finite", ~finite & ~fresh
    if visits is not None:
        yield f"never visited, but not at the initial value {initial:g}", (visits == 0) & finite & ~fresh
        if not math.isfinite(initial):
            yield f"visited, but still {initial:g}", (visits > 0) & fresh
    # Compare in float32, as the objective clamps: the float32 nearest to a bound may lie beyond it.
    of_tau = bounds if name.split("/")[-1] == "tau" else {}
    if (lowest := of_tau.get("tau_min")) is not None:
        yield f"below tau_min {lowest:g}", finite & ~fresh & (values < np.float32(lowest))
    if (highest := of_tau.get("tau_max")) is not None:
        yield f"above tau_max {highest:g}", finite & ~fresh & (values > np.float32(highest))
