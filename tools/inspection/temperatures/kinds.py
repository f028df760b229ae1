"""The kind of every sample by its row of state alone. Pure functions of columns.

`confirmation.py` decides again for the most suspicious samples, by a forward pass; `by_features.py` adds the kinds that
only features show.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_serializer

from ....state_store.schema import VISITS
from ....trainer.config import RANDOM
from ....trainer.metrics.metrics_file import last_lines
from ....trainer.metrics.step_report import RECENT_STEPS, collapse
from .. import Bools, Float32s, Float64s, Hidden, Int64s
from ..opening import Inspection, Rows
from .distribution import Smallest

TOO_FEW_VISITS, STUCK, MISFIT, CROWDED, COPIED, NOT_TOLD_APART, RARE, ORDINARY, PLANTED = range(9)
KIND_NAMES = ("too_few_visits", "stuck", "misfit", "crowded", "copied", "not_told_apart", "rare", "ordinary", "planted")
"""By code. A sample has the first kind that applies, a planted one only that; the four before `ordinary` need features.
"""
BY_FEATURES = (CROWDED, COPIED, NOT_TOLD_APART, RARE)
KIND = "kind"
"""Name of the column."""
KIND_SHEET_SAMPLES = 36

MIN_VISITS = 5
"""With fewer, tau and log s say more about the start of the training than about the sample."""
NEAR_FLOOR, NEAR_CLIP = 1.01, 0.99
"""Factors of tau_min and of the bound of u, within which a value counts as at it."""

Codes = NDArray[np.int8]
"""Places in KIND_NAMES, int8 [m]."""


@dataclass(frozen=True)
class KindRules:
    """How the kinds of a snapshot's samples are decided; kinds for which the state lacks a field are never given."""

    log_s: tuple[str, ...]
    """Sides that have log s."""
    u: tuple[str, ...]
    """Those of them that also have tau and u; empty if the objective sets no bounds of tau and u."""
    floor: float
    """tau_min · NEAR_FLOOR."""
    clip: float
    """Bound of |u| · NEAR_CLIP."""
    why_none: str = ""
    """Why kinds would mean nothing yet; empty if they do."""
    planted: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    """Ids of the samples trained with another sample's caption."""
    least_visits: int = MIN_VISITS
    """With fewer, a sample is not judged: of a model that is not trained, and without tau and log s, with none."""

    @classmethod
    def of(cls, inspection: Inspection) -> Self:
        """Return the rules of a run's snapshot, which there must be; notes why if there are no kinds."""
        fields, settings = inspection.state.fields, inspection.settings
        floor, clip = settings.get("tau_min"), settings.get("grad_clip")
        log_s = tuple(name.removesuffix("/log_s") for name in fields if name.endswith("/log_s"))
        u = tuple(side for side in log_s if {f"{side}/tau", f"{side}/u"} <= set(fields) and floor and clip)
        steps = list[dict[str, Any]]()
        with suppress(OSError):  # as of a run copied without its metrics
            steps = last_lines(inspection.run.metrics, RECENT_STEPS, 0, until=inspection.state.snapshot.step).steps
        why = collapse(steps, inspection.config) or ""
        if why and log_s:
            note = f"There are no kinds of samples yet: {why}."
            inspection.notes[:] = dict.fromkeys([*inspection.notes, note])  # it may have been noted before
        has_own = any(name.endswith(("/tau", "/log_s")) for name in fields)
        least = MIN_VISITS if has_own and RANDOM not in fields else 1
        return cls(log_s, u, NEAR_FLOOR * (floor or 0.0), NEAR_CLIP * (clip or 0.0), why, inspection.planted[0], least)

    @property
    def columns(self) -> list[str]:
        """Columns of the state that the rules read."""
        of_sides = {"tau": self.u, "u": self.u, "log_s": self.log_s}
        return [VISITS, *(f"{side}/{name}" for name, sides in of_sides.items() for side in sides)]

    def kinds(self, rows: Rows, ids: Int64s | range) -> Codes:
        """Return the kinds of m samples, given `columns` [m] each."""
        kinds = self.first_kind(rows, self.is_stuck(rows), self.score(rows) > 0)
        return np.where(self.are_planted(ids), np.int8(PLANTED), kinds)

    def are_planted(self, ids: Int64s | range) -> Bools:
        # np.asarray of a range asks it for each number: at 10⁷ samples a fifth of the whole report's time.
        return np.isin(np.arange(ids.start, ids.stop) if isinstance(ids, range) else ids, self.planted)

    def judged(self, rows: Rows, ids: Int64s | range) -> Rows:
        """Return rows of samples, with 0 visits for planted samples, whose state belongs to other captions."""
        return rows | {VISITS: np.where(self.are_planted(ids), np.uint32(0), rows[VISITS])}

    def first_kind(self, rows: Rows, stuck: Bools, misfit: Bools) -> Codes:
        """Return the first kind that applies, int8 [m]; stuck and misfit are decided, bool [m]."""
        kinds = np.full(len(misfit), ORDINARY, np.int8)
        for code, applies in ((MISFIT, misfit), (STUCK, stuck), (TOO_FEW_VISITS, self.too_few_visits(rows))):
            kinds[applies] = code
        return kinds

    def too_few_visits(self, rows: Rows) -> Bools:
        return np.asarray((rows[VISITS] < self.least_visits) | bool(self.why_none))

    def is_stuck(self, rows: Rows) -> Bools:
        """bool [m]: on a side, tau is at its floor although the negatives outweigh the positive and u is at its bound.

        Its s was estimated at another tau and lies far above any batch's g: the sample gives its features next to no
        gradient, and s falls by no more than a factor of 1 - gamma a visit.
        """
        found = np.zeros(len(rows[VISITS]), np.bool_)
        for side in self.u:
            at_floor, outweighed = rows[f"{side}/tau"] <= self.floor, rows[f"{side}/log_s"] > 0
            found |= at_floor & outweighed & (np.abs(rows[f"{side}/u"]) >= self.clip)
        return found

    def score(self, rows: Rows) -> Float64s:
        """float64 [m]: sum of log s over the sides; above 0, the negatives outweigh the positive. 0 without log s."""
        score = np.zeros(len(rows[VISITS]))
        with np.errstate(invalid="ignore"):  # damaged rows may hold both infinities
            for side in self.log_s:
                score += rows[f"{side}/log_s"]
        return score


