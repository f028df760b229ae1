"""Committing snapshots: what a repository holds, what a commit writes, and what one that fails leaves."""

import asyncio
import errno
import os
import re
import subprocess

import numpy as np
import pytest
from zarr.codecs import Crc32cCodec
from zarr.core.sync import sync

from thermopile.state_store.commit import ColumnPart
from thermopile.state_store.durable import Repository, list_snapshots
from thermopile.state_store.errors import SnapshotError, SnapshotNotFoundError
from thermopile.state_store.history import COPY, INDEX
from thermopile.state_store.reader import StateReader
from thermopile.state_store.schema import Description
from thermopile.storage.local import LocalPath

from support.commits import (
    BLOCK_ROWS,
    CHANGED_BYTES,
    SAMPLES,
    SCHEMA,
    assert_all_rows,
    columns,
    commit,
    disk_use,
    files,
    icechunk_repository,
    rows,
    tags,
)

# What a repository holds


def test_a_column_is_an_uncompressed_zarr_array_with_a_checksum_in_chunks_of_a_block(repository, path):
    reader = StateReader.open(path)
    for name, dtype, fill_value in [
        ("image/log_s", "float32", -np.inf),
        ("image/tau", "float32", np.float32(0.05)),
        ("visits", "uint32", 0),
        ("last_step", "uint32", 0),
    ]:
        array = reader.array(name)
        assert (array.shape, array.chunks, array.dtype) == ((SAMPLES,), (BLOCK_ROWS,), dtype)
        assert array.fill_value == fill_value
        assert array.compressors == (Crc32cCodec(),)
        assert array.filters == ()


def test_a_snapshot_says_what_it_is_of_and_how_much_was_written_for_it(repository, path):
    made = commit(repository, 7, epoch=3, config_hash="c0ffee")
    assert (made.tag, made.step, made.epoch, made.config_hash) == ("step-7", 7, 3, "c0ffee")
    assert (made.dataset_fingerprint, made.bytes_written) == ("glyphs-1", CHANGED_BYTES)
    assert made.written_at.utcoffset().total_seconds() == 0
    assert list_snapshots(path) == [repository.resolve("step-0"), made]


# Committing


def test_a_commit_replaces_the_rows_of_its_parts_and_keeps_the_others_of_its_base(repository):
    commit(repository, 1)
    commit(repository, 2, [rows(20, 256, 512), rows(21, 768, 1_000)])
    for column in columns(repository).values():
        expected = np.repeat([1, 20, 1, 21], [256, 256, 256, 232]).astype(column.dtype)
        np.testing.assert_array_equal(column, expected)
    assert_all_rows(repository, "step-1", 1)


def test_only_the_blocks_of_the_parts_are_written(repository, path):
    commit(repository, 1)
    before = files(path)
    made = commit(repository, 2, [rows(2, 256, 512)])
    assert made.bytes_written == 4 * 1_024
    assert sum(name.parts[0] == "chunks" for name in files(path) - before) == 4, "one chunk a column"


def test_parts_are_written_as_they_are_made_so_that_they_may_share_one_buffer(repository):
    def parts():
        buffer = rows(0, 0, 256)
        for start in range(0, SAMPLES, BLOCK_ROWS):
            for column in buffer.columns.values():
                column[:] = start
            yield ColumnPart(start, {name: column[: SAMPLES - start] for name, column in buffer.columns.items()})

    commit(repository, 1, parts())
    expected = np.arange(SAMPLES) // BLOCK_ROWS * BLOCK_ROWS
    for name, column in columns(repository).items():
        np.testing.assert_array_equal(column, expected, err_msg=name)


def test_a_snapshot_of_no_change_is_a_snapshot(repository):
    commit(repository, 1)
    assert commit(repository, 2, []).bytes_written == 0
    assert_all_rows(repository, "step-2", 1)


def test_a_commit_builds_on_the_snapshot_it_is_told_to(repository):
    commit(repository, 1)
    commit(repository, 2, [rows(2, 0, 256)], base=repository.resolve("step-0"))
    assert columns(repository)["visits"].tolist() == [2] * 256 + [0] * 744


# The history


def test_the_tags_in_the_order_of_their_steps_are_the_history(repository, path):
    for step in (9, 10, 100):
        commit(repository, step)
    icechunk_repository(path).create_tag("favourite", repository.resolve("step-9").id)
    assert tags(repository) == tags(Repository(path)) == ["step-0", "step-9", "step-10", "step-100"]


def test_undoing_makes_a_snapshot_the_last_one(repository, path):
    for step in (1, 2, 3):
        commit(repository, step)
    repository.undo_after(repository.resolve("step-1"))
    assert tags(repository) == tags(Repository(path)) == ["step-0", "step-1"]
    assert_all_rows(repository, "latest", 1)


