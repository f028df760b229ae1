"""Turn a snapshot of the state into figures in two passes over its rows, one block in memory at a time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from ....pipeline.opening import PART, Mixture
from ....state_store.reader import StateReader
from ....state_store.schema import LAST_STEP, VISITS
from ....trainer.config import RANDOM
from .. import BY_NAME, AsJson, Bools, Float32s, Hidden, Int64s, OnTask, named, silent
from ..opening import Inspection, Rows, read_blocks
from .correlation import Joint, JointCounts
from .distribution import Distribution, Figures, Smallest
from .groups import CLASS_COLUMN, GroupCounts, TauGroups, TooManyGroupsError, check_columns, codes_of
from .kinds import KIND_NAMES, MISFIT, STUCK, KindCounts, KindRules, SampleKinds
from .misfits import Doubted, WholeRun

SHEET_SAMPLES = 72
POOL_SAMPLES = 1 << 20
"""Visited samples kept in memory together (for permutations and the map): all, up to a million."""
MAX_NEVER_VISITED = 10
_SEED = 2023

End = Literal["lowest", "highest", "random"]
ENDS: tuple[End, End] = ("lowest", "highest")


@dataclass(frozen=True)
class Side:
    """One side of the pairs, or the only side of a run on images."""

    name: Hidden[str]
    """As in the state: `image`, `text` or `sample`."""
    tau: Figures
    """Tau of the visited samples."""
    share_at_tau_min: float | None
    """Share of the visited samples, 0 … 1; None if the objective has none."""
    share_at_tau_max: float | None


class Sheet(NamedTuple):
    """The samples at one end of one side's temperatures, the most extreme first, or random ones for comparison.

    Many may share a bound of tau. Among equals, the coldest are those with the lowest log s, whose positive outweighs
    the negatives most: the rarest, while a high log s makes a misfit. The hottest are those with the highest. Then, or
    if the objective keeps no log s, the lowest ids.
    """

    side: Side | None
    """None for random samples."""
    end: End
    sample_ids: list[int]
    not_shown: int
    """Samples left out although their tau equals that of the last one shown."""
    tie_broken_by_log_s: bool
    """Whether there are equals and log s orders them."""


class Pool(NamedTuple):
    """All visited samples or a random million of them; ids ascending."""

    sample_ids: Int64s
    """int64 [p]."""
    tau: dict[str, Float32s]
    """Side -> float32 [p]."""


@dataclass(frozen=True)
class Survey:
    """Figures of one snapshot."""

    samples: int
    """Samples that the run trains on: all of the dataset, or those selected, except planted ones. All figures are of
    them."""
    dataset_samples: int
    """All samples of the dataset."""
    share_visited: float
    """0 … 1."""
    never_visited: list[int]
    """The lowest ids, ten at most."""
    visits: Figures
    """Visits of all samples."""
    staleness: Annotated[Figures, named("staleness_steps")]
    """Steps since the last visit, for visited samples."""
    fields: dict[str, Figures]
    """Field name, such as `image/log_s` -> values of the visited samples."""
    sides: Annotated[list[Side], BY_NAME]
    """Empty if the objective keeps no tau or no sample was visited."""
    joint: Annotated[Joint | None, AsJson(lambda joint: joint and joint.spearman), named("image_and_text_spearman")]
    sheets: Hidden[list[Sheet]]
    pool: Hidden[Pool]
    groups: list[TauGroups]
    """One entry per requested column that has groups."""
    parts: Annotated[TauGroups | None, AsJson(lambda parts: parts and parts.means())]
    """The parts of a mixture; None for a single dataset."""
    classes: Hidden[TauGroups | None]
    """The groups of the first requested column, also of a run without temperatures."""
    kinds: SampleKinds | None
    """None if no sample was visited."""
    doubted: Doubted | None
    """None unless the run has `doubt_after` and all its snapshots were read."""

    @property
    def visited(self) -> int:
        return self.staleness.count


def survey(
    inspection: Inspection,
    by: Sequence[str] = (CLASS_COLUMN,),
    on_progress: OnTask = silent,
    *,
    suspects: int = 0,
    over_run: bool = False,
) -> Survey | None:
    """Survey the inspection's whole snapshot; None if it has none. `by`: columns to group the samples by.

    suspects: how many of the samples that may be stuck or misfits to name, for a forward pass. over_run: sort these by
    log s over the whole run, not at the snapshot. Notes why parts are missing. Calls on_progress with the rows read.
    Raises ConfigError for an unknown column, DamagedChunkError, SnapshotNotFoundError if the run deletes the snapshot
    meanwhile, DatasetError.
    """
    reader, notes = inspection.reader, inspection.notes
    if reader is None:
        return None
    if inspection.dataset:
        check_columns(inspection.dataset, by)
    is_over_run = over_run and reader.samples > 0
    whole_run = WholeRun(inspection, partial(on_progress, "reading all snapshots")) if is_over_run else None
    rules, first = KindRules.of(inspection), _FirstPass(reader, inspection)
    for block, rows in read_blocks(reader, reader.columns):
        kept = reader.is_kept(block.start, block.stop) & ~rules.are_planted(block)
        first.add(block, rules.judged(rows, block), kept)
        on_progress("reading the state", block.stop, 2 * reader.samples)
    sides = first.sides(inspection.settings)
    if not first.staleness.count:
        unchanged = ": every tau still has its initial value" if inspection.sides else ""
        notes.append(f"No sample was visited by {reader.snapshot.tag}{unchanged}.")
    elif inspection.sides and not sides:
        lacking = " or ".join(name for name in inspection.sides if not first.fields[f"{name}/tau"].count)
        notes.append(f"No visited sample has a finite tau ({lacking}). `thermopile state check` lists them.")
    parts = [PART] if isinstance(inspection.dataset, Mixture) else []
    second = _SecondPass(first, sides, inspection, [*dict.fromkeys([*by, *parts])], suspects)
    for block, rows in read_blocks(reader, second.columns) if first.staleness.count else ():
        kept, ranks = reader.is_kept(block.start, block.stop), whole_run.ranks(block) if whole_run else None
        second.add(block, rules.judged(rows, block), kept, ranks)
        on_progress("reading the state", reader.samples + block.stop, 2 * reader.samples)
    pool = Pool(second.pool, {name: np.concatenate(parts) for name, parts in second.pool_tau.items()})
    groups = second.groups(pool)
    kinds = second.kinds.result() if first.staleness.count else None
    unknown = [KIND_NAMES[code] for code in (STUCK, MISFIT) if kinds and KIND_NAMES[code] not in kinds.counts]
    if kinds and kinds.worth_showing and unknown and RANDOM not in reader.columns:
        notes.append(f"The objective keeps too little state to tell which samples are {' or '.join(unknown)}.")
    samples = reader.kept - len(rules.planted)
    return Survey(
        samples,
        reader.samples,
        first.staleness.count / samples,
        first.never_visited,
        first.visits,
        first.staleness,
        first.fields,
        sides,
        second.joint.result() if second.joint else None,
        second.sheets(),
        pool,
        [each for each in groups if sides and each.column not in parts],
        next((each for each in groups if sides and each.column in parts), None),
        next((each for each in groups if each.column in by[:1]), None),
        kinds,
        whole_run.doubted() if whole_run and "doubt_after" in inspection.settings else None,
    )


def with_tau(rows: Rows, sides: Iterable[str]) -> Bools:
    """Return which samples have usable temperatures, bool [m]: visited and finite.

    The store rejects a non-finite tau; if one is damaged, it must not turn the figures of all others to NaN.
    """
    shown: Bools = rows[VISITS] > 0
    for side in sides:
        shown &= np.isfinite(rows[f"{side}/tau"])
    return shown


class _FirstPass:
    def __init__(self, reader: StateReader, inspection: Inspection) -> None:
        self._step, self._sides = reader.snapshot.step, (sides := inspection.sides)
        self.with_log_s = {side for side in sides if f"{side}/log_s" in reader.fields}
        self.visits, self.staleness = Distribution(), Distribution()
        self.fields = {name: Distribution() for name in reader.fields}
        self.ends: dict[tuple[str, End], Smallest] = {(s, end): Smallest(SHEET_SAMPLES) for s in sides for end in ENDS}
        self.pool = Smallest(POOL_SAMPLES)
        self.never_visited: list[int] = []

    def add(self, block: range, rows: Rows, kept: Bools) -> None:
        seen = rows[VISITS] > 0
        places = np.flatnonzero(seen)
        if len(self.never_visited) < MAX_NEVER_VISITED and len(places) < len(seen):
            unseen = np.flatnonzero(kept & ~seen)[:MAX_NEVER_VISITED] + block.start
            self.never_visited = (self.never_visited + unseen.tolist())[:MAX_NEVER_VISITED]
        self.visits.add(rows[VISITS][kept].astype(np.float32))
        self.staleness.add((self._step - rows[LAST_STEP][places].astype(np.int64)).astype(np.float32))
        for name, distribution in self.fields.items():
            distribution.add(rows[name][places])
        shown = np.flatnonzero(with_tau(rows, self._sides))
        for side in self._sides:
            tau = rows[f"{side}/tau"][shown]
            log_s = rows[f"{side}/log_s"][shown] if side in self.with_log_s else None
            self.ends[side, "lowest"].add(shown + block.start, tau, log_s)
            self.ends[side, "highest"].add(shown + block.start, -tau, None if log_s is None else -log_s)
        # Random keys, reproducible per block.
        keys = np.random.default_rng((_SEED, block.start)).random(len(seen))[shown]
        self.pool.add(shown + block.start, keys)

    def sides(self, settings: Mapping[str, Any]) -> list[Side]:
        taus = {name: self.fields[f"{name}/tau"] for name in self._sides}
        if not all(tau.count for tau in taus.values()):
            return []
        low, high = settings.get("tau_min"), settings.get("tau_max")
        found = []
        for name, tau in taus.items():
            at_tau_min = None if low is None else tau.share_at_most(low)
            at_tau_max = None if high is None else 1 - tau.share_below(high)
            found.append(Side(name, tau, at_tau_min, at_tau_max))
        return found


class _SecondPass:
    def __init__(
        self, first: _FirstPass, sides: list[Side], inspection: Inspection, by: Sequence[str], suspects: int
    ) -> None:
        self._sides, self._notes = sides, inspection.notes if sides else []
        rules = KindRules.of(inspection)
        self.kinds = KindCounts(rules, suspects)
        self.columns = list(dict.fromkeys([*(f"{side.name}/tau" for side in sides), *rules.columns]))
        drawn = first.pool.chosen()[0]
        self.pool, self._random = np.sort(drawn), drawn[:SHEET_SAMPLES].tolist()
        self.pool_tau: dict[str, list[Float32s]] = {side.name: [] for side in sides}
        self.joint = JointCounts(sides[0].tau, sides[1].tau) if len(sides) == 2 else None
        self._with_log_s = first.with_log_s
        self._ends = {key: end.chosen() for key, end in first.ends.items()} if sides else {}
        self._equal = dict.fromkeys(self._ends, 0)  # number of samples with the same tau as the last one chosen
        limits = {side.name: (side.tau.mean, side.tau.bin_of(0.05)[1], side.tau.bin_of(0.95)[0]) for side in sides}
        self._grouping, dataset = list[GroupCounts](), inspection.dataset
        for column in by if len(drawn) else ():
            try:
                if dataset:
                    self._grouping.append(GroupCounts(column, *codes_of(dataset, column), limits))
            except TooManyGroupsError as error:
                self._notes.append(str(error))

    def add(self, block: range, rows: Rows, kept: Bools, ranks: Float32s | None) -> None:
        self.kinds.add(block, rows, kept, ranks)
        tau = {side.name: rows[f"{side.name}/tau"] for side in self._sides}
        seen = with_tau(rows, tau)
        pooled = self.pool[slice(*np.searchsorted(self.pool, (block.start, block.stop)))] - block.start
        for name, parts in self.pool_tau.items():
            parts.append(tau[name][pooled])
        if self.joint:
            self.joint.add(*(of_side[seen] for of_side in tau.values()))
        for (name, end), (_, keys) in self._ends.items():
            self._equal[name, end] += int((tau[name][seen] == np.float32(abs(keys[-1]))).sum())
        for counts in self._grouping:
            counts.add(block, kept, seen, tau)

    def sheets(self) -> list[Sheet]:
        sheets = []
        for side in self._sides:
            for end in ENDS:
                ids, keys = self._ends[side.name, end]
                not_shown = self._equal[side.name, end] - int((keys == keys[-1]).sum())
                tie = side.name in self._with_log_s and (not_shown > 0 or len(np.unique(keys)) < len(keys))
                sheets.append(Sheet(side, end, ids.tolist(), not_shown, tie))
        return [*sheets, Sheet(None, "random", self._random, 0, False)] if sheets else []

    def groups(self, pool: Pool) -> list[TauGroups]:
        found = []
        for counts in self._grouping:
            groups = counts.result(*pool)
            if groups and len(groups.names) > 1:
                found.append(groups)
            elif groups:
                all_have = f"All {groups.sizes[0]:,} samples with a {groups.word} have the same one"
                self._notes.append(f"{all_have}, so there is nothing to compare.")
            elif counts.column == CLASS_COLUMN:
                self._notes.append("No sample has a class, so tau cannot be compared with class size.")
            else:
                lacks = f"No sample has a value in the column {counts.column}"
                self._notes.append(f"{lacks}, so tau cannot be grouped by it.")
        return found
