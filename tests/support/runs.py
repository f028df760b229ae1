"""Runs of seconds, on the small pairs of `pairs_dataset`, and what one can ask of a run."""

import json
import time
from itertools import count

import numpy as np
import pytest
import torch

from thermopile.pipeline.opening import Dataset
from thermopile.state_store.durable import list_snapshots
from thermopile.state_store.reader import StateReader
from thermopile.storage.bucket import Address
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.checkpoints.tensors import take_apart
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

SMALL_MODEL = {"dim": 16, "image": {"config": {"width": 4}}, "text": {"config": {"width": 8}}}

SMALL = (
    "epochs=2", "batch_size=256", "log_every=1", "data.image_size=16",
    "model.dim=16", "model.image.config.width=4", "model.text.config.width=8",
)  # fmt: skip
"""The settings of `small`, as a command line names them."""

OFTEN = {"checkpoint": {"every_steps": 2, "every_minutes": 0}}


def small(dataset: Dataset, **more):
    """Settings of 2 epochs of 7 steps, 256 pairs each, with the settings of `more` in place of some of them."""
    tree = {
        "epochs": 2, "batch_size": 256, "log_every": 1, "model": SMALL_MODEL,
        "data": {"path": str(dataset.path), "image_size": 16},
    }  # fmt: skip
    return resolve(load_config(tree | more), dataset)[0]


_places = count()


def new_run():
    """A run in the bucket, at an address that no test has used."""
    return RunDirectory(Address("bucket", f"runs/{next(_places)}"))


def train(config, place, *, resume=False, **options):
    """Train to the end or until a report stops it; `options` are those of Trainer.train. Return the run's directory."""
    run = place if isinstance(place, RunDirectory) else RunDirectory(place)
    with Trainer.open(config, run, resume=resume) as trainer:
        trainer.train(**options)
    return run


def stop_at(step):
    """A report that ends the run like Ctrl-C."""

    def report(report):
        if report.step == step:
            raise KeyboardInterrupt

    return report


def stopped(config, place, step):
    """Train until `step` is made, as if Ctrl-C came then; return the run's directory."""
    with pytest.raises(KeyboardInterrupt):
        train(config, place, on_report=stop_at(step))
    return place if isinstance(place, RunDirectory) else RunDirectory(place)


def resumed(config, run, from_step):
    """Train a stopped run to its end, from the checkpoint of that step; return its directory."""
    with Trainer.open(config, run, resume=True) as trainer:
        assert trainer.run.steps_done == from_step
        trainer.train()
    return run


def finish(programs):
    """Let a program, or one for each rank, end well; return what each said to stdout and stderr."""
    ends = [program.end() for program in programs]
    assert [code for code, *_ in ends] == [0] * len(programs), ends
    return [said for _, *said in ends]


def wait_for(run, steps, programs):
    """Wait until the log has this many lines."""
    while not run.metrics_file.exists() or run.metrics_file.read_bytes().count(b"\n") < steps:
        # A rank may have left in order already, and one that failed ends the others.
        assert any(program.is_running() for program in programs), [program.end() for program in programs]
        time.sleep(0.01)


def kill(programs):
    for program in programs:
        program.kill()
    for program in programs:
        program.end()


def checkpoints(run):
    """The steps of the checkpoints on a disk."""
    return {int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")}


def snapshots(run):
    return {snapshot.step for snapshot in list_snapshots(run.state)}


def lines(run):
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def losses(run):
    """Step -> loss; lines of evaluations have none."""
    return {line["step"]: line["loss"] for line in lines(run) if "loss" in line}


def weights(run):
    return load_checkpoint(latest_checkpoint(run.checkpoints))[1]["encoders"]


MOMENTUM = (
    "objective.name=moco_v3", "model.momentum=0.9", "model.predictor=moco_v3", "model.head=moco_v3",
    "model.head_width=16", "model.image.config.batch_norm=true", "data.local_views=2", "data.local_size=8",
)  # fmt: skip
"""Settings with all that a momentum network has beside it, and local views."""

OWN_CODE = (
    "model.image.name=support.own_code:Tower",
    "model.text.name=support.own_code:Words",
    "objective.name=support.own_code:Weighted",
)
"""Encoders and an objective of the user's own."""


PRACTICE = (
    "optimizer.grad_clip_norm=0.5", "optimizer.layer_decay=0.7", "model.ema=0.9", "model.image.locked=true",
    "model.image.unlocked_groups=2", "model.image.config.batch_norm=true",
)  # fmt: skip
"""Settings that clip gradients, average weights, lock layers and let the others learn at rates of their own."""


def assert_same_weights(one, other):
    """Assert that the newest checkpoints of two runs hold the same tensors: weights, averages, optimiser."""
    tensors = [take_apart(load_checkpoint(latest_checkpoint(run.checkpoints))[1])[0] for run in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


def assert_same_state(one, other):
    one, other = StateReader.open(one.state), StateReader.open(other.state)
    for column in (*one.fields, "visits", "last_step"):
        np.testing.assert_array_equal(one.column(column), other.column(column))


def assert_same_run(run, whole):
    assert losses(run) == losses(whole)
    assert_same_weights(run, whole)
    assert_same_state(run, whole)
