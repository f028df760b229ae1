"""Starts that meet: of two on one new run, or on one to resume, one trains and the other changes nothing."""

import os
import random
import shutil
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.storage.bucket import SCRATCH, Address
from thermopile.storage.selection import Selection
from thermopile.trainer.errors import RunError, RunExistsError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.run import Run
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import SMALL, assert_same_run, checkpoints, finish, losses, small, stop_at, stopped, train

SHORT = {"epochs": 1, "checkpoint": {"every_steps": 2, "every_minutes": 0}}
TAKEN = "holds a run; continue it with --resume, or choose another --out"


@pytest.fixture
def first_ids(tmp_path):
    """Return a function that writes the first ids to a file and returns it as text."""

    def write(samples):
        pq.write_table(pa.table({"sample_id": range(samples)}), tmp_path / f"{samples}.parquet")
        return str(tmp_path / f"{samples}.parquet")

    return write


@pytest.fixture
def on_first(pairs_dataset, first_ids):
    """Return a function that gives the settings of a run on the first samples."""

    def settings(samples):
        data = {"path": str(pairs_dataset.path), "image_size": 16, "select": first_ids(samples)}
        return small(pairs_dataset, data=data, **SHORT)

    return settings


def test_a_directory_that_another_start_is_making_is_refused_like_one_that_exists(on_first, tmp_path):
    run = RunDirectory(tmp_path / "run")

    class First(Run):
        def _write_own_files(self):
            super()._write_own_files()
            with pytest.raises(RunExistsError, match=f"run {TAKEN}"):
                Trainer.open(on_first(1600), run)

    with Trainer(First(on_first(1800), run)) as trainer:
        trainer.run.begin()
        trainer.train()
    assert run.config() == on_first(1800)
    Selection(run.selection).verify()
    assert_same_run(run, train(on_first(1800), tmp_path / "alone"))


def test_a_start_that_fails_before_its_settings_leaves_the_directory_to_the_next(on_first, tmp_path):
    run = RunDirectory(tmp_path / "run")

    class Failing(Run):
        def _write_own_files(self):
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        Failing(on_first(1800), run).begin()
    Trainer.open(on_first(1800), run).close()


def test_a_start_that_another_overtook_changes_nothing_in_what_that_has_trained(pairs_dataset, tmp_path):
    run = RunDirectory(tmp_path / "run")

    overtaken = Run(small(pairs_dataset, seed=1, **SHORT), run)
    train(small(pairs_dataset, **SHORT), run.path)
    with pytest.raises(RunExistsError, match=f"run {TAKEN}"):
        overtaken.begin()
    assert run.config().seed == 0
    assert max(losses(run)) == 7


@pytest.mark.wide
@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.wide), 3]
)  # before its first checkpoint, and after it
def test_of_two_that_resume_at_once_the_later_one_goes_on_from_what_the_earlier_one_wrote(
    pairs_dataset, tmp_path, step
):
    config = small(pairs_dataset, **SHORT)
    run = stopped(config, tmp_path / "run", step)
    overtaken = Trainer(Run(config, run, resume=True))
    with pytest.raises(KeyboardInterrupt):
        train(config, run, resume=True, on_report=stop_at(5))
    with overtaken as trainer:
        trainer.run.begin()
        assert trainer.run.steps_done == 4
        trainer.train()
    assert_same_run(run, train(config, tmp_path / "alone"))


def test_a_resume_that_another_with_changed_settings_overtook_changes_nothing(pairs_dataset, tmp_path):
    config, shorter = (small(pairs_dataset, **SHORT | {"steps": steps}) for steps in (0, 4))
    run = stopped(config, tmp_path / "run", 3)
    overtaken = Run(config, run, resume=True)
    train(shorter, run, resume=True)
    with pytest.raises(RunError, match=r"another process has just changed the settings .* of .*/run; resume again"):
        overtaken.begin()
    assert checkpoints(run) == {2, 4}


START_AT = """
import time
from thermopile.tools.cli import main
time.sleep(max(0.0, start_at - time.time()))
main()
"""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [pytest.param(6, marks=pytest.mark.wide), pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_of_two_starts_at_once_one_trains_and_the_other_ends_with_one_line(
    pairs_dataset, start_program, first_ids, tmp_path, request, monkeypatch, where, rounds
):
    place, variables = tmp_path, {}
    if where == "bucket":
        request.getfixturevalue("s3")
        monkeypatch.setenv(SCRATCH, str(tmp_path / "scratch"))
        place = Address("bucket", "starts")
        variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", SCRATCH))}

    def start(run, number, seconds=0.0):
        """Start a run with settings and samples of its own."""
        settings = (*SMALL, "epochs=1", "checkpoint.every_steps=1", f"seed={number}")
        return start_program(
            "train", "--data", pairs_dataset.path, "--select", first_ids((600, 700)[number]), "--out", run.path,
            *sets(*settings),
            code=f"start_at = {time.time() + 0.2 + seconds}{START_AT}", **variables,
        )  # fmt: skip

    alone = [RunDirectory(tmp_path / "alone-0"), RunDirectory(tmp_path / "alone-1")]
    for number, run in enumerate(alone):
        finish([start(run, number)])
    apart = random.Random(7)
    for each in range(rounds):
        run = RunDirectory(place / f"run-{each}")
        programs = [start(run, number, apart.choice([0, 0, 0.02, 0.2])) for number in range(2)]
        ends = [program.end() for program in programs]
        codes = [code for code, _, _ in ends]
        assert sorted(codes) == [0, 2], ends
        first, refused = alone[codes.index(0)], ends[codes.index(2)][2].splitlines()
        assert refused[-1] == f"Error: {run.path} {TAKEN}"
        assert [line for line in refused if line.startswith("Error")] == refused[-1:]
        assert run.config() == first.config()
        assert Selection(run.selection).about == Selection(first.selection).about
        Selection(run.selection).verify()
        assert_same_run(run, first)
        shutil.rmtree(run.local)