@dataclass(frozen=True)
class SampleKinds:
    """The kinds of a snapshot's samples."""

    rules: Hidden[KindRules]
    counts: dict[str, int]
    """Kind -> number of samples; only those that the state's fields allow."""
    sheets: dict[str, list[int]]
    """Kind -> ids to show, the most typical first; of ordinary samples, random ones."""
    suspects: Hidden[Int64s]
    """int64: stuck and misfit samples, the most suspicious first, as many as were asked for."""
    confirmed: dict[str, int] = field(default_factory=dict)
    """Kind -> how many of `counts` a forward pass decided."""

    @model_serializer
    def _in_json(self) -> dict[str, Any]:
        return {
            name: {"samples": number, "confirmed": self.confirmed.get(name, 0), "first": self.sheets[name]}
            for name, number in self.counts.items()
        }

    @property
    def worth_showing(self) -> bool:
        """Whether the state's fields allow any kind but too few visits and ordinary."""
        return len(self.counts) > 2 and not self.rules.why_none


class KindCounts:
    """Counts blocks of samples by kind and keeps those to show. Memory does not grow with the samples."""

    def __init__(self, rules: KindRules, suspects: int) -> None:
        """suspects: how many to keep for a forward pass."""
        self._rules = rules
        self._counts = np.zeros(len(KIND_NAMES), np.int64)
        self._shown = [Smallest(KIND_SHEET_SAMPLES) for _ in KIND_NAMES]
        self._suspects = Smallest(suspects)

    def add(self, block: range, rows: Rows, kept: Bools, ranks: Float32s | None = None) -> None:
        """Count the samples of a block, given the rules' columns. kept: bool [m], those that the run trains on.

        ranks: float32 [m], as `WholeRun.ranks`, to sort stuck samples and misfits by; None: by score.
        """
        kinds, score = self._rules.kinds(rows, block), self._rules.score(rows)
        suspicion = -score if ranks is None else ranks
        kinds[~kept] = -1
        self._counts += np.bincount(kinds[kept], minlength=len(KIND_NAMES))
        random = np.random.default_rng((2024, block.start)).random(len(kinds))
        for code, key in {TOO_FEW_VISITS: rows[VISITS], STUCK: suspicion, MISFIT: suspicion, ORDINARY: random}.items():
            places = np.flatnonzero(kinds == code)
            self._shown[code].add(places + block.start, key[places])
        places = np.flatnonzero((kinds == STUCK) | (kinds == MISFIT))
        self._suspects.add(places + block.start, suspicion[places])

    def result(self) -> SampleKinds:
        rules = self._rules
        needed = {PLANTED: rules.planted.tolist(), STUCK: rules.u, MISFIT: rules.log_s} | dict.fromkeys(BY_FEATURES)
        decided = {code: name for code, name in enumerate(KIND_NAMES) if needed.get(code, True)}
        counts = {name: int(self._counts[code]) for code, name in decided.items()}
        sheets = {name: self._shown[code].chosen()[0].tolist() for code, name in decided.items()}
        return SampleKinds(rules, counts, sheets, self._suspects.chosen()[0])
