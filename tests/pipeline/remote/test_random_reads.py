"""Blocks under random reads: the samples of a dict, within the limit, and no file that nobody knows."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.benchmarks.scale import FolderStore
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order, Served
from thermopile.pipeline.remote.samples import ABSENT, COMING, Contents
from thermopile.pipeline.remote.schedule import Blocks
from thermopile.storage.bucket import Address
from thermopile.storage.lock import own_folder
from thermopile.storage.selection import IDS, Selection, SelectionWriter
from thermopile.trainer.run.build import windows_from

from support.in_place import change_index, in_place
from support.open_files import open_files
from support.remote_reading import on_disk

THREADS, LIMIT = 4, 1_700_000
"""The dataset takes 3.6 MB; four threads hold samples of up to twelve blocks of 17."""
ORDER = Order.create(600, 32, 0, 2, 18, 2)


@pytest.fixture(scope="module")
def store(of_tars, tmp_path_factory):
    """A folder with the tars and the dataset in place of them, and its samples: id -> picture and tokens."""
    tars, converted = of_tars
    folder = Path(tmp_path_factory.mktemp("store"))
    (folder / "tars").symlink_to(tars[0].parent)
    in_place(converted, tars, folder / "placed")
    change_index(folder / "placed", tars={"root": "s3://bucket/tars", "files": [
        [tar.name, tar.stat().st_size, ""] for tar in tars]})  # fmt: skip
    shard = converted.shard(0)
    return folder, {id: (converted.jpeg(id), shard.tokens_of(id).tobytes()) for id in range(converted.n)}


def read(dataset, ids):
    """Hold samples and return what they are by then."""
    with dataset.files.hold(ids):
        shard = dataset.shard(0)
        return {id: (dataset.jpeg(id), shard.tokens_of(id).tobytes()) for id in ids.tolist()}


def assert_within_the_limit(dataset):
    samples = dataset.files
    with samples.lock:
        files = {path.name: path.stat().st_size for path in (dataset.files.cache / "blocks").iterdir()}
        assert {*files} == {str(contents.file) for contents in samples._contents.values()}
        for contents in samples._contents.values():
            assert files[str(contents.file)] <= samples.room._paid[contents.number]
        assert on_disk(dataset) <= samples.room.bytes <= samples.room.limit


@pytest.mark.parametrize("operations", [400, pytest.param(100_000, marks=pytest.mark.soak)])
def test_random_reads_of_threads_beside_the_read_ahead_are_those_of_a_dict(store, tmp_path, monkeypatch, operations):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path))
    folder, expected = store
    failures, refused, steps = [], [], iter(range(1, 1_000_000))

    def run(seed):
        random = np.random.default_rng(seed)
        try:
            for _ in range(operations // THREADS):
                ids = (random.integers(600) + random.integers(0, 30, random.integers(1, 9))) % 600
                try:
                    assert read(dataset, ids) == {id: expected[id] for id in ids.tolist()}
                    if random.random() < 0.1:
                        dataset.files.hold(ids[:1])  # forgotten
                except ConnectionError as error:
                    refused.append(error)
                dataset.files.finished(next(steps))
                if random.random() < 0.1:
                    assert_within_the_limit(dataset)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    with FolderStore(folder, 0).in_place(), monkeypatch.context() as patched:
        read_range, random = Address.read_range, np.random.default_rng(0)

        def sometimes(address, *wanted):
            if threading.current_thread().name.startswith("thermopile-fetch") and random.random() < 0.02:
                raise ConnectionError(f"{address} is away")
            return read_range(address, *wanted)

        patched.setattr(Address, "read_range", sometimes)
        dataset = Dataset(Address("bucket", "placed"))
        epochs = operations // ORDER.steps_per_epoch + 1
        with dataset.files.expect(windows_from(0, ORDER, epochs), ORDER, LIMIT):
            threads = [threading.Thread(target=run, args=[seed]) for seed in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]
        assert refused
        for thread in threading.enumerate():
            if thread.name.startswith("thermopile-read-ahead"):
                thread.join(60)
        assert_within_the_limit(dataset)
        with dataset.files.lock:
            room = dataset.files.room
            room.limit = 0
            room._make_room(0, later_than=-1 << 62)
        assert list((dataset.files.cache / "blocks").iterdir()) == []
        assert not [name for name in open_files() if name.startswith(str(tmp_path)) and "/blocks/" in name]


@pytest.mark.wide
@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.soak)])
def test_a_reader_killed_at_any_moment_leaves_nothing_to_the_next(store, tmp_path, monkeypatch, kills):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path))
    program = Path(__file__).parents[2] / "support" / "programs" / "reading_at_random.py"
    random = np.random.default_rng(0)
    for _ in range(kills):
        with subprocess.Popen([sys.executable, program, store[0]], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"reading\n"
            time.sleep(random.random() / 2)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert any(tmp_path.glob("dataset-*/blocks/*"))
        with own_folder(tmp_path, "dataset-"):
            pass
        assert list(tmp_path.iterdir()) == []


def test_an_answer_that_comes_after_its_block_was_evicted_makes_no_file(store, tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path))
    with FolderStore(store[0], 0).in_place():
        dataset = Dataset(Address("bucket", "placed"))
        dataset.jpeg(0)
        samples = dataset.files
        (claimed,) = samples._claim(samples._in_blocks(np.array([1])))
        (job, *_), _ = samples._sample_jobs([claimed])
        with samples.lock:
            samples.room.limit = 0
            samples.room._make_room(0, later_than=-1 << 62)
        with pytest.raises(FileNotFoundError):
            job.store(bytes(job.stop - job.start))
        assert os.listdir(dataset.files.cache / "blocks") == []
        assert dataset.jpeg(1) == store[1][1][0]


def test_samples_outside_a_selection_are_in_blocks_of_their_own(tmp_path):
    with SelectionWriter(tmp_path / "selection", 100) as writer:
        writer.add(IDS, [np.arange(0, 100, 2)])
        writer.finish()
    blocks = Blocks.of(Served(Order.create(50, 16, 0, 1, 3), Selection(tmp_path / "selection"), 100))
    found = blocks.of_ids(np.arange(100))
    assert {block: np.flatnonzero(found == block).tolist() for block in range(3)} == {
        block: blocks.ids(block).tolist() for block in range(3)
    }
    assert (found[1::2] == found[::2] + len(blocks)).all()


KEYS = st.lists(st.integers(0, 20), max_size=8, unique=True).map(sorted)


@given(st.lists(st.tuples(st.sampled_from(["claim", "put", "release"]), KEYS), max_size=12))
def test_contents_are_a_dict(changes):
    contents, model = Contents(0), dict[int, int]()
    for at, (change, keys) in enumerate(changes):
        if change == "claim":
            keys = [key for key in keys if key not in model]
            contents.claim(np.array(keys, np.int64))
            model |= dict.fromkeys(keys, COMING)
        elif change == "put":
            keys = [key for key in keys if key in model]
            contents.put(np.array(keys, np.int64), at)
            model |= dict.fromkeys(keys, at)
        else:
            keys = [key for key in keys if key in model]
            contents.release(np.array(keys, np.int64))
            model = {key: where for key, where in model.items() if key not in keys or where != COMING}
        assert contents.find(np.arange(-1, 22)).tolist() == [model.get(key, ABSENT) for key in range(-1, 22)]
