"""Forks that forget samples: exactly, from the last checkpoint that has not seen them, or from any later one."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.state_store.reader import StateReader
from thermopile.storage.selection import Selection
from thermopile.trainer.run.build import create_order, objective_of
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed
from support.damage import overwritten
from support.datasets import named_ids
from support.runs import SMALL, assert_same_run, checkpoints, finish, losses, resumed, small, train

KEEPING = {"checkpoint": {"every_steps": 2, "every_minutes": 0, "keep_every": 2}, "epochs": 1}


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    """A run of 7 steps with checkpoints at 2, 4, 6 and 7."""
    return train(small(pairs_dataset, **KEEPING), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def steps(whole, pairs_dataset):
    """The steps done before each sample is first used, int64 [n]; 7 for those that never are."""
    order = create_order(whole.config(), pairs_dataset, objective_of(whole.config()))
    found = np.full(pairs_dataset.n, 7)
    for step in reversed(range(7)):
        found[order.batch_ids(0, step)] = step
    return found


@pytest.fixture
def named(pairs_dataset, tmp_path):
    """Return a function that writes ids to a file and returns its path."""

    def named(ids, name="forgotten"):
        pq.write_table(named_ids(pairs_dataset, ids), tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    return named


def without(dataset, file):
    data = {"path": str(dataset.path), "image_size": 16, "without": str(file)}
    return small(dataset, **KEEPING | {"data": data})


@pytest.mark.wide
def test_a_fork_at_step_0_is_the_run_that_never_had_the_samples(whole, steps, pairs_dataset, named, tmp_path):
    file = named(np.flatnonzero(steps == 0)[:20])
    done = succeed("fork", whole.path, "--out", tmp_path / "fork", "--without", file)
    assert f"{whole.path}@step-0: " in done.stdout
    forked = RunDirectory(tmp_path / "fork")
    assert_same_run(
        resumed(forked.config(), forked, from_step=0), train(without(pairs_dataset, file), tmp_path / "run")
    )


@pytest.mark.wide
def test_the_last_checkpoint_before_any_of_them_was_used_is_taken(whole, steps, pairs_dataset, named, tmp_path):
    forgotten = np.concatenate([np.flatnonzero(steps == 5)[:10], np.flatnonzero(steps == 6)[:10]])
    file = named(forgotten)
    done = succeed("fork", whole.path, "--out", tmp_path / "fork", "--without", file)
    assert "of 20 samples to forget none has been used before: forgotten exactly; steps to make again: 3" in done.stdout
    assert "other traces, which no fork removes" in done.stdout
    assert "kept: step-0, step-2, step-4, step-6, step-7; checkpoint.keep_every keeps more" in done.stdout
    forked = RunDirectory(tmp_path / "fork")
    assert checkpoints(forked) == {4}
    resumed(forked.config(), forked, from_step=4)
    assert losses(forked)[5] == losses(whole)[5] != losses(forked)[6] != losses(whole)[6]
    assert_same_run(forked, train(without(pairs_dataset, file), tmp_path / "run"))


@pytest.mark.wide
def test_two_ranks_forget_likewise(pairs_dataset, named, tmp_path, start_ranks):
    keeping = ("checkpoint.every_steps=2", "checkpoint.keep_every=2", "order.canonical_shards=2", "epochs=1")
    words = ("train", "--data", pairs_dataset.path, *sets(*SMALL, *keeping))
    finish(start_ranks(2, *words, "--out", tmp_path / "whole"))
    config = RunDirectory(tmp_path / "whole").config()
    order = create_order(config, pairs_dataset, objective_of(config))
    file = named(order.batch_ids(0, 5)[::9])
    done = succeed("fork", tmp_path / "whole", "--out", tmp_path / "fork", "--without", file)
    assert f"{tmp_path / 'whole'}@step-4: " in done.stdout
    finish(start_ranks(2, "train", "--out", tmp_path / "fork", "--resume"))
    finish(start_ranks(2, *words, "--without", file, "--out", tmp_path / "run"))
    assert_same_run(RunDirectory(tmp_path / "fork"), RunDirectory(tmp_path / "run"))


@pytest.mark.wide
def test_no_bit_of_a_fork_depends_on_what_it_forgets_whatever_its_origin_saw(
    whole, steps, pairs_dataset, named, tmp_path
):
    """It goes on at step 4, by a dataset in which what it forgets was overwritten meanwhile."""
    ids = np.random.default_rng(0).permutation(np.flatnonzero(steps < 7))[:300]
    file, gone = named(ids), overwritten(pairs_dataset, ids, tmp_path / "gone")
    for out, *moved in (("fork",), ("other", "--data", gone.path)):
        succeed("fork", f"{whole.path}@step-4", "--out", tmp_path / out, "--without", file, *moved)
        run = RunDirectory(tmp_path / out)
        resumed(run.config(), run, from_step=4)
    assert_same_run(run, RunDirectory(tmp_path / "fork"))


def test_dry_run_says_of_every_checkpoint_how_many_of_them_it_has_seen(whole, steps, named):
    file = named(np.concatenate([np.flatnonzero(steps == step)[:2] for step in (1, 3, 6)]))
    done = succeed("fork", whole.path, "--dry-run", "--without", file)
    seen = ["none has been", "2 have been", "4 have been", "4 have been", "6 have been"]
    lines = [line for line in done.stdout.splitlines() if "@step-" in line]
    assert all(words in line for words, line in zip(seen, lines, strict=True)), lines


def test_a_fork_forgets_what_its_origin_forgot_and_more_and_never_less(whole, steps, named, tmp_path):
    late = np.flatnonzero(steps >= 4)
    first, more = named(late[:30], "first"), named(late[20:50], "more")
    succeed("fork", f"{whole.path}@step-4", "--out", tmp_path / "a", "--without", first)
    first.unlink()
    words = ("fork", f"{tmp_path / 'a'}@step-4", "--out", tmp_path / "b", "--without")
    assert_one_line(cli(*words, more), 2, f"--without {more} lacks 20 samples that", f"also those of {first}, in one")
    done = succeed(*words, named(late[:50], "more"))
    assert "of 20 samples to forget none" in done.stdout
    forked = RunDirectory(tmp_path / "b")
    np.testing.assert_array_equal(Selection(forked.selection).without, late[:50])
    assert forked.config().data.without.startswith(f"{more}@50-")  # a run that starts from config.toml forgets them all
    resumed(forked.config(), forked, from_step=4)
    assert not StateReader.open(forked.state).stored("last_step")[:][late[:50]].any()
    again = succeed("fork", forked.path, "--out", tmp_path / "c")
    assert "to forget" not in again.stdout
    np.testing.assert_array_equal(Selection(tmp_path / "c" / "selection").without, late[:50])
    refused = cli("fork", forked.path, "--out", tmp_path / "d", "--set", "data.without=")
    assert_one_line(refused, 2, "data.without", "the run has its own copy")


def test_samples_are_forgotten_from_a_later_step_on_if_it_is_named(whole, steps, named, tmp_path):
    early = np.flatnonzero(steps < 6)
    done = succeed("fork", f"{whole.path}@step-6", "--out", tmp_path / "fork", "--without", named(early[:9]))
    assert "of 9 samples to forget 9 have been used before; steps to make again: 1" in done.stdout


def test_with_weights_of_another_run_nothing_is_forgotten_exactly(whole, steps, pairs_dataset, named, tmp_path):
    run = train(small(pairs_dataset, **KEEPING, init={"run": f"{whole.path}@step-7"}), tmp_path / "run")
    done = succeed("fork", run.path, "--dry-run", "--without", named(np.flatnonzero(steps == 6)[:9]))
    assert "of 9 samples to forget none has been used before; steps to make again" in done.stdout
    assert "exactly" not in done.stdout


def test_a_fork_that_would_leave_too_little_of_a_step_is_refused(whole, steps, named, tmp_path):
    file = named(np.flatnonzero(steps == 6)[:-1])
    refused = cli("fork", f"{whole.path}@step-4", "--out", tmp_path / "fork", "--without", file)
    assert_one_line(refused, 2, "step 7 would keep")
    assert not (tmp_path / "fork").exists()
