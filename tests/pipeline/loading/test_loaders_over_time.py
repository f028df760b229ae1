"""What a loader leaves behind: batches that stay, threads that end, damage that is named."""

import ctypes
import gc
import os
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest
import torch

from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.dali_loader import DALILoader
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.loading.reader import Reader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES, Recipe

from support.programs import program
from support.threads import watch


def test_a_batch_kept_stays_as_it_was(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset)
    batches = loader.epoch(0)
    kept = [next(batches) for _ in range(4)]
    copies = [batch.views[0].clone() for batch in kept]
    for _ in batches:
        pass
    loader.close()
    assert all(torch.equal(batch.views[0], copy) for batch, copy in zip(kept, copies, strict=True))


def test_the_caller_s_thread_neither_computes_the_order_nor_reads(open_loader, pairs_dataset, monkeypatch):
    threads = watch(monkeypatch, [(Order, "batch_ids"), (Reader, "locate"), (Reader, "start")])
    for _ in open_loader(pairs_dataset).epoch(0):
        pass
    assert len(threads) == 3
    assert threading.current_thread() not in set.union(*threads.values())


def threads_and_files():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def resident_megabytes():
    """Memory in use, without what the allocator has been given back and keeps, which depends on the tests before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.wide
@pytest.mark.parametrize("epochs", [5, pytest.param(50, marks=pytest.mark.soak)])
def test_epochs_broken_off_half_way_leave_threads_files_and_memory_as_they_were(open_loader, images_dataset, epochs):
    loader = open_loader(images_dataset, views=2, image_size=64, batch_size=64, recipe=RECIPES["simclr"], workers=2)

    def highest(numbers):
        """Most megabytes after any of these epochs, each broken off half-way."""
        megabytes = []
        for epoch in numbers:
            batches = loader.epoch(epoch)
            for _ in range(loader.order.steps_per_epoch // 2):
                next(batches)
            batches.close()
            megabytes.append(resident_megabytes())
        return max(megabytes)

    first_half = highest(range(epochs))
    before = threads_and_files()
    # A batch has 6 MB, and two are ahead.
    assert highest(range(epochs, 2 * epochs)) < first_half + 24
    assert threads_and_files() == before


@pytest.mark.wide
def test_loaders_dropped_unclosed_end_neither_the_process_nor_its_silence(photographs):
    _, dataset = photographs
    result = subprocess.run(program("dropping_loaders", dataset.path), capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_closing_ends_the_threads(open_loader, pairs_dataset):
    first = open_loader(pairs_dataset)
    next(first.epoch(0))  # libraries start threads of their own the first time
    first.close()
    before, _ = threads_and_files()
    loader = open_loader(pairs_dataset, workers=5)
    batches = loader.epoch(0)
    next(batches)
    assert threads_and_files()[0] > before  # not 5 more: a pool starts a thread only when the others are busy
    loader.close()
    end = time.monotonic() + 60
    while threads_and_files()[0] > before and time.monotonic() < end:  # the system counts a thread a moment longer
        time.sleep(0.01)
    assert threads_and_files()[0] <= before


def zero_picture(dataset, shard, row):
    """Overwrite a sample's JPEG with zeros."""
    (record,) = dataset.shard(shard).records(np.array([row]))
    with (dataset.path / "shards" / f"shard-{shard:05d}.beton").open("r+b") as file:
        file.seek(int(record["jpeg_at"]))
        file.write(bytes(int(record["jpeg_bytes"])))


def flip_record(dataset, shard, row):
    """Flip bits of a sample's record."""
    with (dataset.path / "shards" / f"shard-{shard:05d}.rows").open("r+b") as file:
        file.seek(64 * (1 + row))
        file.write(b"\xff")


@pytest.fixture(
    params=[(zero_picture, "the checksum of its picture does not match"), (flip_record, "damaged or unreadable record")]
)
def damaged(request, pairs_dataset, tmp_path):
    """The pairs, with damage to sample 123, and what is said of it."""
    damage, message = request.param
    shutil.copytree(pairs_dataset.path, tmp_path / "copy")
    shard, row = (int(at[0]) for at in pairs_dataset.locate(np.array([123])))
    damage(Dataset(tmp_path / "copy"), shard, row)
    return Dataset(tmp_path / "copy"), message


def step_of(loader, sample_id, epoch):
    steps = range(loader.order.steps_per_epoch)
    return next(step for step in steps if sample_id in loader.order.batch_ids(epoch, step))


def test_a_sample_damaged_after_conversion_is_named_and_the_loader_goes_on(open_loader, damaged):
    dataset, message = damaged
    loader = open_loader(dataset, local_size=16, local_views=2)
    shard, row = (int(at[0]) for at in dataset.locate(np.array([123])))
    batches = loader.epoch(0)
    for _ in range(step_of(loader, 123, 0)):
        next(batches)
    with pytest.raises(DatasetError, match=f"sample 123 .*row {row} of shard {shard}.*{message}"):
        next(batches)
    later = step_of(loader, 123, 1) + 1
    served = [batch.sample_ids.tolist() for batch in loader.epoch(1, later)]
    assert served == [loader.order.batch_ids(1, step).tolist() for step in range(later, loader.order.steps_per_epoch)]


def test_an_order_for_another_number_of_samples_is_refused(pairs_dataset):
    for loader in (FFCVLoader, DALILoader):
        with pytest.raises(DatasetError, match=r"order is for 1,999 samples.*holds 2,000"):
            loader(pairs_dataset, Order.create(1999, 64), recipe=Recipe(), image_size=32, views=1)
