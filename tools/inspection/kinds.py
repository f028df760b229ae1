"""The kind of every sample, from its row of state alone: what a cold or a hot sample is.

`confirmation.py` decides again for the most suspicious samples, by a forward pass. Pure functions of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...state_store.schema import VISITS
from .distribution import Distribution, Smallest
from .run import Inspection
from .state_blocks import Rows, read_blocks

TOO_FEW_VISITS, STUCK, MISFIT, RARE, ORDINARY = range(5)
KIND_NAMES = ("too_few_visits", "stuck", "misfit", "rare", "ordinary")
"""By code. A sample has the first kind that applies."""
KIND = "kind"
"""Name of the column."""
KIND_SHEET_SAMPLES = 36

MIN_VISITS = 5
"""With fewer, tau and log s say more about the start of the training than about the sample."""
NEAR_FLOOR, NEAR_CLIP = 1.01, 0.99
"""Factors of tau_min and of the bound of u, within which a value counts as at it."""
RARE_SHARE = 0.05
_SEED = 2024

Codes = NDArray[np.int8]
"""Places in KIND_NAMES, int8 [m]."""


@dataclass(frozen=True)
class KindRules:
    """How the kinds of a snapshot's samples are decided; kinds for which the state lacks a field are never given."""

    log_s: tuple[str, ...]
    """Columns of log s, one per side."""
    stuck: tuple[tuple[str, str, str], ...]
    """Columns of tau, u and log s, per side that has them; empty if the objective sets no bounds of tau and u."""
    floor: float
    """tau_min · NEAR_FLOOR."""
    clip: float
    """Bound of |u| · NEAR_CLIP."""
    rare_below: Mapping[str, float]
    """Side -> bound of tau below which at most 5 % of the visited samples are; only sides with log s."""

    @classmethod
    def of(cls, inspection: Inspection, taus: Mapping[str, Distribution]) -> KindRules:
        """Return the rules of a run's snapshot, which there must be. taus: side -> tau of its visited samples."""
        assert inspection.reader is not None
        fields, settings = inspection.reader.fields, inspection.config.objective.settings
        floor, clip = settings.get("tau_min"), settings.get("grad_clip")
        with_log_s = [name.removesuffix("/log_s") for name in fields if name.endswith("/log_s")]
        with_u = [side for side in with_log_s if side in taus and f"{side}/u" in fields]
        return cls(
            log_s=tuple(f"{side}/log_s" for side in with_log_s),
            stuck=tuple((f"{side}/tau", f"{side}/u", f"{side}/log_s") for side in with_u if floor and clip),
            floor=NEAR_FLOOR * (floor or 0.0),
            clip=NEAR_CLIP * (clip or 0.0),
            # The bin's lower edge: where many samples share the lowest tau, it tells none of them from the others.
            rare_below={side: tau.bin_of(RARE_SHARE)[0] for side, tau in taus.items()
                        if side in with_log_s and tau.count},
        )  # fmt: skip

    @property
    def columns(self) -> list[str]:
        """Columns of the state that the rules read."""
        taus = [f"{side}/tau" for side in self.rare_below]
        return list(dict.fromkeys([VISITS, *self.log_s, *taus, *(name for side in self.stuck for name in side)]))

    @property
    def decidable(self) -> list[str]:
        """Names of the kinds that the state's fields allow, in order."""
        needed = {STUCK: self.stuck, MISFIT: self.log_s, RARE: self.rare_below}
        return [name for code, name in enumerate(KIND_NAMES) if needed.get(code, True)]

    def kinds(self, rows: Rows) -> Codes:
        """Return the kinds of m samples, given `columns` [m] each."""
        return first_kind(self.too_few_visits(rows), self.is_stuck(rows), self.score(rows) > 0, self.is_rare(rows))

    def kind(self, row: Mapping[str, float | int]) -> str:
        """Return the name of one sample's kind, given its `columns`."""
        dtypes = {name: np.uint32 if name == VISITS else np.float32 for name in self.columns}
        rows: Rows = {name: np.array([row[name]], dtype) for name, dtype in dtypes.items()}
        return KIND_NAMES[self.kinds(rows)[0]]

    def too_few_visits(self, rows: Rows) -> NDArray[np.bool_]:
        few: NDArray[np.bool_] = rows[VISITS] < MIN_VISITS
        return few

    def is_stuck(self, rows: Rows) -> NDArray[np.bool_]:
        """bool [m]: on a side, tau is at its floor although the negatives outweigh the positive and u is at its bound.

        Its s was estimated at another tau and lies far above any batch's g: the sample gives its features next to no
        gradient, and s falls by no more than a factor of 1 - gamma a visit.
        """
        found = np.zeros(len(rows[VISITS]), np.bool_)
        for tau, u, log_s in self.stuck:
            found |= (rows[tau] <= self.floor) & (rows[log_s] > 0) & (np.abs(rows[u]) >= self.clip)
        return found

    def score(self, rows: Rows) -> NDArray[np.float64]:
        """float64 [m]: sum of log s over the sides; above 0, the negatives outweigh the positive. 0 without log s."""
        score = np.zeros(len(rows[VISITS]))
        with np.errstate(invalid="ignore"):  # damaged rows may hold both infinities
            for name in self.log_s:
                score += rows[name]
        return score

    def is_rare(self, rows: Rows) -> NDArray[np.bool_]:
        """bool [m]: on a side, tau is among the lowest 5 % and the positive outweighs the negatives."""
        found = np.zeros(len(rows[VISITS]), np.bool_)
        for side, bound in self.rare_below.items():
            found |= (rows[f"{side}/tau"] < bound) & (rows[f"{side}/log_s"] < 0)
        return found

    def coldness(self, rows: Rows) -> NDArray[np.float64]:
        """float64 [m]: tau relative to the bound of the rare ones, on the side where that is lowest."""
        lowest = np.full(len(rows[VISITS]), np.inf)
        for side, bound in self.rare_below.items():
            with np.errstate(all="ignore"):  # nothing forbids a tau of 0 in an objective of a user's own
                np.fmin(lowest, rows[f"{side}/tau"] / bound, out=lowest)
        return lowest


