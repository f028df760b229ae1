"""The index: what it holds, what it refuses, and what happens when it, or what it names, is damaged."""

import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from thermopile.state_store import history
from thermopile.state_store.durable import Repository, list_snapshots
from thermopile.state_store.errors import DamagedChunkError, SnapshotError, SnapshotNotFoundError, StoreNotFoundError
from thermopile.state_store.history import COPY, INDEX
from thermopile.state_store.icechunk_files import REFERENCE, needed_files
from thermopile.state_store.reader import StateReader
from thermopile.state_store.schema import Description, Schema
from thermopile.state_store.store import StateStore
from thermopile.storage.local import LocalPath
from thermopile.storage.sealed_json import seal_document, unseal

from support.commits import tags
from support.damage import flip

DESCRIPTION = Description(100, Schema({"image/log_s": -np.inf, "image/tau": 0.05}), 16, "glyphs-1")


def make_store(path, samples, block_rows):
    """Create a store and close it with the snapshots step-0, step-1 and step-2."""
    fields = dict(DESCRIPTION.schema.initial)
    with StateStore.create(path, samples, fields, block_rows=block_rows, dataset_fingerprint="glyphs-1") as store:
        for step in (1, 2):
            rows = {name: torch.full((samples,), float(step)) for name in fields}
            store.put(np.arange(samples), rows, step=step)
            store.snapshot(step, epoch=0).result()
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("made") / "state", samples=100, block_rows=16)


@pytest.fixture
def store(made, path):
    return shutil.copytree(made, path)


def edit(path, change):
    """Change the index and its copy as somebody would who can compute checksums."""
    tree = unseal((path / INDEX).read_bytes())
    change(tree)
    for name in (INDEX, COPY):
        (path / name).write_bytes(seal_document(tree))


def test_what_was_written_is_what_is_read(tmp_path, store):
    loaded, damage = history.load(store)
    assert loaded.description == DESCRIPTION
    assert damage is None
    history.replace(tmp_path, loaded)
    assert history.load(tmp_path) == (loaded, None)


def test_the_index_is_json_that_names_each_snapshot_and_its_files(store):
    tree = json.loads((store / INDEX).read_text())
    assert tree["format_version"] == 3
    assert tree["fields"] == {"image/log_s": "-inf", "image/tau": 0.05}
    assert [entry["step"] for entry in tree["snapshots"]] == [0, 1, 2]
    named = set().union(*(entry["files"] for entry in tree["snapshots"]))
    stands = {str(file.relative_to(store)) for kind in ("snapshots", "manifests") for file in (store / kind).iterdir()}
    assert stands - named == {"snapshots/1CECHNKREP0F1RSTCMT0"}, "only icechunk's own first snapshot is not needed"
    assert named < stands


@pytest.mark.parametrize("name", [INDEX, COPY])
@pytest.mark.parametrize("how", [flip, os.unlink, lambda file: file.write_bytes(b"{}")])
def test_one_damaged_index_is_told_and_costs_nothing_and_resuming_writes_it_again(store, resume, name, how, caplog):
    how(store / name)
    assert tags(Repository(store)) == ["step-0", "step-1", "step-2"]
    assert len(Repository(store).damage()) == 1
    assert name in Repository(store).damage()[0]
    assert all(name in message for message in caplog.messages)
    assert bool(caplog.messages) == (name == INDEX)
    resume().close()
    assert Repository(store).damage() == []


def test_an_index_and_a_copy_both_damaged_are_one_error_that_names_them(store, resume):
    for name in (INDEX, COPY):
        flip(store / name)
    for look in (StateReader.open, list_snapshots, lambda path: resume(path=path)):
        with pytest.raises(StoreNotFoundError, match=f"{INDEX}: it is damaged: its checksum.*{COPY}.*copy of the run"):
            look(store)


def test_an_index_not_opened_for_want_of_descriptors_is_not_called_damaged(store, monkeypatch):
    def fail(*_):
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(LocalPath, "read_version", fail)
    with pytest.raises(OSError, match="Too many open files"):
        list_snapshots(store)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tree: tree.update(samples="many"), "samples: Input should be a valid integer"),
        (lambda tree: tree.update(samples=0), "both must be at least 1"),
        (lambda tree: tree.update(fields=3), "fields: "),
        (lambda tree: tree.update(fields={"visits": 0.0}), "maintained by the store itself"),
        (lambda tree: tree.update(snapshots=[]), "snapshots: "),
        (lambda tree: tree["snapshots"].reverse(), "not ordered by step"),
        (lambda tree: tree["snapshots"][1].update(id="../../../etc/passwd"), "snapshots.1.id: "),
        (lambda tree: tree["snapshots"][1].update(files={"snapshots/../../secret": "0" * 64}), "snapshots.1.files"),
        (lambda tree: tree["snapshots"][1].update(files={}), "step-1 does not list its own file"),
        (lambda tree: tree["snapshots"][1].update(step=True), "snapshots.1.step: "),
        (lambda tree: tree["snapshots"][1].pop("config_hash"), "snapshots.1.config_hash: Field required"),
        (lambda tree: tree.update(note=1), "note: Extra inputs"),
    ],
)
def test_an_index_of_wrong_content_is_refused_naming_the_place(store, change, what):
    edit(store, change)
    with pytest.raises(StoreNotFoundError, match=re.escape(what)):
        list_snapshots(store)


