"""Findings as JSON values; None for what is unknown or was not requested."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .confirmation import Confirmation
from .correlation import Correlation
from .distribution import Distribution
from .drift import Drift
from .duplicates import THRESHOLDS, Duplicates
from .findings import Findings
from .groups import Groups
from .kinds import SampleKinds
from .neighbours import Neighbours, Ranking
from .run import Inspection
from .samples import Sample
from .summary import QUANTILES, SETTINGS
from .survey import Side, Survey
from .through_time import QUANTILES as TIME_QUANTILES
from .through_time import ThroughTime

NO_VISITS: dict[str, Any] = {"share_visited": None, "never_visited": None, "visits": None, "staleness_steps": None}
NO_SURVEY: dict[str, Any] = {
    "never_visited": None, "visits": None, "staleness_steps": None, "fields": None, "sides": {},
    "image_and_text_spearman": None, "groups": [], "kinds": None, "doubted": None,
}  # fmt: skip


def to_json(findings: Findings) -> dict[str, Any]:
    inspection, survey, shown = findings.inspection, findings.survey, findings.map
    dataset, objective = inspection.dataset, inspection.config.objective
    return {
        "run": str(inspection.run.path.resolve()),
        "dataset": dataset.absolute if dataset else None,
        "snapshot": _snapshot(inspection),
        "predicted_by": inspection.prediction and inspection.prediction.checkpoint,
        "objective": {"name": objective.name} | {name: objective.settings.get(name) for name in SETTINGS},
        "samples": survey and survey.samples,
        "dataset_samples": survey and survey.dataset_samples,
        "share_visited": survey and survey.share_visited,
        **(_survey(survey) if survey else NO_SURVEY),
        "confirmation": findings.confirmation and _confirmation(findings.confirmation),
        **(NO_VISITS if inspection.prediction else {}),
        "through_time": findings.through_time and _through_time(findings.through_time),
        "drift": findings.drift and _drift(findings.drift),
        "map": shown and {
            "checkpoint": shown.checkpoint, "weights": shown.weights, "perplexity": shown.perplexity,
            "sample_ids": shown.sample_ids.tolist(),
            "points": {side: at.xy.tolist() for side, at in shown.points.items()},
        },
        "said_first": list(findings.said_first),
        "warnings": findings.warnings,
        "notes": findings.notes,
    }  # fmt: skip


def samples_to_json(
    inspection: Inspection, samples: Sequence[Sample], around: Mapping[int, Neighbours]
) -> dict[str, Any]:
    """Return single samples as JSON values; log_s of an unvisited sample, which is -inf, becomes None.

    around: neighbours by id, where they were asked for.
    """
    return {
        "run": str(inspection.run.path.resolve()),
        "snapshot": _snapshot(inspection),
        "predicted_by": inspection.prediction and inspection.prediction.checkpoint,
        "samples": [
            {
                "sample_id": sample.sample_id, **sample.table, "state": _finite(sample.state),
                "share_with_lower_tau": sample.ranks, "kind": sample.kind,
                "history": [{"tag": at.snapshot.tag, "step": at.snapshot.step, **_finite(at.values)}
                            for at in sample.history],
                **({"neighbours": _neighbours(around[sample.sample_id])} if sample.sample_id in around else {}),
            }
            for sample in samples
        ],
        "notes": inspection.notes,
    }  # fmt: skip


def duplicates_to_json(inspection: Inspection, found: Duplicates, rows: Path) -> dict[str, Any]:
    """Return what `inspect --duplicates` found; the pairs are in the file `rows`."""
    return {
        "run": str(inspection.run.path.resolve()), "snapshot": _snapshot(inspection), "samples": found.samples,
        **{f"{reason}_pairs": count for reason, count in found.counts.items()}, "clusters": len(found.sizes),
        "copies": sum(found.sizes.values()) - len(found.sizes), "compared": found.compared,
        "thresholds": dict(THRESHOLDS), "pairs": str(rows), "notes": inspection.notes,
    }  # fmt: skip


def _neighbours(found: Neighbours) -> dict[str, Any]:
    return {
        "pair_similarity": found.pair_similarity,
        "nearest": {kind: _ranking(ranking) for kind, ranking in found.nearest.items()},
        "negatives": {side: _ranking(ranking) for side, ranking in found.negatives.items()},
    }


def _ranking(ranking: Ranking) -> dict[str, Any]:
    weights = {} if ranking.weights is None else {"p": ranking.weights.tolist()}
    return {"sample_ids": ranking.sample_ids.tolist(), "similarity": ranking.similarity.tolist(), **weights}


def _finite(values: Mapping[str, float | int]) -> dict[str, float | int | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _snapshot(inspection: Inspection) -> dict[str, Any] | None:
    if inspection.reader is None or inspection.prediction:
        return None
    found = inspection.reader.snapshot
    names = ("tag", "id", "step", "epoch")
    return {name: getattr(found, name) for name in names} | {"written_at": found.written_at.isoformat()}


def _survey(survey: Survey) -> dict[str, Any]:
    return {
        "never_visited": survey.never_visited,
        "visits": _distribution(survey.visits),
        "staleness_steps": _distribution(survey.staleness),
        "fields": {name: _distribution(values) for name, values in survey.fields.items()},
        "sides": {side.name: _side(survey, side) for side in survey.sides},
        "image_and_text_spearman": survey.joint and survey.joint.spearman,
        "groups": [_groups(groups) for groups in survey.groups],
        "kinds": survey.kinds and _kinds(survey.kinds),
        "doubted": survey.doubted and survey.doubted._asdict(),
    }


def _kinds(kinds: SampleKinds) -> dict[str, Any]:
    return {
        name: {"samples": number, "confirmed": kinds.confirmed.get(name, 0), "first": kinds.sheets[name]}
        for name, number in kinds.counts.items()
    }


def _confirmation(found: Confirmation) -> dict[str, Any]:
    return {
        "checkpoint": found.checkpoint, "weights": found.weights, "negatives": found.negatives,
        "suspects": len(found.sample_ids), "misfit": int(found.misfit.sum()), "silent": int(found.silent.sum()),
    }  # fmt: skip


def _side(survey: Survey, side: Side) -> dict[str, Any]:
    ends: dict[str, list[int]] = {sheet.end: sheet.sample_ids for sheet in survey.sheets if sheet.side is side}
    shares = {"share_at_tau_min": side.at_floor, "share_at_tau_max": side.at_ceiling}
    return {"tau": _distribution(side.tau), **shares, **ends}


def _distribution(values: Distribution) -> dict[str, float] | None:
    if not values.count:
        return None
    quantiles = {_quantile_key(at): values.quantile(at) for at in QUANTILES}
    return {"count": values.count, "mean": values.mean, "min": values.min, **quantiles, "max": values.max}


def _quantile_key(share: float) -> str:
    return f"q{share:.2f}"


def _groups(groups: Groups) -> dict[str, Any]:
    return {
        "column": groups.column,
        "groups": len(groups.names),
        "correlation": {side: found and _correlation(found) for side, found in groups.correlation.items()},
        "bands": [
            band._asdict() | {"tau": {side: figures._asdict() for side, figures in band.tau.items()}}
            for band in groups.bands
        ],
    }


def _correlation(found: Correlation) -> dict[str, Any]:
    return found._asdict() | {"strength": found.strength, "certainty": found.certainty}


def _through_time(found: ThroughTime) -> dict[str, Any]:
    keys = [*map(_quantile_key, TIME_QUANTILES), "share_at_tau_min"]
    snapshots = [
        {
            "tag": moment.snapshot.tag, "step": moment.snapshot.step, "visited": moment.visited,
            "tau": {side: dict(zip(keys, (*at.quantiles, at.share_at_tau_min), strict=True))
                    for side, at in moment.tau.items()},
        }
        for moment in found.moments
    ]  # fmt: skip
    return {"one_block_of": found.every, "samples_read": found.samples_read, "snapshots": snapshots}


def _drift(found: Drift) -> dict[str, Any]:
    sides: dict[str, dict[str, Any]] = {
        side.name: {
            "spearman": side.joint.spearman, "change": _distribution(side.change),
            "share_risen": side.share_risen, "share_fallen": side.share_fallen,
            "most_risen": [mover._asdict() for mover in side.most_risen],
            "most_fallen": [mover._asdict() for mover in side.most_fallen],
        }
        for side in found.sides
    }  # fmt: skip
    return {"from": found.earlier.tag, "to": found.later.tag, "visited": found.visited, "sides": sides}
