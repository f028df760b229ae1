"""Findings as JSON values; None for what is unknown or was not requested."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...storage.sealed_json import finite
from .duplicates.finding import THRESHOLDS, Duplicates
from .features.neighbours import Neighbours
from .findings import Findings
from .opening import Inspection
from .summary import SETTINGS
from .temperatures.samples import InspectedSample

_KEYS = ("samples", "dataset_samples", "share_visited", "never_visited", "visits", "staleness_steps", "fields", "sides")
_MORE_KEYS = ("image_and_text_spearman", "groups", "parts", "kinds", "doubted")
NO_SURVEY: dict[str, Any] = dict.fromkeys(_KEYS + _MORE_KEYS) | {"sides": {}, "groups": []}


def to_json(findings: Findings) -> dict[str, Any]:
    inspection, dataset = findings.inspection, findings.inspection.dataset
    about, objective = _about(inspection), inspection.config.objective
    found: dict[str, Any] = TypeAdapter(Findings).dump_python(findings, mode="json", by_alias=True)
    survey = found.pop("survey") or NO_SURVEY
    for sheet in findings.survey.sheets if findings.survey else ():
        if sheet.side:
            survey["sides"][sheet.side.name][sheet.end] = sheet.sample_ids
    about = {"run": about["run"], "dataset": dataset.absolute if dataset else None} | about
    about["objective"] = {"name": objective.name} | {name: objective.settings.get(name) for name in SETTINGS}
    return about | survey | found | {"warnings": findings.warnings, "notes": findings.notes}


def _about(inspection: Inspection) -> dict[str, Any]:
    about: dict[str, Any] = {"run": str(inspection.run.path.resolve()), "snapshot": None}
    if inspection.reader:
        snapshot = inspection.reader.snapshot
        named = {name: getattr(snapshot, name) for name in ("tag", "id", "step", "epoch")}
        about["snapshot"] = named | {"written_at": snapshot.written_at.isoformat()}
    return about


def samples_to_json(
    inspection: Inspection, samples: Sequence[InspectedSample], around: Mapping[int, Neighbours]
) -> dict[str, Any]:
    """Return single samples as JSON values; log_s of an unvisited sample, which is -inf, becomes None.

    around: neighbours by id, where they were asked for.
    """
    in_json = partial(TypeAdapter(Neighbours).dump_python, mode="json", by_alias=True, exclude_none=True)
    neighbours = {id: {"pair_similarity": None} | in_json(found) for id, found in around.items()}
    shown = []
    for sample in samples:
        history = [{"tag": at.snapshot.tag, "step": at.snapshot.step, **_finite(at.values)} for at in sample.history]
        known = {"sample_id": sample.sample_id, **sample.table, "state": _finite(sample.state)}
        known |= {"share_with_lower_tau": sample.ranks, "kind": sample.kind, "history": history}
        shown.append(known | ({"neighbours": neighbours[sample.sample_id]} if sample.sample_id in around else {}))
    return _about(inspection) | {"samples": shown, "notes": inspection.notes}


def duplicates_to_json(inspection: Inspection, found: Duplicates, rows: Path) -> dict[str, Any]:
    """Return what `inspect --duplicates` found; the pairs are in the file `rows`."""
    pairs = {f"{reason}_pairs": count for reason, count in found.counts.items()}
    sizes = {"clusters": len(found.sizes), "copies": sum(found.sizes.values()) - len(found.sizes)}
    how = {"compared": found.compared, "thresholds": dict(THRESHOLDS), "pairs": str(rows), "notes": inspection.notes}
    return _about(inspection) | {"samples": found.samples} | pairs | sizes | how


def _finite(values: Mapping[str, float | int]) -> dict[str, float | int | None]:
    return {name: finite(value) for name, value in values.items()}