@pytest.mark.parametrize("name", [INDEX, COPY])
def test_an_index_that_is_nested_too_deeply_or_no_regular_file_is_one_error(store, name):
    for other in (INDEX, COPY):
        (store / other).write_bytes(seal_document({"deep": 0}).replace(b"0", b"[" * 100_000))
    with pytest.raises(StoreNotFoundError, match="damaged"):
        list_snapshots(store)
    (store / name).unlink()
    os.mkfifo(store / name)
    with pytest.raises(StoreNotFoundError, match=f"{name}: .* is a named pipe, not a regular file"):
        list_snapshots(store)


def test_a_store_of_a_later_format_is_refused_by_number(store):
    edit(store, lambda tree: tree.update(format_version=5))
    with pytest.raises(
        StoreNotFoundError, match="format version 5, but this version of thermopile reads 3 and 4; use the version that"
    ):
        list_snapshots(store)


@pytest.mark.parametrize("kind", ["snapshots", "manifests"])
@pytest.mark.parametrize("how", [flip, os.unlink, lambda file: (file.unlink(), os.mkfifo(file))])
def test_a_damaged_file_of_a_snapshot_is_found_before_icechunk_sees_it(store, resume, kind, how):
    newest = Repository(store).resolve("latest")
    file = next(name for name in newest.files if name.startswith(kind))
    how(store / file)
    repository = Repository(store)
    assert [entry.file for entry in repository.unreadable()] == [file]
    assert tags(Repository(store)) == ["step-0", "step-1"]
    for read in (repository.group, lambda snapshot: repository.resolve(snapshot.id), lambda s: resume(at=s.id)):
        with pytest.raises(SnapshotNotFoundError, match=f"step-2 cannot be read: {file} in the state directory"):
            read(newest)
    assert tags(Repository(store)) == ["step-0", "step-1"]


@pytest.mark.parametrize("text", [b"", b'{"snapshot', b'{"snapshot":"1CECHNKREP0F1RSTCMT"}', b"[" * 100_000])
def test_a_damaged_reference_is_told_and_resuming_writes_it_again(store, resume, text):
    (store / REFERENCE).write_bytes(text)
    with pytest.raises(StoreNotFoundError, match=f"{REFERENCE} is damaged or missing; resuming the run rewrites it"):
        StateReader.open(store)
    resume().close()
    assert (StateReader.open(store).column("image/tau") == 2).all()


def test_settings_of_icechunk_that_this_program_did_not_write_are_refused(store):
    (store / "config.yaml").write_text("inline_chunk_threshold_bytes: 0\n")
    with pytest.raises(StoreNotFoundError, match=r"config\.yaml was not written by thermopile; remove it"):
        StateReader.open(store)


def test_a_chunk_that_is_a_pipe_holds_nobody_up(store):
    chunk = store / "chunks"
    chunk.mkdir(exist_ok=True)
    os.mkfifo(chunk / "00000000000000000000")
    with pytest.raises(DamagedChunkError, match=r"chunks/00000000000000000000 .*not a regular file"):
        StateReader.open(store)


@pytest.mark.parametrize("name", ["", "chunks", "manifests", "snapshots", "transactions", "refs", "refs/branch.main"])
def test_nothing_is_written_through_a_link(store, tmp_path, resume, name):
    outside = tmp_path / "outside"
    (store / "chunks").mkdir(exist_ok=True)
    (store / name).rename(outside)
    (store / name).symlink_to(outside)
    before = {file: file.stat().st_mtime_ns for file in outside.rglob("*")}
    assert tags(Repository(store)) == ["step-0", "step-1", "step-2"], "reading follows links"
    with pytest.raises(SnapshotError, match="is a link, and no file is written through links"):
        resume()
    repository = Repository(store)
    with pytest.raises(SnapshotError, match="is a link"):
        repository.retain(1)
    assert {file: file.stat().st_mtime_ns for file in outside.rglob("*")} == before


