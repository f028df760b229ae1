"""A resumed run: the losses and the state of one that was never stopped or killed."""

import random
import shutil
from functools import partial
from itertools import cycle

import pytest

from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint, save_checkpoint
from thermopile.trainer.errors import RunError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import (
    MOMENTUM,
    OWN_CODE,
    PRACTICE,
    assert_same_run,
    checkpoints,
    finish,
    kill,
    lines,
    losses,
    resumed,
    small,
    stopped,
    train,
    wait_for,
)


def test_a_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(finished, pairs_dataset, tmp_path, caplog):
    config = small(pairs_dataset, checkpoint={"every_steps": 3})
    run = stopped(config, tmp_path / "run", 8)
    (run.checkpoints / "step-6" / "tensors.safetensors").write_bytes(b"")
    with Trainer.open(config, run, resume=True) as trainer:
        assert trainer.run.steps_done == 3
        assert checkpoints(run) == {3}, "a checkpoint is left whose state was undone"
        trainer.train()
    assert "step-6 is damaged" in caplog.text
    assert_same_run(run, finished)


@pytest.mark.wide
@pytest.mark.parametrize(
    "objective",
    [
        pytest.param({"name": "fastclip_v3", "tau": 0.031, "eta": 1e-3}, id="fastclip_v3"),
    ],
)
def test_a_run_stopped_within_an_epoch_goes_on_with_the_same_rates_and_losses(pairs_dataset, tmp_path, objective):
    tree = {
        "objective": objective,
        "optimizer": {"name": "lamb", "lr": 1e-2, "lr_min": 1e-6, "warmup": "1 epoch"},
        "checkpoint": {"every_steps": 4},
    }
    config = small(pairs_dataset, **tree)
    whole = train(config, tmp_path / "whole")
    broken = resumed(config, stopped(config, tmp_path / "broken", 10), from_step=8)
    first, second = (
        [(line["learning_rate"], line["loss"], line.get("tau")) for line in lines(run)] for run in (whole, broken)
    )
    assert first == second
    rates = [rate for rate, *_ in first]
    assert rates[6] == max(rates) == config.optimizer.lr
    assert rates == sorted(rates[:7]) + sorted(rates[7:], reverse=True)


@pytest.mark.wide
def test_a_run_stopped_within_an_epoch_goes_on_with_the_same_captions(captions_dataset, tmp_path):
    data = {"path": str(captions_dataset.path), "image_size": 16}
    config = small(captions_dataset, batch_size=64, epochs=3, data=data, checkpoint={"every_steps": 5})
    whole = train(config, tmp_path / "whole")
    # From two steps into the second epoch.
    assert_same_run(resumed(config, stopped(config, tmp_path / "broken", 12), from_step=10), whole)
    first = small(captions_dataset, batch_size=64, epochs=1, data=data | {"captions": "first"})
    assert losses(train(first, tmp_path / "first"))[1] != losses(whole)[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda training: training.pop("optimizer"), "'optimizer'"),
        (
            lambda training: training["optimizer"].update(name="sgd"),
            "its optimiser is sgd .* but the settings have adamw",
        ),
        (lambda training: training.update(optimizer=training["optimizer"]["weights"]), "of an older format"),
        (lambda training: training["encoders"].popitem(), "Missing key"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_with_its_name(finished, tmp_path, change, reason):
    run = RunDirectory(shutil.copytree(finished.path, tmp_path / "run"))
    info, training = load_checkpoint(latest_checkpoint(run.checkpoints))
    change(training)
    save_checkpoint(run.checkpoints, info, training)
    with pytest.raises(RunError, match=rf"step-14 does not match the run's settings \(.*{reason}.*\).*resume it with"):
        Trainer.open(run.config(), run, resume=True)


def test_the_tensors_of_the_checkpoint_are_let_go_once_they_are_restored(finished, pairs_dataset):
    with Trainer.open(finished.config(), finished, resume=True) as trainer:
        assert trainer.run.start.training.keys() == {"refused_rows", "loss_scale"}


# Kills


KILLED = (
    "batch_size=128", "log_every=1", "data.image_size=16", "model.dim=16", "model.image.config.width=4",
    "checkpoint.every_steps=7", "order.canonical_shards=2", "order.blocks_per_shard=15", "order.window_blocks=4",
)  # fmt: skip


@pytest.fixture
def start(start_program, pairs_dataset):
    """Return a function that starts or resumes a run, 15 steps an epoch, in a process of its own."""

    def start(run, epochs, budget="none", more=()):
        all_settings = (*KILLED, f"epochs={epochs}", f"state.memory_budget={budget}", *more)
        settings = sets(*all_settings)
        return start_program("train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *settings)

    return start


@pytest.mark.wide
@pytest.mark.parametrize(
    "frame",
    [
        pytest.param((), id="pairs"),
        *(
            pytest.param(frame, id=name, marks=pytest.mark.wide)
            for name, frame in {
                "momentum and crops": MOMENTUM,
                "keys with state": ("objective.mode=unimodal", "model.momentum=0.9"),
                "clipped and locked": PRACTICE,
                "pieces": ("micro_batch=32",),
                "own code": OWN_CODE,
                "doubt": ("objective.name=clip", "objective.doubt_after=1"),
            }.items()
        ),
    ],
)
@pytest.mark.parametrize(("kills", "epochs"), [(1, 2), pytest.param(100, 20, marks=pytest.mark.soak)])
def test_a_run_killed_and_resumed_with_all_or_few_rows_is_the_one_never_killed(start, tmp_path, kills, epochs, frame):
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    start = partial(start, more=frame)
    finish([start(whole, epochs)])
    steps = len(losses(whole))
    assert steps == 15 * epochs
    budgets = cycle(["40KB", "none"])
    for target in sorted(random.Random(kills).sample(range(2, steps), kills)):
        program = start(broken, epochs, next(budgets))
        wait_for(broken, target, [program])
        kill([program])
    finish([start(broken, epochs, next(budgets))])
    assert [line["step"] for line in lines(broken)] == list(range(1, steps + 1))
    assert_same_run(broken, whole)
