"""A run's temperatures in a few lines: for the terminal, for the report's table, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...state_store import Snapshot
from .details import Details
from .distribution import Distribution
from .drift import Drift
from .embedding_map import EmbeddingMap
from .findings import Findings
from .groups import Groups
from .history import History
from .run import Inspection
from .survey import Side, Survey
from .through_time import QUANTILES as TIME_QUANTILES
from .through_time import ThroughTime

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SETTINGS = ("rho", "gamma", "eta", "tau_init", "tau_min", "tau_max")
_BARS = "▁▂▃▄▅▆▇█"
_SPARKLINE = 16


class Row(NamedTuple):
    """One line of the summary table."""

    label: str
    cells: list[str]
    """One for each side."""


def facts(inspection: Inspection, survey: Survey | None) -> list[tuple[str, str]]:
    """What was looked at, as pairs of a word and a text; texts hold paths as they are."""
    lines = [("run", str(inspection.run.path.resolve()))]
    path = inspection.dataset.path.resolve() if inspection.dataset else inspection.config.data.path
    lines.append(("dataset", str(path)))
    if inspection.reader and survey:
        snapshot = inspection.reader.snapshot
        lines += [
            ("snapshot", f"{snapshot.tag} (step {snapshot.step:,}, epoch {snapshot.epoch}), "
                         f"written {snapshot.written_at:%Y-%m-%d %H:%M} UTC"),
            ("samples", _coverage(survey)),
        ]  # fmt: skip
    lines.append(("objective", settings(inspection)))
    return lines


def settings(inspection: Inspection) -> str:
    """The objective and those of its settings by which temperatures move, as `isogclr: rho 2, gamma 0.8`."""
    objective = inspection.config.objective
    known = {name: objective.settings.get(name) for name in _SETTINGS}
    said = ", ".join(f"{name} {value:g}" for name, value in known.items() if value is not None)
    return f"{objective.name}: {said}" if said else objective.name


def _coverage(survey: Survey) -> str:
    """How many samples there are, and how often each was visited."""
    words = f"{survey.samples:,}, of which {share(survey.share_visited)} visited"
    if not survey.visited:
        return words
    low, high = survey.visits.quantile(0.05), survey.visits.quantile(0.95)
    if low == high:
        words += f", {low:,.0f} time{'s' * (low != 1)}"
    else:
        words += f", nine in ten of all {low:,.0f} to {high:,.0f} times"
    if survey.never_visited:
        more = ", …" if survey.samples - survey.visited > len(survey.never_visited) else ""
        words += f"; never: ids {', '.join(map(str, survey.never_visited))}{more}"
    return words


def table(inspection: Inspection, survey: Survey) -> list[Row]:
    """The figures of every side; of the sides, there is at least one."""
    taus, bounds = [side.tau for side in survey.sides], inspection.tau
    rows = [Row("mean", [tau(values.mean) for values in taus]), Row("lowest", [tau(values.min) for values in taus])]
    rows += [Row(_quantile_word(at), [tau(values.quantile(at)) for values in taus]) for at in QUANTILES]
    rows.append(Row("highest", [tau(values.max) for values in taus]))
    if (low := bounds.lowest) is not None:
        rows.append(Row(f"share at tau_min ({low:g})", [share(values.share_at_most(low)) for values in taus]))
    if (high := bounds.highest) is not None:
        rows.append(Row(f"share at tau_max ({high:g})", [share(values.share_at_least(high)) for values in taus]))
    for groups in survey.groups[:1]:
        found = [groups.correlation[side.name] for side in survey.sides]
        word = groups.word
        rows.append(Row(f"Spearman, {word} size and mean tau", [correlation(c and c.spearman) for c in found]))
        rows.append(Row("p-value", [p_value(c and c.p_value) for c in found]))
        rows.append(Row(f"the same, {word} labels permuted", [correlation(c and c.permuted) for c in found]))
    return rows


def sparkline(values: Distribution) -> str:
    """A histogram of one line of text, from the lowest to the highest value."""
    counts = values.histogram(values.edges(_SPARKLINE))
    most = max(1, int(counts.max()))
    # What is there at all is seen.
    return "".join(_BARS[-(-int(count) * (len(_BARS) - 1) // most)] if count else "·" for count in counts)


def to_json(findings: Findings, report: Path) -> dict[str, Any]:
    """The findings as JSON values; None for what is not known, and its reason among the notes."""
    inspection, survey = findings.inspection, findings.survey
    reader, dataset, objective = inspection.reader, inspection.dataset, inspection.config.objective
    return {
        "run": str(inspection.run.path.resolve()),
        "dataset": str(dataset.path.resolve()) if dataset else None,
        "snapshot": reader and _snapshot(reader.snapshot),
        "objective": {"name": objective.name} | {name: objective.settings.get(name) for name in _SETTINGS},
        "samples": survey and survey.samples,
        "share_visited": survey and survey.share_visited,
        **(_survey(inspection, survey) if survey else {"sides": {}, "groups": []}),
        "through_time": findings.through_time and _through_time(findings.through_time),
        "drift": findings.drift and _drift(findings.drift),
        "map": findings.map and _map(findings.map),
        "warnings": findings.warnings,
        "notes": findings.notes,
        "report": str(report.resolve()),
    }


def _snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "tag": snapshot.tag,
        "id": snapshot.id,
        "step": snapshot.step,
        "epoch": snapshot.epoch,
        "written_at": snapshot.written_at.isoformat(),
    }


def _survey(inspection: Inspection, survey: Survey) -> dict[str, Any]:
    bounds = inspection.tau
    return {
        "never_visited": survey.never_visited,
        "visits": _distribution(survey.visits),
        "staleness_steps": _distribution(survey.staleness),
        "fields": {name: _distribution(values) for name, values in survey.fields.items()},
        "sides": {
            side.name: {
                "label": side.label,
                "tau": _distribution(side.tau),
                "share_at_tau_min": None if bounds.lowest is None else side.tau.share_at_most(bounds.lowest),
                "share_at_tau_max": None if bounds.highest is None else side.tau.share_at_least(bounds.highest),
                "lowest": _sheet(survey, side, "lowest"),
                "highest": _sheet(survey, side, "highest"),
            }
            for side in survey.sides
        },
        "first_and_second_spearman": survey.joint and survey.joint.spearman,
        "groups": [_groups(groups) for groups in survey.groups],
    }


def _distribution(values: Distribution) -> dict[str, float] | None:
    if not values.count:
        return None
    quantiles = {_quantile_key(at): values.quantile(at) for at in QUANTILES}
    return {"count": values.count, "mean": values.mean, "min": values.min, **quantiles, "max": values.max}


def _sheet(survey: Survey, side: Side, end: str) -> list[int]:
    return next(sheet.sample_ids for sheet in survey.sheets if sheet.side is side and sheet.end == end)


def _groups(groups: Groups) -> dict[str, Any]:
    return {
        "column": groups.column,
        "groups": len(groups.names),
        "correlation": {side: found and found._asdict() for side, found in groups.correlation.items()},
        "bands": [
            band._asdict() | {"tau": {side: figures._asdict() for side, figures in band.tau.items()}}
            for band in groups.bands
        ],
    }


def _quantile_key(share: float) -> str:
    return f"q{share:.2f}"


def _quantile_word(share: float) -> str:
    return "median" if share == 0.5 else f"{100 * share:g}% quantile"


def _through_time(found: ThroughTime) -> dict[str, Any]:
    return {
        "one_block_of": found.every,
        "samples_read": found.samples_read,
        "snapshots": [
            {
                "tag": moment.snapshot.tag,
                "step": moment.snapshot.step,
                "visited": moment.visited,
                "tau": {
                    side: dict(zip(map(_quantile_key, TIME_QUANTILES), at.quantiles, strict=True))
                    | {"share_at_tau_min": at.share_at_tau_min}
                    for side, at in moment.tau.items()
                },
            }
            for moment in found.moments
        ],
    }


def _drift(found: Drift) -> dict[str, Any]:
    return {
        "from": found.earlier.tag,
        "to": found.later.tag,
        "visited": found.visited,
        "sides": {
            side.name: {
                "spearman": side.joint.spearman,
                "change": _distribution(side.change),
                "share_risen": side.share_risen,
                "share_fallen": side.share_fallen,
                "most_risen": [mover._asdict() for mover in side.most_risen],
                "most_fallen": [mover._asdict() for mover in side.most_fallen],
            }
            for side in found.sides
        },
    }


def _map(found: EmbeddingMap) -> dict[str, Any]:
    points = {side: at.xy.tolist() for side, at in found.points.items()}
    ids = found.sample_ids.tolist()
    return {"checkpoint": found.checkpoint, "perplexity": found.perplexity, "sample_ids": ids, "points": points}


def samples_to_json(
    details: Mapping[int, Details], histories: Sequence[History], notes: list[str], page: Path
) -> dict[str, Any]:
    """Single samples as JSON values; log_s of a sample that was not visited, which is -inf, is None."""
    samples = [
        {
            "sample_id": history.sample_id,
            **details[history.sample_id].table,
            "state": _finite(details[history.sample_id].state),
            "share_with_lower_tau": history.ranks,
            "history": [
                {"tag": state.snapshot.tag, "step": state.snapshot.step, **_finite(state.values)}
                for state in history.states
            ],
        }
        for history in histories
    ]
    return {"samples": samples, "notes": notes, "page": str(page.resolve())}


def _finite(values: Mapping[str, float | int]) -> dict[str, float | int | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def tau(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def share(value: float | None) -> str:
    """A share, 0 … 1, in percent; all and nothing are said only where they are meant."""
    if value is None:
        return "unknown"
    if 0 < value < 1e-4:
        return "under 0.01%"
    return "over 99.99%" if 1 - 1e-4 < value < 1 else f"{100 * value:.4g}%"


def correlation(value: float | None) -> str:
    return "unknown" if value is None else f"{value:+.2f}"


def p_value(value: float | None) -> str:
    if value is None:
        return "unknown"
    return "< 1e-16" if value < 1e-16 else f"{value:.1g}"
