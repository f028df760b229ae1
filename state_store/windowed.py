"""A rank's blocks under a memory budget, read ahead and written back as the order's windows move."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from ..storage.arrays import Bools, Int64s, Uint32s
from .background import BackgroundThread
from .errors import MemoryBudgetError, StateStoreError
from .history import Snapshot
from .records import aligned_words
from .rows import Blocks, BlockWindow
from .schema import Schema
from .working_tier import WorkingTier

_log = logging.getLogger(__name__)

_NONE = -1
"""A slot without a block, or a block without a slot."""
_NEVER = 1 << 62
"""A step that is never reached."""


class WindowedBlocks(Blocks):
    """The blocks of the windows passed to `expect`, each in a slot of memory.

    A thread reads the blocks of coming windows into free slots, and writes back and frees blocks whose window is over.
    The future is known, so a block that a window still needs is not evicted. If a requested block is missing, because
    the thread is late or the caller left the announced windows, it is fetched at once, if necessary in place of the
    block needed last. The thread does not raise its I/O errors: the caller that needs the block repeats the read and
    raises.

    `lock` guards everything. Only a caller whose block is missing waits for the disk while holding it.
    """

    def __init__(self, schema: Schema, owned: range, block_rows: int, slots: int, tier: WorkingTier, step: int) -> None:
        self.words = aligned_words(slots * block_rows, schema.row_words)
        self.lock = threading.Condition()
        self._rows, self._block_rows, self._tier = len(owned), block_rows, tier
        self._first_block = owned.start // block_rows
        self._thread = BackgroundThread("blocks")
        self._scheduled = self._ended = False
        self._slot_of = np.full(-(-len(owned) // block_rows), _NONE, dtype=np.int64)
        self._block_in = np.full(slots, _NONE, dtype=np.int64)
        self._unsaved = np.zeros(slots, dtype=bool)  # newer than on disk
        self._first_needed, self._last_needed = np.zeros((2, slots), dtype=np.int64)
        self._step = step  # last step whose put is in the rows
        self._coming: Iterator[tuple[int, BlockWindow]] = iter(())
        self._last_error = ""

    def expect(self, windows: Iterable[BlockWindow]) -> None:
        with self.lock:
            # Lazily: a window that is already over when reached is skipped.
            self._coming = (
                (int(block) - self._first_block, window)
                for window in windows
                if window.last_step > self._step
                for block in window.blocks
            )
        self._schedule()

    def finished(self, step: int) -> None:
        with self.lock:
            self._step = max(self._step, step)
        self._schedule()

    def places(self, rows: Int64s, *, wait: bool) -> Int64s | None:
        """Raises MemoryBudgetError if the rows span more blocks than there are slots; OSError, DamagedChunkError."""
        blocks, row_in_block = np.divmod(rows, self._block_rows)
        while (absent := self._slot_of[blocks] == _NONE).any():
            if not wait:
                return None
            self._fetch(int(blocks[absent][0]), np.unique(blocks))
        return np.asarray(self._slot_of[blocks] * self._block_rows + row_in_block)

    def changed(self, rows: Int64s) -> None:
        self._unsaved[self._slot_of[rows // self._block_rows]] = True

    def in_memory(self) -> Bools:
        return np.asarray(self._slot_of != _NONE)

    def records(self, block: int) -> Uint32s:
        return self._in_slot(int(self._slot_of[block]), block)

    def fetched(self, block: int) -> Uint32s:
        return self._tier.read(block)

    def follow(self, snapshot: Snapshot) -> None:
        self._tier.follow(snapshot)

    def check(self) -> None:
        self._thread.check()

    def close(self) -> None:
        """End the thread and delete the working tier. Changes that no snapshot contains are lost."""
        self._ended = True
        self._thread.close()
        self._tier.remove()

    # The thread's work, one block at a time until nothing is left.

    def _schedule(self) -> None:
        with self.lock:
            if self._scheduled or self._ended:
                return
            self._scheduled = True
        self._thread.submit(self._work)

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 (a caller that needs the block retries and raises)
                with self.lock:
                    self._rest()
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    _log.warning("the state's working tier %s: %s", self._tier.path, error)
                return

    def _next_job(self) -> Callable[[], None] | None:
        """Choose the next job; without one, return None and mark the thread unscheduled."""
        with self.lock:
            try:
                if not self._ended:
                    over = (self._block_in != _NONE) & (self._last_needed <= self._step)
                    if over.any():
                        return partial(self._write_back, int(np.argmax(over)))
                    if (coming := self._block_to_read_ahead()) is not None:
                        return partial(self._read, *coming)
            except BaseException:
                self._ended = True
                self._rest()
                raise
            self._last_error = ""
            self._rest()
            return None

    def _rest(self) -> None:
        self._scheduled = False
        self.lock.notify_all()

    def _write_back(self, slot: int) -> None:
        """Save the block in `slot` if it changed, and free the slot unless the block is needed again by then."""
        with self.lock:
            changed = bool(self._unsaved[slot])
            self._unsaved[slot] = False
        try:
            if changed:
                self._save(int(self._block_in[slot]), slot)
        except BaseException:
            self._unsaved[slot] = True
            raise
        with self.lock:
            if not self._unsaved[slot] and self._last_needed[slot] <= self._step:
                self._release(slot)
            self.lock.notify_all()

    def _block_to_read_ahead(self) -> tuple[int, int, BlockWindow] | None:
        """Reserve a free slot for the next block of the coming windows; extend the stay of blocks already in memory."""
        free = np.flatnonzero(self._block_in == _NONE)
        for block, window in self._coming if len(free) else ():
            if not 0 <= block < len(self._slot_of):
                first, end = self._first_block, self._first_block + len(self._slot_of)
                raise StateStoreError(
                    f"a window has block {block + first}, but this process holds the blocks {first} … {end - 1}; "
                    "announce only this rank's windows"
                )
            if (slot := int(self._slot_of[block])) == _NONE:
                self._block_in[free[0]] = block
                return block, int(free[0]), window
            self._last_needed[slot] = max(self._last_needed[slot], window.last_step)
        return None

    def _read(self, block: int, slot: int, window: BlockWindow) -> None:
        try:
            self._load(block, slot)
        except BaseException:
            self._block_in[slot] = _NONE
            raise
        with self.lock:
            self._occupy(slot, block, window.first_step, window.last_step)
            self.lock.notify_all()

    # For a caller whose block is missing; called under the lock.

    def _fetch(self, block: int, needed: Int64s) -> None:
        """Fetch a block that no window announced, or wait for the thread to read an announced block."""
        if len(needed) > len(self._block_in):
            row_bytes = self.words.shape[1] * 4
            raise MemoryBudgetError(
                f"one batch needs {len(needed):,} blocks of {self._block_rows:,} rows, but the memory budget holds "
                f"{len(self._block_in):,}. Raise memory_budget to at least "
                f"{len(needed) * self._block_rows * row_bytes:,} bytes, or give the order a narrower window"
            )
        if self._scheduled:
            # The thread is late, not idle: fetching its next block here would read the block twice.
            self.lock.wait()
            return
        # A free slot, else a slot whose window is over, else the slot needed last.
        score = np.where(self._last_needed <= self._step, _NEVER, self._first_needed)
        score[self._block_in == _NONE] = _NEVER + 1
        score[np.isin(self._block_in, needed)] = -1
        slot = int(np.argmax(score))
        if self._block_in[slot] != _NONE:
            if self._unsaved[slot]:
                self._save(int(self._block_in[slot]), slot)
                self._unsaved[slot] = False
            self._release(slot)
        self._load(block, slot)
        self._block_in[slot] = block
        self._occupy(slot, block, self._step, self._step + 1)  # the block stays until the put of the step that took it

    # Slots.

    def _occupy(self, slot: int, block: int, first_step: int, last_step: int) -> None:
        self._slot_of[block] = slot
        self._first_needed[slot], self._last_needed[slot] = first_step, last_step

    def _release(self, slot: int) -> None:
        self._slot_of[self._block_in[slot]] = _NONE
        self._block_in[slot] = _NONE

    def _in_slot(self, slot: int, block: int) -> Uint32s:
        rows = min(self._block_rows, self._rows - block * self._block_rows)
        return self.words[slot * self._block_rows :][:rows]

    def _load(self, block: int, slot: int) -> None:
        self._in_slot(slot, block)[:] = self._tier.read(block)
        self.blocks_read += 1

    def _save(self, block: int, slot: int) -> None:
        self._tier.write(block, self._in_slot(slot, block))
        self.blocks_written += 1