def test_a_snapshot_that_retention_deletes_while_the_history_is_read_is_not_damaged(store, monkeypatch):
    reader, writer = Repository(store), Repository(store)
    load = history.load

    def load_then_retain(path):
        found = load(path)
        monkeypatch.setattr(history, "load", load)
        writer.retain(1)
        return found

    monkeypatch.setattr(history, "load", load_then_retain)
    assert [entry.tag for entry in reader.history()] == ["step-0", "step-2"]


def test_undoing_is_one_replacement_of_the_index(store, monkeypatch):
    repository = Repository(store)
    written = []
    monkeypatch.setattr(history, "replace", lambda path, to: written.append(to))
    repository.undo_after(repository.resolve("step-0"))
    loaded, _ = history.load(store)
    assert written == [replace(loaded, snapshots=loaded.snapshots[:1])]


# Damaged snapshots that are kept for their step


@pytest.fixture(scope="module")
def made_chunked(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("made") / "state", samples=200, block_rows=200)


@pytest.fixture
def chunked(made_chunked, path):
    """As `store`, with chunks that are files: they are too large to stand in the manifest."""
    return shutil.copytree(made_chunked, path)


def file_of(chunked, tag, kind):
    """A file that only this snapshot needs."""
    of_others = {
        name for entry in list_snapshots(chunked) if entry.tag != tag for name in needed_files(chunked, [entry.files])
    }
    return chunked / min(
        name
        for name in needed_files(chunked, [Repository(chunked).resolve(tag).files]) - of_others
        if name.startswith(kind)
    )


@pytest.mark.parametrize("kind", ["snapshots", "manifests", "chunks"])
def test_resuming_forgets_a_damaged_snapshot_by_name_and_retention_works_again(chunked, resume, caplog, kind):
    file = file_of(chunked, "step-1", kind)
    file.unlink()
    with pytest.raises(
        SnapshotError, match=r"not all old snapshots were deleted.*restore the file from a copy.* and resume"
    ):
        Repository(chunked).retain(1, keep_every=1)
    with resume(samples=200) as resumed:
        [warning] = [record.getMessage() for record in caplog.records]
        assert f"snapshot step-1 is damaged ({file.relative_to(chunked)} in the state directory" in warning
        assert [entry.tag for entry in history.load(chunked)[0].snapshots] == ["step-0", "step-2"]
        resumed.retain(1, keep_every=1).result()
        assert resumed.take(np.arange(3))["image/tau"].tolist() == [2.0] * 3
    assert tags(Repository(chunked)) == ["step-0", "step-2"]
    needed = needed_files(chunked, [entry.files for entry in list_snapshots(chunked)])
    assert {f"{file.parent.name}/{file.name}" for file in chunked.glob("[cms]*/*")} == needed


def test_a_file_put_back_before_resuming_keeps_the_snapshot(chunked, resume, tmp_path, caplog):
    file = file_of(chunked, "step-1", "manifests")
    file.rename(tmp_path / "copy")
    with pytest.raises(SnapshotError):
        Repository(chunked).retain(1, keep_every=1)
    (tmp_path / "copy").rename(file)
    resume(samples=200).retain(1, keep_every=1).result()
    assert tags(Repository(chunked)) == ["step-0", "step-1", "step-2"]
    assert not caplog.records


def test_no_snapshot_is_forgotten_while_the_last_one_is_damaged_as_well(chunked):
    for tag in ("step-1", "step-2"):
        flip(file_of(chunked, tag, "manifests"))
    before = (chunked / INDEX).read_bytes()
    Repository(chunked).forget_damaged()
    assert (chunked / INDEX).read_bytes() == before


def test_a_chunk_that_only_a_listing_leaves_out_is_not_missing(chunked, monkeypatch):
    chunk = file_of(chunked, "step-1", "chunks")
    listed = os.scandir

    @contextmanager
    def all_but_one(folder):
        with listed(folder) as entries:
            yield [entry for entry in entries if entry.name != chunk.name]

    monkeypatch.setattr(os, "scandir", all_but_one)
    repository = Repository(chunked)
    repository.forget_damaged()
    repository.retain(1, keep_every=1)
    assert tags(Repository(chunked)) == ["step-0", "step-1", "step-2"]
    assert chunk.exists()


def test_a_store_of_selected_samples_has_a_format_that_earlier_readers_refuse(path):
    description = replace(DESCRIPTION, selection="5" * 64)
    assert Repository.create(path, description).description == description
    assert json.loads((path / "thermopile.json").read_text())["format_version"] == 4
    for name in ("thermopile.json", "thermopile.copy.json"):
        tree = unseal((path / name).read_bytes())
        del tree["selection"]
        (path / name).write_bytes(seal_document(tree))
    with pytest.raises(StoreNotFoundError, match="format version 4 with selection None"):
        Repository(path)
