"""The blocks of samples that a cache keeps and drops as a whole, and which of them coming windows need when."""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice
from typing import NamedTuple, Self

import numpy as np

from ...storage.arrays import Int64s
from ...storage.selection import Selection
from ..order.order import AnyOrder, Order, Served, Window

ROWS_WITHOUT_ORDER = 1024


@dataclass(frozen=True)
class Blocks:
    """Ranges of ids, block k from starts[k] to starts[k + 1]; of a selection only its samples.

    The others, which the order never reads, are in blocks that follow, one after each of these.
    """

    starts: Int64s
    """int64 [blocks + 1], from 0 to the dataset's number of samples."""
    order: Order | None = None
    selection: Selection | None = None
    """Whose positions the order serves; None: all samples."""

    @classmethod
    def without_order(cls, samples: int) -> Self:
        """Return small blocks, for readers in any order."""
        return cls(np.append(np.arange(0, samples, ROWS_WITHOUT_ORDER), samples))

    @classmethod
    def of(cls, served: AnyOrder) -> Self:
        order, selection = (served.order, served.selection) if isinstance(served, Served) else (served, None)
        firsts = np.arange(0, order.samples, order.block_rows)
        if selection is not None:
            firsts = np.array(selection.ids_at(firsts))
            firsts[0] = 0
        return cls(np.append(firsts, served.samples), order, selection)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of_ids(self, ids: Int64s) -> Int64s:
        """Return the block of each id, int64 [b]."""
        blocks = np.searchsorted(self.starts, ids, side="right") - 1
        if self.selection is not None:
            blocks += len(self) * ~self.selection.are_trained(ids)
        return blocks

    def ids(self, block: int) -> Int64s:
        """Return a block's ids to read, int64 [k], ascending."""
        if self.order is not None and self.selection is not None:
            first = block * self.order.block_rows
            positions = np.arange(first, min(first + self.order.block_rows, self.order.samples))
            return np.array(self.selection.ids_at(positions[self.selection.are_present(positions)]))
        return np.arange(self.starts[block], self.starts[block + 1])


NEVER = 1 << 62
"""A step that is never reached."""


class Due(NamedTuple):
    """A block that a coming window needs."""

    block: int
    first_step: int
    last_step: int


class Schedule:
    """The blocks of a run's windows, in the order in which they are needed; a block is in one window an epoch.

    windows: for all steps to come, counted over all epochs. They are read `ahead` blocks in advance; with at least an
    epoch's blocks, the next use of each block is known.
    max_steps: blocks of windows that begin more than this many steps after the last finished step are not taken yet.
    With an epoch's steps, memory is that of three epochs' blocks.
    """

    def __init__(self, windows: Iterable[Window], ahead: int, max_steps: int = NEVER) -> None:
        windows = iter(windows)
        first = [*islice(windows, 1)]
        self._windows, self._ahead, self._max_steps = chain(first, windows), ahead, max_steps
        self._step = first[0].first_step - 1 if first else 0
        self._coming: deque[Due] = deque()
        self._again: list[tuple[int, Due]] = []  # a heap by first step
        self._uses: defaultdict[int, deque[Due]] = defaultdict(deque)
        self._taken: set[Due] = set()

    def take(self) -> Due | None:
        """Take and return the next block to fetch; None if there is none, or none yet."""
        while (due := self._first()) is not None and due.first_step - self._step <= self._max_steps:
            if self._again and self._again[0][1] is due:
                heappop(self._again)
            else:
                self._coming.popleft()
            if not self.is_over(due):
                self._taken.add(due)
                return due
        return None

    def has_ended(self) -> bool:
        """Return whether all blocks have been taken."""
        return self._first() is None

    def dropped(self, block: int) -> None:
        """Record that a dropped block must be fetched again for its next use, if it was taken for that use."""
        if self.next_use(block) < NEVER and (due := self._uses[block][0]) in self._taken:
            self._taken.remove(due)
            heappush(self._again, (due.first_step, due))

    def is_over(self, due: Due) -> bool:
        return due.last_step <= self._step

    def finished(self, step: int) -> None:
        """Record that a step's samples are no longer needed; windows that end with it are over."""
        self._step = max(self._step, step)

    def next_use(self, block: int) -> int:
        """Return the first step of the block's current or next window; NEVER if unknown."""
        uses = self._uses.get(block)
        while uses and uses[0].last_step <= self._step:
            self._taken.discard(uses.popleft())
        if not uses:
            self._uses.pop(block, None)
            return NEVER
        return uses[0].first_step

    def _first(self) -> Due | None:
        while len(self._coming) < self._ahead and (window := next(self._windows, None)) is not None:
            for block in window.blocks.tolist():
                due = Due(block, window.first_step, window.last_step)
                self.next_use(block)  # forgets uses that are over
                self._coming.append(due)
                self._uses[block].append(due)
        coming = self._coming[0] if self._coming else None
        if self._again and (coming is None or self._again[0][0] <= coming.first_step):
            return self._again[0][1]
        return coming
