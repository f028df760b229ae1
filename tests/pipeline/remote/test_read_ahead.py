"""The reader of coming windows beside callers who need the same blocks: nobody waits for a thing that waits for him."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.remote.plan import in_pages
from thermopile.pipeline.remote.read_ahead import ReadAhead
from thermopile.pipeline.remote.room import CacheTooSmallError
from thermopile.pipeline.remote.samples import CachedSamples
from thermopile.trainer.run.build import windows_from

pytestmark = pytest.mark.wide


class Pause:
    """Between the read-ahead's taking of room for a lot of blocks and its claim of their samples."""

    def __init__(self) -> None:
        self.lots, self._began, self._over = list[list[int]](), threading.Semaphore(0), threading.Event()
        self.end = self._over.set

    def begin(self, blocks):
        self.lots.append(blocks)
        self._began.release()
        assert self._over.wait(60)

    def wait_for(self, lots):
        for _ in range(lots):
            assert self._began.acquire(timeout=60)


@pytest.fixture
def pause(monkeypatch):
    """The read-ahead pauses until the fixture's `end` is called."""
    made, bring = Pause(), ReadAhead._bring

    def paused(self, entered, *rest):
        if entered:
            made.begin([due.block for due in entered])
        bring(self, entered, *rest)

    monkeypatch.setattr(ReadAhead, "_bring", paused)
    yield made
    made.end()


def held_in_a_pause(samples, ids, pause):
    """Hold samples in a thread, and end the pause when it has claimed them; return whether it came to an end."""
    claim = samples._claim

    def claimed(wanted, **options):
        found = claim(wanted, **options)
        if threading.current_thread() is caller and wanted[0][0] in samples._contents.values():
            pause.end()
        return found

    samples._claim = claimed
    caller = threading.Thread(target=lambda: samples.hold(ids).release(), daemon=True)
    caller.start()
    caller.join(20)
    return not caller.is_alive()


@contextmanager
def expecting(dataset, order, limit):
    with dataset.files.expect(windows_from(0, order, 1), order, limit):
        yield dataset.files


@pytest.fixture
def exact(address, local):
    """Return a function (order) -> bytes on disk of all records, and of each of an order's blocks."""
    probe = Dataset(address)
    for shard in range(local.shards):
        probe.files.bring_records(shard)
    samples = probe.files

    def sizes(order):
        starts = range(0, order.samples, order.block_rows)
        return samples.room.bytes, [
            in_pages(samples.size_of(np.arange(start, min(start + order.block_rows, order.samples))))
            for start in starts
        ]

    return sizes


def test_a_caller_takes_no_room_for_blocks_that_the_read_ahead_has_paid_for(address, local, exact, pause):
    order = Order.create(local.n, 64)
    records, blocks = exact(order)
    with expecting(Dataset(address), order, records + sum(blocks)) as samples:
        pause.wait_for(lots=1)
        assert held_in_a_pause(samples, np.arange(local.n), pause), "both wait for each other"
        assert samples.room.peak_bytes == records + sum(blocks)


def test_the_read_ahead_keeps_nothing_in_use_while_a_caller_waits_for_room(address, local, exact, pause):
    order = Order.create(local.n, 64, blocks_per_shard=16)
    records, blocks = exact(order)
    with expecting(Dataset(address), order, records + sum(blocks)) as samples:
        pause.wait_for(lots=2)
        samples.bring_records_of(np.arange(local.n))
        samples.room.take(None, samples.room.limit - samples.room.bytes)
        absent = set(range(len(blocks))).difference(*pause.lots)
        ids = [block * order.block_rows for block in (pause.lots[0][0], pause.lots[1][0], max(absent))]
        assert held_in_a_pause(samples, np.array(ids), pause), "both wait for each other"


@pytest.fixture
def waiting_for_records(monkeypatch):
    """Function (samples): let the read-ahead fetch its first records, and return whether it waits for their room."""
    may_begin, bring = threading.Event(), CachedSamples.bring_records_ahead

    def later(self, *given):
        assert may_begin.wait(60)
        bring(self, *given)

    def begin(samples):
        waits, wait = threading.Event(), samples.room.changed.wait
        samples.room.changed.wait = lambda: (waits.set(), wait())
        may_begin.set()
        return waits.wait(20)

    monkeypatch.setattr(CachedSamples, "bring_records_ahead", later)
    return begin


def test_the_read_ahead_waits_for_room_that_a_caller_has_until_the_end(address, local, waiting_for_records):
    dataset, order = Dataset(address), Order.create(local.n, 64, blocks_per_shard=16)
    with expecting(dataset, order, 1 << 30) as samples:
        held = samples.hold(np.arange(order.block_rows))
        samples.room.take(None, samples.room.limit - samples.room.bytes)
        assert waiting_for_records(samples), samples.failure
        held.release()
        samples.hold(np.array([local.n - 1])).release()
    for thread in threading.enumerate():
        if thread.name.startswith("thermopile-read-ahead"):
            thread.join(20)
            assert not thread.is_alive()


def test_an_error_of_the_dataset_that_ended_the_reading_ahead_is_raised_as_such(address):
    samples = Dataset(address).files
    samples.failure = CacheTooSmallError("data.cache is too small")
    with pytest.raises(CacheTooSmallError, match=r"^data\.cache is too small$"):
        samples.hold(np.array([0]))
