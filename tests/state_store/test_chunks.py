"""A damaged chunk of a real store is never a value: it is an error that names array, chunk and file."""

import os
import re
import shutil
from functools import partial

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import WrapperStore

from thermopile.state_store.commit import ColumnPart
from thermopile.state_store.durable import Repository
from thermopile.state_store.errors import DamagedChunkError, SnapshotNotFoundError
from thermopile.state_store.reader import read_rows
from thermopile.state_store.schema import Description, Schema

from support import commits
from support.damage import cut_short, flip

SAMPLES, BLOCK = 1000, 300
"""Blocks of 300, 300, 300 and 100 rows."""
CHUNK_BYTES = BLOCK * 4 + 4
"""Values and their checksum; zarr fills up the last chunk."""


def values(start, stop, offset=0.0):
    return np.arange(start, stop, dtype=np.float32) + np.float32(offset)


def commit(repository, step, blocks, block_rows=BLOCK, offset=0.0):
    """Write tau = id + offset into some blocks of all columns."""
    parts = []
    for block in blocks:
        start, stop = block * block_rows, min((block + 1) * block_rows, SAMPLES)
        counters = np.full(stop - start, step, dtype=np.uint32)
        columns = {"image/tau": values(start, stop, offset), "visits": counters, "last_step": counters}
        parts.append(ColumnPart(start, columns))
    return commits.commit(repository, step, parts)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """step-1 wrote the blocks 0, 1 and 3; step-2 wrote block 0 again. Copy to damage."""
    path = tmp_path_factory.mktemp("store") / "state"
    repository = Repository.create(path, Description(SAMPLES, Schema({"image/tau": 0.5}), BLOCK, ""))
    commit(repository, 1, [0, 1, 3])
    commit(repository, 2, [0], offset=0.25)
    return path


@pytest.fixture
def store(original, tmp_path):
    return shutil.copytree(original, tmp_path / "state")


def read(path, column="image/tau", start=0, stop=SAMPLES, at="latest"):
    repository = Repository(path)
    snapshot = repository.resolve(at)
    return read_rows(repository.group(snapshot), repository.description.block_rows, column, start, stop)


def chunk_files(path):
    return sorted((path / "chunks").iterdir())


def file_of_tau(path, start, offset=0.0):
    """The chunk file whose first value is that of the sample `start`."""
    first = values(start, start + 1, offset).tobytes()
    (found,) = (file for file in chunk_files(path) if file.read_bytes().startswith(first))
    return found


@given(ends=st.tuples(st.integers(0, SAMPLES), st.integers(0, SAMPLES)).map(sorted))
def test_any_range_of_rows_comes_back(original, ends):
    expected = values(0, SAMPLES)
    expected[:300] += 0.25
    expected[600:900] = 0.5
    np.testing.assert_array_equal(read(original, "image/tau", *ends), expected[slice(*ends)])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (partial(cut_short, keep=777), "it holds 777 of the 1,204 bytes written"),
        (partial(cut_short, keep=0), "object was only 0 bytes long"),
        (flip, "its checksum does not match"),
        (os.unlink, "No such file or directory"),
    ],
)
def test_a_damaged_chunk_is_an_error_that_names_array_chunk_file_and_cure(store, damage, reason):
    file = file_of_tau(store, 300)
    assert file.stat().st_size == CHUNK_BYTES
    damage(file)
    with pytest.raises(DamagedChunkError) as raised:
        read(store)
    words = str(raised.value)
    assert "array 'image/tau', chunk 1 (rows 300 … 599) cannot be read" in words
    assert f"chunks/{file.name} in the state directory: " in words
    assert reason in words
    assert "`thermopile state log` lists the snapshots" in words
    assert "\n" not in words


