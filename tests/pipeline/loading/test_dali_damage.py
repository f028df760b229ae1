"""Damaged JPEGs, which only DALI can find: each is named, and ends neither the process nor the loader."""

import gc
import os
import shutil

import numpy as np
import pytest

from thermopile.pipeline.dataset.row_records import write_row_records
from thermopile.pipeline.dataset.stored_sample import checksum
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cut_short(jpeg):
    return jpeg[: len(jpeg) // 2] + bytes(len(jpeg) - len(jpeg) // 2)


def garbage(jpeg):
    return np.random.default_rng(0).bytes(len(jpeg))


def zeros(jpeg):
    return bytes(len(jpeg))


def with_another_height(jpeg):
    """The frame header's height, 24 or a little more, becomes 7."""
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[: frame + 5] + b"\0\7" + jpeg[frame + 7 :]


def garbage_behind_the_frame_header(jpeg):
    end = jpeg.index(b"\xff\xc0") + 19
    return jpeg[:end] + np.random.default_rng(0).bytes(len(jpeg) - end)


@pytest.fixture(params=[cut_short, with_another_height])
def damage(request):
    return request.param


@pytest.fixture
def damaged(damage, images_dataset, tmp_path):
    """The pictures with a checksum that fits, so that only DALI can find the damage, and the id of the damaged sample.

    It is the first sample of epoch 0's third batch.
    """
    dataset = Dataset(shutil.copytree(images_dataset.path, tmp_path / "copy"))
    victim = int(Order.create(images_dataset.n, 64).batch_ids(0, 2)[0])
    (shard,), (row,) = images_dataset.locate(np.array([victim]))
    path = dataset.path / "shards" / f"shard-{shard:05d}.beton"
    jpeg, data, records = images_dataset.jpeg(victim), path.read_bytes(), images_dataset.records(shard)
    assert data.count(jpeg) == 1
    path.write_bytes(data.replace(jpeg, damage(jpeg)))
    records["jpeg_checksum"][row] = checksum(np.frombuffer(damage(jpeg), np.uint8).copy())
    path.with_suffix(".rows").unlink()
    write_row_records(path.with_suffix(".rows"), records, len(data))
    return dataset, victim


def test_damage_in_a_batch_that_nobody_asked_for_is_no_error(open_dali, damaged):
    dataset, victim = damaged
    loader = open_dali(dataset, ahead=3)
    for _ in range(2):
        batches = loader.epoch(0)
        for step in range(2):
            assert next(batches).sample_ids.tolist() == loader.order.batch_ids(0, step).tolist()
    with pytest.raises(DatasetError, match=f"sample {victim} "):
        next(batches)


@pytest.mark.wide
@pytest.mark.parametrize("times", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_damage_ends_neither_the_process_nor_leaves_threads(open_dali, damaged, times):
    # Runs were scheduled behind the one that fails: DALI's decoder and resize crash in them if they are let.
    dataset, victim = damaged
    loader = open_dali(dataset, workers=3, ahead=2)

    def threads_after_an_error():
        with pytest.raises(DatasetError, match=f"sample {victim} "):
            list(loader.epoch(0))
        gc.collect()
        return len(os.listdir("/proc/self/task"))

    threads = [threads_after_an_error() for _ in range(times)]
    assert max(threads) == threads[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "damage", [cut_short, garbage, zeros, with_another_height, garbage_behind_the_frame_header], indirect=True
)
def test_damage_is_named_where_the_loader_decodes_and_the_next_epoch_is_served(open_dali, damaged, damage, device):
    dataset, victim = damaged
    loader = open_dali(dataset, device=device)
    batches, error = loader.epoch(0), None
    try:
        for _ in range(3):
            next(batches)
    except DatasetError as found:
        error = str(found)
    if error is None:
        assert (device, damage) == ("cuda", cut_short)  # nvJPEG may fill up what is missing
    else:
        assert f"sample {victim} " in error
    sound = [step for step in range(4) if victim not in loader.order.batch_ids(1, step)]
    for step in sound:
        batch = next(loader.epoch(1, step))
        assert batch.sample_ids.tolist() == loader.order.batch_ids(1, step).tolist()
        assert all(view.isfinite().all() for view in batch.views)