def first_kind(
    too_few_visits: NDArray[np.bool_], stuck: NDArray[np.bool_], misfit: NDArray[np.bool_], rare: NDArray[np.bool_]
) -> Codes:
    """Return the first kind that applies, int8 [m]; each argument is bool [m]."""
    kinds = np.full(len(rare), ORDINARY, np.int8)
    for code, applies in ((RARE, rare), (MISFIT, misfit), (STUCK, stuck), (TOO_FEW_VISITS, too_few_visits)):
        kinds[applies] = code
    return kinds


@dataclass(frozen=True)
class SampleKinds:
    """The kinds of a snapshot's samples."""

    rules: KindRules
    counts: dict[str, int]
    """Kind -> number of samples; only those that the state's fields allow."""
    sheets: dict[str, list[int]]
    """Kind -> ids to show, the most typical first; of ordinary samples, random ones."""
    suspects: NDArray[np.int64]
    """int64: stuck and misfit samples, the most suspicious first, as many as were asked for."""
    confirmed: dict[str, int] = field(default_factory=dict)
    """Kind -> how many of `counts` a forward pass decided."""

    @property
    def worth_showing(self) -> bool:
        """Whether the state's fields allow any kind but too few visits and ordinary."""
        return len(self.counts) > 2

    @property
    def unknown(self) -> list[str]:
        """Names of the kinds that the state's fields do not allow."""
        return [name for name in KIND_NAMES if name not in self.counts]


class KindCounts:
    """Counts blocks of samples by kind and keeps those to show. Memory does not grow with the samples."""

    def __init__(self, rules: KindRules, suspects: int) -> None:
        """suspects: how many to keep for a forward pass."""
        self._rules = rules
        self._counts = np.zeros(len(KIND_NAMES), np.int64)
        self._shown = [Smallest(KIND_SHEET_SAMPLES) for _ in KIND_NAMES]
        self._suspects = Smallest(suspects)

    def add(self, block: range, rows: Rows, kept: NDArray[np.bool_], ranks: NDArray[np.float32] | None = None) -> None:
        """Count the samples of a block, given the rules' columns. kept: bool [m], those that the run trains on.

        ranks: float32 [m], as `WholeRun.ranks`, to sort stuck samples and misfits by; None: by score.
        """
        kinds, score = self._rules.kinds(rows), self._rules.score(rows)
        suspicion = -score if ranks is None else ranks
        kinds[~kept] = -1
        self._counts += np.bincount(kinds[kept], minlength=len(KIND_NAMES))
        random = np.random.default_rng((_SEED, block.start)).random(len(kinds))
        keys = (rows[VISITS], suspicion, suspicion, self._rules.coldness(rows), random)
        for code, (shown, key) in enumerate(zip(self._shown, keys, strict=True)):
            places = np.flatnonzero(kinds == code)
            shown.add(places + block.start, key[places])
        places = np.flatnonzero((kinds == STUCK) | (kinds == MISFIT))
        self._suspects.add(places + block.start, suspicion[places])

    def result(self) -> SampleKinds:
        found = {name: (int(count), shown.chosen()[0].tolist())
                 for name, count, shown in zip(KIND_NAMES, self._counts, self._shown, strict=True)}  # fmt: skip
        told = self._rules.decidable
        return SampleKinds(
            self._rules, {name: found[name][0] for name in told}, {name: found[name][1] for name in told},
            self._suspects.chosen()[0],
        )  # fmt: skip


def read_rules(inspection: Inspection, on_progress: Callable[[int], None] = lambda done: None) -> KindRules:
    """Return the rules of the inspected snapshot, which there must be, in one pass over every sample's tau.

    Calls on_progress with the rows read so far. Raises DamagedChunkError, SnapshotNotFoundError.
    """
    assert inspection.reader is not None
    taus = {side: Distribution() for side in inspection.sides}
    for block, rows in read_blocks(inspection.reader, [*(f"{side}/tau" for side in taus), VISITS]) if taus else ():
        for side, tau in taus.items():
            tau.add(rows[f"{side}/tau"][rows[VISITS] > 0])
        on_progress(block.stop)
    return KindRules.of(inspection, taus)


def names_of(kinds: Codes) -> NDArray[np.object_]:
    """Return the names of kinds, str [m]."""
    return np.array(KIND_NAMES, object)[kinds]