def test_every_file_is_named_by_the_one_chunk_that_needs_it(store):
    def refused():
        """Which chunk of which column cannot be read, and the file named."""
        repository = Repository(store)
        for snapshot in map(repository.resolve, ("step-1", "step-2")):
            group, description = repository.group(snapshot), repository.description
            for column in ("image/tau", "visits", "last_step"):
                for start in (0, 300, 900):
                    try:
                        read_rows(group, description.block_rows, column, start, start + 1)
                    except DamagedChunkError as error:
                        yield column, start, re.search(r"chunks/(\w+)", str(error))[1]

    seen = set()
    for file in chunk_files(store):
        content = file.read_bytes()
        for damage in (flip, os.unlink):
            damage(file)
            ((column, start, named),) = set(refused())
            assert named == file.name
            file.write_bytes(content)
        seen.add((column, start))
    # Nine chunks of step-1, three of step-2 in place of those of its block 0.
    assert (len(chunk_files(store)), len(seen)) == (12, 9)


@given(byte=st.integers(0, CHUNK_BYTES - 1), bit=st.integers(0, 7))
def test_no_changed_bit_passes_for_a_value(original, byte, bit):
    file = file_of_tau(original, 300)
    flip(file, 8 * byte + bit)
    try:
        with pytest.raises(DamagedChunkError):
            read(original, start=310, stop=311)
    finally:
        flip(file, 8 * byte + bit)


def test_what_does_not_need_the_damaged_chunk_stays_readable(store):
    os.unlink(file_of_tau(store, 0, offset=0.25))
    with pytest.raises(DamagedChunkError, match="chunk 0"):
        read(store)
    np.testing.assert_array_equal(read(store, start=300, stop=600), values(300, 600))
    assert (read(store, "visits")[:300] == 2).all()
    np.testing.assert_array_equal(read(store, at="step-1")[:600], values(0, 600))


def test_of_several_damaged_chunks_the_first_asked_for_is_named(store):
    for start in (300, 900):
        cut_short(file_of_tau(store, start))
    with pytest.raises(DamagedChunkError, match=r"chunk 1 \(rows 300 … 599\)"):
        read(store)
    with pytest.raises(DamagedChunkError, match=r"chunk 3 \(rows 900 … 999\)"):
        read(store, start=650)


def test_chunks_too_small_for_a_file_of_their_own_name_their_manifest(tmp_path):
    repository = Repository.create(tmp_path / "state", Description(SAMPLES, Schema({"image/tau": 0.5}), 10, ""))
    commit(repository, 1, [0, 1], block_rows=10)
    assert not (tmp_path / "state" / "chunks").exists()
    manifests = list((tmp_path / "state" / "manifests").iterdir())
    for manifest in manifests:
        manifest.write_bytes(manifest.read_bytes()[:60])
    with pytest.raises(SnapshotNotFoundError, match=r"step-1 cannot be read: manifests/(\w{20}) in the") as raised:
        repository.resolve("step-1")
    assert re.search(r"manifests/(\w+)", str(raised.value))[1] in {manifest.name for manifest in manifests}


def test_an_array_that_is_not_there_is_damage_too(original):
    repository = Repository(original)
    description = repository.description
    with pytest.raises(DamagedChunkError, match="array 'image/tau' is missing"):
        read_rows(zarr.create_group({}), description.block_rows, "image/tau", 0, 1)


def test_a_read_that_fails_but_once_gives_its_rows(original):
    class FailsOnce(WrapperStore):
        left = 1

        async def get(self, key, *args, **kwargs):
            if key == "image/tau/c/1" and self.left:
                self.left -= 1
                raise ValueError("too many open files")
            return await super().get(key, *args, **kwargs)

    repository = Repository(original)
    snapshot = repository.resolve("latest")
    store = FailsOnce(repository.group(snapshot).store)
    group = zarr.open_group(store, mode="r")
    rows = read_rows(group, repository.description.block_rows, "image/tau", 310, 950)
    assert store.left == 0
    np.testing.assert_array_equal(rows[:290], values(310, 600))
    np.testing.assert_array_equal(rows[-50:], values(900, 950))
    assert len(rows) == 640
