"""Read the samples of a batch in threads, for both loaders."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ...storage.arrays import Int64s
from ..dataset.files import Hold
from ..dataset.row_records import RECORD
from ..dataset.shard import max_open_shards
from ..dataset.stored_sample import NO_TOKEN, REASONS, SOUND, TOKENS_CHANGED, Located
from ..errors import DatasetError
from ..opening import Dataset
from ..planted import Planting
from ..views.draws import draw_captions

_Captions = Literal["draw", "first"]


class Reading(NamedTuple):
    """A batch being read: its samples, and a future for each thread's rows."""

    sample_ids: Int64s
    located: Located
    parts: list[Future[tuple[int, int]]]
    held: Hold


class Reader:
    """Locates a dataset's samples by id and reads them, with few files open at a time."""

    def __init__(
        self, dataset: Dataset, threads: int, captions: _Captions, seed: int, planting: Planting | None = None
    ) -> None:
        """captions: draw a sample's caption, from the seed, for each epoch, or always take its first, its own or one
        that `planting` gives it."""
        self._dataset, self._threads, self._planting = dataset, threads, planting
        self._draws = captions == "draw" and dataset.index.captions_per_sample > 1
        self._seed = np.uint64(seed)
        self._max_run = max(1, max_open_shards() // threads)
        self._pool = ThreadPoolExecutor(threads, "thermopile-loader")

    def locate(self, ids: Int64s, epoch: int) -> Located:
        """Locate the samples, int64 [b], and choose their captions of this epoch.

        Raises DatasetError naming the first sample with a damaged record.
        """
        places, donors = self._planted(ids)
        shards, rows = self._dataset.locate(shown := np.concatenate([ids, donors]))
        records, tars = np.empty(len(shown), RECORD), np.empty(len(shown), np.int64)
        by_shard = np.argsort(shards, kind="stable")
        with self._dataset.files.hold(shown):
            for at in np.split(by_shard, np.flatnonzero(np.diff(shards[by_shard])) + 1):
                shard = self._dataset.shard(int(shards[at[0]]))
                records[at], tars[at] = shard.resolved(rows[at])
        for name in ("tokens_at", "captions", "tokens_checksum"):  # in the same .beton, as donors are of the same shard
            records[name][places] = records[name][len(ids) :]
        located = shard.located(records[: len(ids)], tars[: len(ids)])
        if not self._draws:
            return located
        return located._replace(caption=draw_captions(self._seed, np.uint64(epoch), ids, located.captions))

    def start(self, ids: Int64s, located: Located, kernel: Callable[..., Any], *given: Any) -> Reading:
        """Share the rows of a batch among the threads, which call kernel(located, low, high, *given).

        kernel: compiled; processes samples low … high - 1, whose files are open, and returns the first damaged row and
        its fault, or (high, SOUND).
        """
        shards, _ = self._dataset.locate(ids)
        places, donors = self._planted(ids) if self._dataset.fetches else (ids[:0], ids[:0])
        held, tokens_of = self._dataset.files.hold(np.concatenate([ids, donors])), ids.copy()
        tokens_of[places] = donors
        located = self._dataset.files.placed(located, ids, tokens_of)
        cuts = np.linspace(0, len(ids), self._threads + 1).astype(int).tolist()
        parts = [self._pool.submit(self._run, located, shards, *cut, kernel, given) for cut in pairwise(cuts)]
        return Reading(ids, located, parts, held)

    def _run(
        self, located: Located, shards: Int64s, low: int, high: int, kernel: Any, given: tuple[Any, ...]
    ) -> tuple[int, int]:
        for start in range(low, high, self._max_run):
            end = min(start + self._max_run, high)
            files = located.open(shards[start:end].tolist(), self._dataset.file, start)
            row, fault = kernel(located, start, end, *given)
            files.clear()  # before the next files are opened
            if fault != SOUND:
                return row, fault
        return high, SOUND

    def finish(self, reading: Reading) -> None:
        """Wait for a batch. Raises DatasetError naming a damaged sample; OSError if a file cannot be opened."""
        with reading.held:
            found = [part.result() for part in reading.parts]
        for row, fault in found:
            if fault != SOUND:
                raise self.damaged(int(reading.sample_ids[row]), fault)

    def damaged(self, sample_id: int, fault: int) -> DatasetError:
        """Return the error to raise for a damaged sample; fault: a key of REASONS."""
        ids = np.array([sample_id])
        donors = self._planted(ids)[1] if fault in (TOKENS_CHANGED, NO_TOKEN) else ids[:0]
        shard, row = (int(at[-1]) for at in self._dataset.locate(np.concatenate([ids, donors])))
        return self._dataset.shard(shard).damaged(row, REASONS[fault])

    def _planted(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        return self._planting.of(ids) if self._planting else (ids[:0], ids[:0])

    def close(self) -> None:
        """Stop the threads after their current batch."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def own_thread(device_id: int | None) -> ThreadPoolExecutor:
    """Return a thread for a loader's host work, apart from its caller's thread, with this CUDA device as current."""
    name = "thermopile-batches"
    if device_id is None:
        return ThreadPoolExecutor(1, name)
    # A thread begins with device 0, and would pin memory for it and allocate on it.
    return ThreadPoolExecutor(1, name, torch.cuda.set_device, (device_id,))
