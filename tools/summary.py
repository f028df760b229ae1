"""A run's temperatures in a few lines: for the terminal, for the report's table, and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from .inspection import Inspection, RunState
from .temperatures import Side, Temperatures


class Row(NamedTuple):
    """One line of the summary table."""

    label: str
    cells: list[str]
    """One for each side."""


def facts(inspection: Inspection) -> list[tuple[str, str]]:
    """What was looked at, as pairs of a word and a text; texts hold paths as they are."""
    lines = [("run", str(inspection.run.path.resolve()))]
    path = inspection.dataset.path.resolve() if inspection.dataset else inspection.config.data.path
    lines.append(("dataset", str(path)))
    if state := inspection.state:
        snapshot = state.snapshot
        lines += [
            ("snapshot", f"{snapshot.tag} (step {snapshot.step:,}, epoch {snapshot.epoch}), "
                         f"written {snapshot.written_at:%Y-%m-%d %H:%M} UTC"),
            ("samples", f"{state.samples:,}, of which {share(state.share_visited)} visited"),
        ]  # fmt: skip
    return lines


def table(temperatures: Temperatures, state: RunState) -> list[Row]:
    """The figures of every side; of the sides, there is at least one."""
    sides = temperatures.sides
    summaries = [side.summary for side in sides]
    rows = [
        Row("mean", [tau(summary.mean) for summary in summaries]),
        Row("lowest", [tau(summary.min) for summary in summaries]),
        Row("5% quantile", [tau(summary.q05) for summary in summaries]),
        Row("median", [tau(summary.median) for summary in summaries]),
        Row("95% quantile", [tau(summary.q95) for summary in summaries]),
        Row("highest", [tau(summary.max) for summary in summaries]),
    ]
    if state.tau_min is not None:
        rows.append(Row(f"share at tau_min ({state.tau_min:g})", [share(s.share_at_tau_min) for s in summaries]))
    if state.tau_max is not None:
        rows.append(Row(f"share at tau_max ({state.tau_max:g})", [share(s.share_at_tau_max) for s in summaries]))
    if temperatures.classes:
        found = [temperatures.classes.correlation[side.name] for side in sides]
        rows.append(Row("Spearman, class size and mean tau", [correlation(c and c.spearman) for c in found]))
        rows.append(Row("the same, class labels permuted", [correlation(c and c.permuted) for c in found]))
    return rows


def to_json(inspection: Inspection, temperatures: Temperatures, report: Path) -> dict[str, Any]:
    """The summary as JSON values; None for what is not known, and its reason among the notes."""
    state, dataset = inspection.state, inspection.dataset
    snapshot = state and {
        "tag": state.snapshot.tag,
        "id": state.snapshot.id,
        "step": state.snapshot.step,
        "epoch": state.snapshot.epoch,
        "written_at": state.snapshot.written_at.isoformat(),
    }
    return {
        "run": str(inspection.run.path.resolve()),
        "dataset": str(dataset.path.resolve()) if dataset else None,
        "snapshot": snapshot,
        "samples": state and state.samples,
        "share_visited": state and state.share_visited,
        "tau_min": state and state.tau_min,
        "tau_max": state and state.tau_max,
        "classes": len(temperatures.classes.names) if temperatures.classes else None,
        "sides": {side.name: _side_to_json(side, temperatures) for side in temperatures.sides},
        "notes": temperatures.notes,
        "report": str(report.resolve()),
    }


def _side_to_json(side: Side, temperatures: Temperatures) -> dict[str, Any]:
    found = temperatures.classes and temperatures.classes.correlation[side.name]
    return {
        "label": side.label,
        "tau": side.summary._asdict(),
        "spearman": found.spearman if found else None,
        "spearman_permuted": found.permuted if found else None,
    }


def tau(value: float) -> str:
    return f"{value:.4f}"


def share(value: float | None) -> str:
    """A share, 0 … 1, in percent."""
    return "unknown" if value is None else f"{100 * value:.4g}%"


def correlation(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.2f}"
