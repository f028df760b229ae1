"""on_nan = "skip": a step whose values are not finite changes nothing, and the run goes on."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from thermopile.state_store.reader import StateReader
from thermopile.trainer.checkpoints.checkpoint_files import load_checkpoint
from thermopile.trainer.errors import TrainingError
from thermopile.trainer.loop import MAX_SKIPPED, Trainer
from thermopile.trainer.run_directory import RunDirectory

from support import runs
from support.cli import cli, succeed
from support.runs import SMALL_MODEL, assert_same_run, lines, losses

VICREG = SMALL_MODEL | {"head": "vicreg", "head_width": 16}
"""A head with batch norms, whose running means one bad batch would spoil."""


def small(dataset, **more):
    return runs.small(dataset, **{"on_nan": "skip", "model": VICREG} | more)


def poison(trainer, steps, what="pictures"):
    """Make the pictures, or the loss, of these steps not a number."""

    def pictures(module, inputs):
        return (inputs[0] * np.nan, *inputs[1:]) if trainer.run.steps_done + 1 in steps else None

    def loss(module, inputs, outcome):
        return replace(outcome, loss=outcome.loss * np.nan) if trainer.run.steps_done + 1 in steps else None

    if what == "pictures":
        trainer.run.encoders.image.register_forward_pre_hook(pictures)
    else:
        trainer.run.objective.register_forward_hook(loss)


def train(config, path, steps=(), what="pictures", until=None, resume=False, report=lambda report: None):
    run = RunDirectory(path)
    with Trainer.open(config, run, resume=resume) as trainer:
        poison(trainer, steps, what)
        trainer.train(report, lambda: trainer.run.steps_done == until)
    return run


MOMENTUM = {"objective": {"name": "moco_v3"}, "model": VICREG | {"momentum": 0.9}}


@pytest.mark.parametrize(
    ("what", "more"), [("pictures", {}), pytest.param("loss", {}, marks=pytest.mark.wide), ("loss", MOMENTUM)]
)
def test_a_step_that_is_skipped_leaves_weights_norms_optimiser_and_rows_as_they_were(
    pairs_dataset, tmp_path, what, more
):
    config = small(pairs_dataset, epochs=1, checkpoint={"every_steps": 1, "keep_last": 9}, **more)
    run = train(config, tmp_path / "run", [4], what)
    before, after, moved = (load_checkpoint(run.checkpoints / f"step-{step}")[1] for step in (3, 4, 5))
    assert any("running_mean" in name for name in before["encoders"])
    for part in ("encoders", "objective"):
        torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)
    memory, memory_before = (training["optimizer"]["weights"]["state"] for training in (after, before))
    torch.testing.assert_close(memory, memory_before, rtol=0, atol=0)
    assert all(value.isfinite().all() for value in moved["encoders"].values())
    assert not torch.equal(
        moved["encoders"]["image.head.1.running_mean"], after["encoders"]["image.head.1.running_mean"]
    )
    rows_before, rows = (StateReader.open(run.state, at=f"step-{step}") for step in (3, 4))
    for column in (*rows.fields, "visits", "last_step"):
        np.testing.assert_array_equal(rows.column(column), rows_before.column(column))
    assert StateReader.open(run.state).column("visits").sum() == 6 * 256


@pytest.mark.wide
def test_its_line_has_no_loss_and_says_that_it_was_skipped(pairs_dataset, tmp_path, caplog):
    reports = []
    run = train(small(pairs_dataset, epochs=1), tmp_path / "run", [4], report=reports.append)
    assert [line["step"] for line in lines(run)] == list(range(1, 8))
    assert [line["step"] for line in lines(run) if line["loss"] is None] == [4]
    assert [line["step"] for line in lines(run) if "skipped" in line] == [4]
    assert lines(run)[3]["skipped"] is True
    assert [report.step for report in reports if np.isnan(report.loss)] == [4]
    assert "step 4 gave values that are not finite and was skipped. The ids of its 256 samples begin" in caplog.text


def test_without_a_bad_step_skipping_changes_nothing(pairs_dataset, tmp_path):
    assert losses(train(small(pairs_dataset, epochs=1), tmp_path / "skip")) == losses(
        train(small(pairs_dataset, epochs=1, on_nan="stop"), tmp_path / "stop")
    )


@pytest.mark.wide
def test_a_run_that_resumes_after_a_skipped_step_has_the_losses_of_one_never_stopped(pairs_dataset, tmp_path):
    config = small(pairs_dataset)
    whole = train(config, tmp_path / "whole", [4, 5])
    train(config, tmp_path / "broken", [4, 5], until=5)
    broken = train(config, tmp_path / "broken", resume=True)
    assert_same_run(broken, whole)


WINDOWED = {
    "epochs": 3,
    "batch_size": 128,
    "order": {"canonical_shards": 2, "blocks_per_shard": 15, "window_blocks": 4},
}
"""Steps of 128 of 2,000 samples: in 3 epochs every row is taken again after a step that did not put it."""
SKIPPED = [1, 2, 6, 7, 8, 16, 29, 30]


@pytest.fixture(scope="module")
def without_prefetch(pairs_dataset, tmp_path_factory):
    """A run with all rows in memory, which gathers each step's when they are asked for."""
    run = RunDirectory(tmp_path_factory.mktemp("runs") / "plain")
    with Trainer.open(small(pairs_dataset, **WINDOWED), run) as trainer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.run.store, "prefetch", lambda sample_ids: None)
        poison(trainer, SKIPPED)
        trainer.train()
    return run


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.wide), 5])
def test_rows_prefetched_and_windows_passed_in_skipped_steps_leave_no_stale_row(
    without_prefetch, pairs_dataset, tmp_path, ahead
):
    state = {"memory_budget": "40KB", "prefetch_steps": ahead}
    run = train(small(pairs_dataset, **WINDOWED, state=state), tmp_path / "run", SKIPPED)
    assert [line["step"] for line in lines(run) if line["loss"] is None] == SKIPPED
    assert_same_run(run, without_prefetch)


@pytest.mark.wide
def test_ten_steps_in_a_row_may_be_skipped_and_the_eleventh_ends_the_run(pairs_dataset, tmp_path):
    config = small(pairs_dataset, log_every=4, checkpoint={"every_steps": 2})
    ten = range(3, 3 + MAX_SKIPPED)
    assert losses(train(config, tmp_path / "ten", ten))[13] is not None
    with pytest.raises(
        TrainingError,
        match=r"^steps 3 to 13 gave values that are not finite\. The ids of its 256 samples .*checkpoint.*step-12",
    ):
        train(config, tmp_path / "eleven", range(3, 14))
    assert len(lines(RunDirectory(tmp_path / "eleven"))) == 12


@pytest.mark.parametrize("choice", ["skip", "stop"])
def test_the_command_line_has_it_as_an_option(choice):
    done = succeed("train", "--print-config", "--on-nan", choice)
    assert f'on_nan = "{choice}" # --on-nan' in " ".join(done.output.split())


def test_the_command_line_refuses_another_choice():
    done = cli("train", "--print-config", "--on-nan", "ignore")
    assert done.exit_code == 2
    assert "'ignore' is not one of 'stop', 'skip'" in done.output