def test_a_step_made_again_has_its_old_name(repository, path):
    for attempt in (1, 2, 3):
        made = commit(repository, 5, [rows(attempt)])
        assert made.tag == "step-5"
        assert repository.snapshots() == [repository.resolve("step-0"), made]
        assert_all_rows(Repository(path), "step-5", attempt)
        repository.undo_after(repository.resolve("step-0"))


def test_a_snapshot_answers_to_its_id(repository):
    made = commit(repository, 1)
    commit(repository, 2)
    assert repository.resolve(made.id) == made


def test_an_unknown_snapshot_is_refused_with_the_tags_there_are(repository, path):
    commit(repository, 1)
    for at in ("step-2", "1", "", "ZZZZ", "step-01"):
        with pytest.raises(SnapshotNotFoundError, match=re.escape(f"{at!r}; available: step-0, step-1, latest")):
            StateReader.open(path, at)


# Failures


def test_a_commit_that_fails_leaves_the_last_snapshot_and_no_file(repository, path):
    def parts():
        yield rows(2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    commit(repository, 1)
    repository.retain(1)
    before = files(path)
    with pytest.raises(SnapshotError, match=r"step 2, .*, was not written: .*No space left on device") as caught:
        commit(repository, 2, parts())
    assert isinstance(caught.value.__cause__, OSError)
    assert files(path) == before
    assert tags(repository) == ["step-0", "step-1"]
    assert_all_rows(repository, "latest", 1)
    assert commit(repository, 2).tag == "step-2"
    assert_all_rows(repository, "latest", 2)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("only root can mount a small file system to fill")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def let_zarr_finish():
    """Wait for the chunks of a failed write: zarr goes on with them when one has failed."""

    async def others():
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    sync(others())


def test_a_full_disk_is_said_and_the_next_snapshot_goes_on_when_there_is_room(small_disk):
    samples = 100_000
    repository = Repository.create(small_disk / "state", Description(samples, SCHEMA, 4_096, "glyphs-1"))
    commit(repository, 1, [rows(1, 0, 40_000)])
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    before = disk_use(small_disk)
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"step 2, .*, was not written: .*No space left on device"):
            commit(repository, 2, [rows(2, 0, samples)])
        let_zarr_finish()
        repository.retain(1)
        assert disk_use(small_disk) <= before
        assert (columns(repository)["visits"] == [1] * 40_000 + [0] * 60_000).all()
    ballast.unlink()
    commit(repository, 2, [rows(2, 0, 40_000)])
    assert tags(repository) == ["step-0", "step-1", "step-2"]
    assert (columns(repository)["visits"] == [2] * 40_000 + [0] * 60_000).all()


def test_a_store_that_the_disk_does_not_take_is_not_made(small_disk):
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(3_000_000))  # writes what there is room for
    with pytest.raises(SnapshotError, match=r"could not be created: .*No space left on device"):
        Repository.create(small_disk / "state", Description(SAMPLES, SCHEMA, BLOCK_ROWS, "glyphs-1"))
    assert not (small_disk / "state").exists()


@pytest.mark.parametrize("written", [True, False], ids=["flushed or not", "not written"])
@pytest.mark.parametrize("file", [COPY, INDEX])
def test_a_snapshot_whose_index_does_not_reach_the_disk_is_none(repository, path, monkeypatch, file, written):
    write = LocalPath.rewrite

    def fail(to, data):
        if to.name != file or (written and data != before):
            write(to, data)
        if to.name == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    commit(repository, 1)
    before = (path / INDEX).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(LocalPath, "rewrite", fail)
        with pytest.raises(SnapshotError, match="Input/output error"):
            commit(repository, 2)
    base = repository.resolve("step-1")
    commit(repository, 2, [rows(20)], base=base)
    assert tags(Repository(path)) == ["step-0", "step-1", "step-2"]
    assert_all_rows(Repository(path), "step-2", 20)
    repository.retain(3)
    assert_all_rows(Repository(path), "step-2", 20)


def test_a_snapshot_that_failed_in_its_place_goes_with_the_next_and_costs_none(repository, path, monkeypatch):
    write = LocalPath.rewrite

    def write_and_fail(to, data):
        if not (to.name == INDEX and (path / INDEX).read_bytes() != before):  # nor is it put back
            write(to, data)
        if to.name == INDEX:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    base = commit(repository, 1)
    before = (path / INDEX).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(LocalPath, "rewrite", write_and_fail)
        with pytest.raises(SnapshotError, match="Input/output error"):
            commit(repository, 2)
    assert tags(repository) == ["step-0", "step-1", "step-2"]
    commit(repository, 3, base=base)
    repository.retain(2)
    assert tags(repository) == ["step-0", "step-1", "step-3"]
    assert_all_rows(repository, "step-1", 1)
