"""Read ahead of training the samples that its coming windows need."""

import threading

import numpy as np

from ...storage.arrays import Int64s
from ..errors import DatasetError
from .fetching import Fetcher
from .samples import CachedSamples
from .schedule import Due, Schedule

THREADS = 2
"""Number of threads: one begins with the next blocks while the other's last ranges arrive."""
LOT_BYTES = 32 << 20
"""Blocks are fetched in lots of about this size: small blocks together, since their requests take as long as large
ones; large blocks in parts, since a caller who needs a sample on its way waits for the whole lot."""


class ReadAhead:
    """Threads that fetch the schedule's blocks in its order, as far as there is room.

    Their error is kept as the samples' `failure`, and raised to the next caller whose samples are missing.
    """

    def __init__(self, samples: CachedSamples, schedule: Schedule) -> None:
        self._samples, self._schedule, self._closed = samples, schedule, False
        self._turn, self._fetcher = threading.Lock(), Fetcher("read-ahead")
        self._bytes_a_row = max(1, int(samples.beton_bytes().sum()) // int(samples.blocks.starts[-1]))
        self._lot_bytes = max(1, min(LOT_BYTES, samples.room.limit // 16))
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"thermopile-read-ahead-{number}", daemon=True).start()

    def finished(self, step: int) -> None:
        """Record that the samples of all steps up to this one have been read: blocks of ended windows may go."""
        with self._samples.lock:
            self._schedule.finished(step)
            self._samples.notify_all()

    def close(self) -> None:
        """End the threads after their current fetch."""
        with self._samples.lock:
            self._closed = True
            self._samples.notify_all()
        self._fetcher.close()

    def _run(self) -> None:
        try:
            while self._fetch_lot():
                pass
        except BaseException as error:  # noqa: BLE001 (raised to the caller whose samples are missing)
            with self._samples.lock:
                if not self._closed:
                    self._samples.failure = self._samples.failure or error
                self._samples.notify_all()

    def _fetch_lot(self) -> bool:
        """Fetch the records of the next blocks, then each block's samples as soon as there is room.

        Lots take room one after the other. Returns False if no lot is left.
        """
        samples, entered = self._samples, list[Due]()
        try:
            with self._turn:
                if not (lot := self._next_lot()):
                    return False
                ids = {due: samples.blocks.ids(due.block) for due in lot}
                together, first_step = np.concatenate([*ids.values()]), lot[0].first_step
                samples.bring_records_ahead(together, first_step, self._fetcher, self._has_ended)
                for due in lot:
                    try:
                        size = samples.size_of(ids[due])
                    except DatasetError:
                        continue  # a damaged record, which the batch with this sample will raise
                    if not self._enter(due, size):
                        self._bring(entered, ids)  # rather than let these blocks wait for the next one's room
                        if not self._wait_to_enter(due, size):
                            continue
                    entered.append(due)
            self._bring(entered, ids)
        finally:
            self._leave(entered)
        return True

    def _next_lot(self) -> list[Due]:
        lot, size = list[Due](), 0
        with self._samples.lock:
            while not self._closed:
                while size < self._lot_bytes and (due := self._schedule.take()) is not None:
                    lot.append(due)
                    size += self._bytes_a_row * int(np.diff(self._samples.blocks.starts[due.block : due.block + 2])[0])
                if lot or self._schedule.has_ended():
                    return lot
                self._samples.room.changed.wait()
        return []

    def _enter(self, due: Due, size: int) -> bool:
        with self._samples.lock:
            if not self._samples.room.take_ahead(due.block, size, due.first_step):
                return False
            self._samples.room.enter([due.block], ahead=True)
            return True

    def _wait_to_enter(self, due: Due, size: int) -> bool:
        """Wait until there is room for a block; return False if its window is over by then."""
        with self._samples.lock:
            while not (self._has_ended() or self._schedule.is_over(due)):
                if self._enter(due, size):
                    return True
                self._samples.room.changed.wait()
        return False

    def _has_ended(self) -> bool:
        return self._closed or self._samples.failure is not None

    def _bring(self, entered: list[Due], ids: dict[Due, Int64s]) -> None:
        """Fetch the samples of blocks that have room, then leave the blocks."""
        if not entered:
            return
        together = np.concatenate([ids[due] for due in entered])
        rows = max(1, LOT_BYTES // self._bytes_a_row)
        for first in range(0, len(together), rows):
            self._samples.bring_ahead(together[first : first + rows], self._fetcher)
        self._leave(entered)

    def _leave(self, entered: list[Due]) -> None:
        while entered:
            self._samples.room.leave([entered.pop().block], ahead=True)
