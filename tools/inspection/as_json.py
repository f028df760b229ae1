"""Convert findings to JSON values; None if unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...state_store import Snapshot
from .details import Details
from .distribution import Distribution
from .drift import Drift
from .embedding_map import EmbeddingMap
from .findings import Findings
from .groups import Groups
from .history import History
from .run import Inspection
from .summary import QUANTILES, SETTINGS
from .survey import Side, Survey
from .through_time import QUANTILES as TIME_QUANTILES
from .through_time import ThroughTime

NO_SURVEY: dict[str, Any] = {
    "never_visited": None, "visits": None, "staleness_steps": None, "fields": None, "sides": {},
    "image_and_text_spearman": None, "groups": [],
}  # fmt: skip


def to_json(findings: Findings) -> dict[str, Any]:
    """Return the findings as JSON values; None for what is unknown or was not requested."""
    inspection, survey = findings.inspection, findings.survey
    reader, dataset, objective = inspection.reader, inspection.dataset, inspection.config.objective
    return {
        "run": str(inspection.run.path.resolve()),
        "dataset": str(dataset.path.resolve()) if dataset else None,
        "snapshot": reader and _snapshot(reader.snapshot),
        "objective": {"name": objective.name} | {name: objective.settings.get(name) for name in SETTINGS},
        "samples": survey and survey.samples,
        "share_visited": survey and survey.share_visited,
        **(_survey(inspection, survey) if survey else NO_SURVEY),
        "through_time": findings.through_time and _through_time(findings.through_time),
        "drift": findings.drift and _drift(findings.drift),
        "map": findings.map and _map(findings.map),
        "warnings": findings.warnings,
        "notes": findings.notes,
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
                "tau": _distribution(side.tau),
                "share_at_tau_min": None if bounds.lowest is None else side.tau.share_at_most(bounds.lowest),
                "share_at_tau_max": None if bounds.highest is None else side.tau.share_at_least(bounds.highest),
                "lowest": _sheet(survey, side, "lowest"),
                "highest": _sheet(survey, side, "highest"),
            }
            for side in survey.sides
        },
        "image_and_text_spearman": survey.joint and survey.joint.spearman,
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


def samples_to_json(findings: Findings, details: Mapping[int, Details], histories: Sequence[History]) -> dict[str, Any]:
    """Return single samples as JSON values; log_s of an unvisited sample, which is -inf, becomes None."""
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
    inspection = findings.inspection
    return {
        "run": str(inspection.run.path.resolve()),
        "snapshot": inspection.reader and _snapshot(inspection.reader.snapshot),
        "samples": samples,
        "notes": findings.notes,
    }


def _finite(values: Mapping[str, float | int]) -> dict[str, float | int | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
