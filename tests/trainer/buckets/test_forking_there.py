"""Forks from and to buckets."""

import pytest

from thermopile.state_store.errors import StateStoreError
from thermopile.storage.bucket import Address
from thermopile.storage.sealed_json import seal_document
from thermopile.trainer.run import fork as fork_module
from thermopile.trainer.run_directory import Lineage, Origin, RunDirectory, read_lineage

from support.cli import assert_one_line, cli, succeed
from support.runs import assert_same_state, assert_same_weights, losses, new_run, resumed

pytestmark = pytest.mark.wide


def fork(run, step, out):
    succeed("fork", f"{run.path}@step-{step}", "--out", out, "--set", "checkpoint.every_steps=6")
    return RunDirectory(out)


def test_from_folder_to_bucket_to_bucket_to_folder_each_goes_on_as_the_run_did(s3, whole, tmp_path):
    with s3.gateway(failing=0.05):
        first = fork(whole, 4, new_run().path)
    resumed(first.config(), first, from_step=4)
    with s3.gateway(failing=0.05):
        second = fork(first, 12, new_run().path)
        third = fork(second, 12, tmp_path / "fork")
    for run in (second, third):
        resumed(run.config(), run, from_step=12)
    for run in (first, second, third):
        assert_same_weights(run, whole)
        assert_same_state(run, whole)
    assert losses(third) == losses(whole)
    assert [origin.step for origin in read_lineage(third.lineage_file).origins] == [4, 12, 12]


def test_in_a_bucket_the_store_copies_and_a_fork_that_was_killed_is_repeated(run, whole, monkeypatch):
    source, copied, real = fork(whole, 8, run.path), [], Address.copied

    def count(self, other):
        copied.append(real(self, other))
        return copied[-1]

    def killed(_):
        raise StateStoreError("killed")

    monkeypatch.setattr(Address, "copied", count)
    out = new_run()
    with monkeypatch.context() as patch:
        patch.setattr(fork_module.checkpoint_files, "load_checkpoint", killed)
        assert_one_line(cli("fork", source.path, "--out", out.path), 1, "killed")
    assert not out.exists()
    assert (out.state / "thermopile.json").exists()
    forked = fork(source, 8, out.path)
    assert {*copied} == {True}
    assert_same_state(forked, source)
    assert_one_line(cli("fork", source.path, "--out", out.path), 2, "holds a run")


@pytest.mark.parametrize("origins", [[], [Origin(run="elsewhere", id=None, step=4, changed=[])]])
def test_what_no_killed_fork_of_that_run_has_left_is_left_alone(run, whole, origins):
    run.lineage_file.rewrite(seal_document(Lineage(id="0" * 16, origins=origins).model_dump()))
    (run.checkpoints / "mine").write(b"mine")
    assert_one_line(cli("fork", f"{whole.path}@step-4", "--out", run.path), 2, "has objects below it")
    assert (run.checkpoints / "mine").read_bytes() == b"mine"


def test_a_fork_that_has_trained_is_left_alone_without_its_settings(run, whole):
    forked = fork(whole, 4, run.path)
    resumed(forked.config(), forked, from_step=4)
    forked.path.remove(["config.toml"])
    before = {(name, size) for name, size, _ in forked.path.listing()}
    assert_one_line(cli("fork", f"{whole.path}@step-4", "--out", run.path), 2, "has objects below it")
    assert {(name, size) for name, size, _ in forked.path.listing()} == before


def test_a_run_that_another_fork_has_just_made_is_left_alone(run, whole, monkeypatch):
    real = fork_module.writer_lock

    def after_another(place):
        monkeypatch.setattr(fork_module, "writer_lock", real)
        fork(whole, 8, run.path)
        return real(place)

    monkeypatch.setattr(fork_module, "writer_lock", after_another)
    assert_one_line(cli("fork", f"{whole.path}@step-4", "--out", run.path), 2, "has objects below it")
    assert_same_state(run, fork(whole, 8, new_run().path))


def test_an_address_with_other_objects_is_left_alone(run, whole):
    (run.path / "mine/data").write(b"mine")
    assert_one_line(cli("fork", whole.path, "--out", run.path), 2, "has objects below it")
    assert (run.path / "mine/data").read_bytes() == b"mine"


def test_no_fork_is_made_in_another_run_of_the_bucket(s3, whole):
    origin = fork(whole, 4, new_run().path)
    place = origin.checkpoints / "step-4" / "fork"
    assert_one_line(cli("fork", whole.path, "--out", place), 2, f"{place} would be in the run {origin.path}, which")
    assert not place.names()
