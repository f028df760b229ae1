"""Inspect a run: collect everything requested."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from ...state_store.errors import SnapshotNotFoundError
from ...storage.place import Place, Places
from ...trainer.config import RANDOM
from ...trainer.metrics.step_report import percent, slower_temperatures
from ...trainer.run_directory import RunDirectory
from . import Hidden, Int64s, OnTask, silent
from .feature_findings.by_features import ByFeatures, by_features
from .features.confirmation import Confirmation, confirm, with_confirmed
from .features.embedding_map import EmbeddingMap, embedding_map
from .features.run_features import DEFAULT, Asked
from .opening import LATEST, Inspection, read_run
from .summary import first_sentences
from .temperatures.drift import Drift, drift, in_order
from .temperatures.groups import CLASS_COLUMN
from .temperatures.kinds import COPIED, KIND_NAMES, MISFIT, NOT_TOLD_APART, STUCK, TOO_FEW_VISITS
from .temperatures.misfits import WrongCaptions, misfit_sentences, misfits
from .temperatures.samples import InspectedSample, read_samples
from .temperatures.survey import Side, Survey, survey
from .temperatures.through_time import ThroughTime, through_time

T = TypeVar("T")

TRIES = 5
"""A run that keeps few snapshots may delete the one being read."""
MANY_AT_BOUND = 0.5
"""Share of the samples. Some samples at the floor are normal: rare ones."""
NARROW = 1.1
"""Ratio of the 95 % quantile of tau to the 5 % one; below it the temperatures are practically equal."""
MANY_COPIED = 0.01


@dataclass(frozen=True)
class Findings:
    """A run and its findings; parts that do not exist or were not requested are None, and notes say why."""

    inspection: Hidden[Inspection]
    survey: Survey | None
    confirmation: Confirmation | None = None
    """The forward pass behind some of the survey's kinds."""
    through_time: ThroughTime | None = None
    drift: Drift | None = None
    map: EmbeddingMap | None = None
    by_features: ByFeatures | None = None
    misfits: Hidden[Int64s | None] = None
    """Ids of the judged samples, int64 [m], the likeliest wrong caption first; None if no captions were planted."""
    wrong_captions: WrongCaptions | None = None
    at_tau_min: Hidden[bool] = False
    """Whether most temperatures are, so that nothing is known of wrong captions."""
    first_sentences: Sequence[str] = ()
    """Associations of the lowest and highest temperatures, the strongest first."""
    samples: Hidden[Mapping[int, InspectedSample]] = field(default_factory=dict)
    """The samples shown with pictures, by id."""
    page: Hidden[Path | None] = None
    """The HTML page of the findings, if it was written."""

    def _repr_html_(self) -> str:
        text = escape(self.page.read_text("utf-8") if self.page else " ".join([*self.first_sentences, *self.notes]))
        return f'<iframe srcdoc="{text}" style="width: 100%; height: 80vh; border: 0"></iframe>'

    @property
    def warnings(self) -> list[str]:
        """Findings that need attention, with their meaning and a cure."""
        if self.survey is None:
            return []
        of_features = _warnings_of_features(self.inspection, self.by_features) if self.by_features else ()
        return [*_warnings(self.inspection, self.survey), *of_features]

    @property
    def notes(self) -> list[str]:
        return self.inspection.notes

    @property
    def of_misfits(self) -> list[str]:
        """Sentences about the list of misfits; empty without one."""
        kinds = self.survey.kinds if self.survey else None
        has_list = kinds and kinds.worth_showing and kinds.counts.get(KIND_NAMES[MISFIT])
        return misfit_sentences(self.inspection, self.wrong_captions, self.at_tau_min) if has_list else []


def look(
    run: Place,
    *,
    at: str = LATEST,
    against: str | None = None,
    by: Sequence[str] = (CLASS_COLUMN,),
    with_map: bool = False,
    suspects: int = 0,
    rho: float | None = None,
    asked: Asked = DEFAULT,
    folder: Path | None = None,
    data: Places | None = None,
    on_progress: OnTask = silent,
) -> Findings:
    """Inspect a run at one snapshot, and its history up to it.

    at, against: tags, ids, or `latest`. by: columns to group the samples by. suspects: how many samples to confirm by a
    forward pass. rho: at which temperatures are solved; None: the run's. asked: which features to make. folder: where
    they are kept; None: RUN/report. data: new path of the dataset.
    Raises RunError, StateStoreError, DatasetError, and ConfigError if `against` names the same snapshot.
    """

    def read(inspection: Inspection) -> Findings:
        """Read everything that the run may delete meanwhile."""
        if against and inspection.reader:
            in_order(inspection, inspection.reader, against)  # fail on a wrong name before reading all rows
        found, moved = survey(inspection, by, on_progress, suspects=suspects, over_run=True), None
        if found is None or not found.visited:
            return Findings(inspection, found)
        confirmation = None
        if suspects and found.kinds:
            confirmation = confirm(inspection, found, partial(on_progress, "confirming kinds"), asked)
            found = replace(found, kinds=with_confirmed(found.kinds, confirmation)) if confirmation else found
        if against and found.sides:
            moved = drift(inspection, against, partial(on_progress, "comparing snapshots"))
        of_features = by_features(inspection, found, folder or inspection.run.report, asked, rho, on_progress)
        samples = read_samples(inspection, shown_ids(found, moved, of_features))
        parts: dict[str, Any] = {"drift": moved, "confirmation": confirmation, "by_features": of_features}
        if len(inspection.planted[0]) or RANDOM in inspection.columns:
            parts["misfits"], parts["wrong_captions"], parts["at_tau_min"] = misfits(inspection, on_progress)
        return Findings(inspection, found, samples=samples, first_sentences=first_sentences(of_features), **parts)

    findings = read_again(read, run, at, data)
    inspection, found = findings.inspection, findings.survey
    if found is None or not found.visited:
        return findings
    of_snapshots = partial(on_progress, "temperatures of all snapshots")
    in_time = through_time(inspection, of_snapshots) if found.sides else None
    shown = embedding_map(inspection, found, on_progress, asked) if with_map else None
    return replace(findings, through_time=in_time, map=shown)


