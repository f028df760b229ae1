"""Findings of a state check, for a table, as lines and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..state_store import Snapshot
    from ..state_store.history import UnreadableSnapshot

MAX_PROBLEMS = 20
"""Problems listed per column; the rest are counted."""
MAX_IDS = 5
"""Sample ids named per problem."""


@dataclass(frozen=True)
class Problem:
    """Something wrong with one column, in one chunk, or with the array as a whole."""

    column: str
    what: str
    chunk: int | None = None
    rows: int = 0
    """Number of affected rows in the chunk; 0 if the problem is not about rows."""
    first_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.rows:
            return self.what
        ids = ", ".join(map(str, self.first_ids)) + (", …" if self.rows > len(self.first_ids) else "")
        noun = "row" if self.rows == 1 else "rows"
        return f"array {self.column!r}, chunk {self.chunk}: {self.rows:,} {noun} {self.what}; ids {ids}"


@dataclass
class ColumnReport:
    """Findings for one column."""

    name: str
    dtype: str
    rows: int = 0
    """Rows that could be read."""
    unseen: int = 0
    """Those of them known to have 0 visits."""
    lowest: float = math.inf
    highest: float = -math.inf
    """Range of the finite values; inf … -inf if there are none."""
    problems: list[Problem] = field(default_factory=list)
    not_listed: int = 0

    @property
    def sound(self) -> bool:
        return not self.problems

    @property
    def range(self) -> str:
        return f"{self.lowest:.4g} … {self.highest:.4g}" if self.lowest <= self.highest else "–"

    @property
    def verdict(self) -> str:
        if self.sound:
            return "sound"
        problems = len(self.problems) + self.not_listed
        return "1 problem" if problems == 1 else f"{problems:,} problems"

    def add(self, problem: Problem) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)
        else:
            self.not_listed += 1

    def count(self, values: NDArray[Any], visits: NDArray[np.uint32] | None) -> None:
        self.rows += len(values)
        self.unseen += 0 if visits is None else int((visits == 0).sum())
        finite = values[np.isfinite(values)]
        if len(finite):
            self.lowest = min(self.lowest, finite.min().item())
            self.highest = max(self.highest, finite.max().item())


@dataclass(frozen=True)
class SnapshotReport:
    """Findings for one snapshot. `notes` say what could not be checked, and why."""

    snapshot: Snapshot
    columns: list[ColumnReport]
    other_problems: list[str]
    """Problems of the snapshot as a whole."""
    notes: list[str]

    @property
    def sound(self) -> bool:
        return not self.other_problems and all(column.sound for column in self.columns)


def report_to_json(report: SnapshotReport) -> dict[str, Any]:
    return {
        **snapshot_to_json(report.snapshot),
        "sound": report.sound,
        "columns": [_column_json(column) for column in report.columns],
        "other_problems": report.other_problems,
        "notes": report.notes,
    }


def _column_json(column: ColumnReport) -> dict[str, Any]:
    finite = math.isfinite(column.lowest)
    return {
        "name": column.name,
        "dtype": column.dtype,
        "rows": column.rows,
        "unseen": column.unseen,
        "lowest": column.lowest if finite else None,
        "highest": column.highest if finite else None,
        "sound": column.sound,
        "problems": [
            {"what": problem.what, "chunk": problem.chunk, "rows": problem.rows, "first_ids": problem.first_ids}
            for problem in column.problems
        ],
        "problems_not_listed": column.not_listed,
    }


def snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "tag": snapshot.tag,
        "step": snapshot.step,
        "epoch": snapshot.epoch,
        "written_at": snapshot.written_at.isoformat(),
        "bytes_written": snapshot.bytes_written,
        "id": snapshot.id,
        "config_hash": snapshot.config_hash,
        "dataset_fingerprint": snapshot.dataset_fingerprint,
    }


def unreadable_to_json(snapshot: UnreadableSnapshot) -> dict[str, Any]:
    return {"tag": snapshot.tag, "id": snapshot.id, "file": snapshot.file, "reason": snapshot.reason}
