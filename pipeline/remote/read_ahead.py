"""Reading ahead of a training what its coming windows need."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DatasetError
from .plan import Ids
from .schedule import Due, Schedule

if TYPE_CHECKING:
    from .files import RemoteFiles

THREADS = 2
"""One begins with the next blocks while the other's last ranges arrive."""
LOT_BYTES = 32 << 20
"""Blocks are fetched in lots of about this size: small ones together, for their requests take as long as large ones;
large ones in parts, since whoever needs a sample on its way waits for its lot."""


class ReadAhead:
    """Threads that fetch the schedule's blocks in its order, as far as there is room.

    What ends them is kept as `failure`, and raised to the next caller whose samples are missing.
    """

    def __init__(self, files: RemoteFiles, schedule: Schedule) -> None:
        self.failure: BaseException | None = None
        self._files, self._schedule, self._closed = files, schedule, False
        self._fetcher = files.new_fetcher()
        self._bytes_a_row = max(1, sum(files.sizes.values()) // int(files.blocks.starts[-1]))
        self._lot_bytes = max(1, min(LOT_BYTES, files.room.limit // 16))
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"thermopile-read-ahead-{number}", daemon=True).start()

    def finished(self, step: int) -> None:
        """Record that the samples of all steps up to this one have been read: blocks of ended windows may go."""
        with self._files.changed:
            self._schedule.finished(step)
            self._files.changed.notify_all()

    def close(self) -> None:
        """End the threads after what they are fetching."""
        with self._files.changed:
            self._closed = True
            self._files.changed.notify_all()
        self._fetcher.close()

    def _run(self) -> None:
        try:
            while lot := self._next_lot():
                self._fetch(lot)
        except BaseException as error:
            with self._files.changed:
                if not self._closed:
                    self.failure = self.failure or error
                self._files.changed.notify_all()

    def _next_lot(self) -> list[Due]:
        lot, size = list[Due](), 0
        with self._files.changed:
            while not self._closed and size < self._lot_bytes and (due := self._schedule.take()) is not None:
                lot.append(due)
                size += self._bytes_a_row * int(np.diff(self._files.blocks.starts[due.block : due.block + 2])[0])
        return lot

    def _fetch(self, lot: list[Due]) -> None:
        """Fetch a lot: the records of all its blocks, then their samples, as soon as there is room for each."""
        files = self._files
        ids = {due: files.blocks.ids(due.block) for due in lot}
        files.bring_records_ahead(np.concatenate([*ids.values()]), self._fetcher)
        entered: dict[Due, int] = {}
        for due in lot:
            try:
                size = files.size_on_disk(ids[due])
            except DatasetError:
                continue  # a damaged record: the batch with this sample will raise it
            if not self._enter(due, size):
                self._bring(entered, ids)  # rather than let it wait for the next one's room
                entered = {}
                if not self._wait_to_enter(due, size):
                    continue
            entered[due] = size
        self._bring(entered, ids)

    def _enter(self, due: Due, size: int) -> bool:
        with self._files.changed:
            if not self._files.room.take_ahead(due.block, size, due.first_step):
                return False
            self._files.room.enter([due.block], ahead=True)
            return True

    def _wait_to_enter(self, due: Due, size: int) -> bool:
        """Wait until there is room for a block; return False if its window is over by then."""
        with self._files.changed:
            while not (self._closed or self._schedule.is_over(due)):
                if self._enter(due, size):
                    return True
                self._files.changed.wait()
        return False

    def _bring(self, entered: dict[Due, int], ids: dict[Due, Ids]) -> None:
        if not entered:
            return
        together = np.concatenate([ids[due] for due in entered])
        rows = max(1, LOT_BYTES // self._bytes_a_row)
        for first in range(0, len(together), rows):
            self._files.bring_ahead(together[first : first + rows], self._fetcher)
        for due, size in entered.items():
            self._files.room.is_whole(due.block, size)
            self._files.room.leave([due.block], ahead=True)