def read_again(read: Callable[[Inspection], T], run: Place, at: str, data: Places | None) -> T:
    """Return `read` of a run's snapshot; if `latest` is deleted meanwhile, retry with the new latest.

    Raises what `read` and `read_run` raise.
    """
    for _ in range(TRIES - 1):
        try:
            return read(read_run(RunDirectory(run), at=at, data=data))
        except SnapshotNotFoundError:
            if at != LATEST:
                raise
    return read(read_run(RunDirectory(run), at=at, data=data))


def shown_ids(survey: Survey, drift: Drift | None, by_features: ByFeatures | None) -> list[int]:
    """Return the ids of samples shown with pictures, repeated as often as they are shown."""
    movers = [mover for side in (drift.sides if drift else ()) for mover in (*side.most_risen, *side.most_fallen)]
    kinds = survey.kinds.sheets.values() if survey.kinds and survey.kinds.worth_showing else ()
    from_features = by_features.kinds.sheets.values() if by_features else ()
    of_kinds = [id for ids in (*kinds, *from_features) for id in ids]
    ends = [id for sheet in survey.sheets for id in sheet.sample_ids]
    return [*ends, *of_kinds, *(mover.sample_id for mover in movers)]


def _warnings(inspection: Inspection, survey: Survey) -> Iterator[str]:
    if 0 < survey.share_visited < 0.5:
        others = "All figures cover those; the others still hold their initial values"
        yield f"Only {survey.visited:,} of the {survey.samples:,} samples have been visited. {others}."
    for name, values in survey.fields.items():
        if values.not_finite:
            check = f"`thermopile state check {quote(str(inspection.run.path))}` lists them"
            yield f"{values.not_finite:,} visited samples have a non-finite {name} and are left out. {check}."
    stuck = survey.kinds.counts.get(KIND_NAMES[STUCK], 0) / survey.samples if survey.kinds else 0.0
    if stuck >= 0.01:
        why = f"tau moved too fast. In the next run, {slower_temperatures(inspection.settings)}"
        yield f"{percent(stuck, 1)} of the samples are stuck at tau_min, where they hardly learn: {why}."
    judged = survey.samples - survey.kinds.counts[KIND_NAMES[TOO_FEW_VISITS]] if survey.kinds else 0
    if survey.sides and inspection.settings.get("eta") == 0:
        yield "eta is 0: every tau keeps its initial value."
    elif judged >= survey.visited / 2:  # else the temperatures cannot have settled, wherever they are
        for side in survey.sides:
            yield from _warnings_of_side(inspection, side)


def _warnings_of_features(inspection: Inspection, found: ByFeatures) -> Iterator[str]:
    counts, m = found.kinds.evident, len(found.kinds.sample_ids)
    if (copied := counts[KIND_NAMES[COPIED]]) >= MANY_COPIED * m:
        still = " still" if inspection.reader and inspection.reader.kept < inspection.reader.samples else ""
        look_for = f"`thermopile inspect {quote(str(inspection.run.path))} --duplicates`"
        cure = f"To keep one of each: {look_for}, then `thermopile curate` with --thin 1, and train --select"
        yield f"{copied:,} of {m:,} samples looked at{still} have near-copies. {cure}."
    if (apart := counts[KIND_NAMES[NOT_TOLD_APART]]) >= MANY_COPIED * m:
        what = f"{apart:,} of {m:,} samples looked at are not told apart from others that do not look like them"
        cure = "Train longer, or larger encoders; there is nothing to curate"
        yield f"{what}: the model has not learnt them yet. {cure}."


def _warnings_of_side(inspection: Inspection, side: Side) -> Iterator[str]:
    settings = inspection.settings
    rho = settings.get("rho")
    low, high = side.share_at_tau_min or 0.0, side.share_at_tau_max or 0.0
    if low >= MANY_AT_BOUND:
        at_floor = f"{percent(low)} of the {side.name} temperatures are at their floor"
        why = "The weights of their negatives never move as far from uniform as rho allows, so nothing raises tau"
        named = "rho" if rho is None else f"rho = {rho:g}"
        floor = f"tau_min = {settings['tau_min']:g}"
        yield f"{named} seems never to bind: {at_floor}, {floor}. {why}. Lower rho or raise the batch size."
    if high >= 0.05:  # none should be at the ceiling, a safeguard
        at_ceiling = f"of the {side.name} temperatures are at their ceiling, tau_max = {settings['tau_max']:g}"
        cure = "Raise rho or tau_max, or lower eta"
        yield f"{percent(high)} {at_ceiling}, and no longer distinguish these samples. {cure}."
    cold, hot = side.tau.quantile(0.05), side.tau.quantile(0.95)
    if max(low, high) < MANY_AT_BOUND and hot < NARROW * cold:
        between = f"90% lie between {cold:.4f} and {hot:.4f}"
        yield f"The {side.name} temperatures hardly differ: {between}. Train longer or raise eta."
