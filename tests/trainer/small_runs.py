"""Runs of seconds, on the small pairs of `pairs_dataset`, and what one can ask of a run."""

import json

import numpy as np

from thermopile.pipeline.dataset import Dataset
from thermopile.state_store import StateReader
from thermopile.trainer.build import resolve
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory


def small(dataset: Dataset, **more):
    """Settings of 2 epochs of 7 steps, 256 pairs each, with the settings of `more` in place of some of them."""
    tree = {
        "epochs": 2, "batch_size": 256, "log_every": 1, "data": {"path": str(dataset.path), "image_size": 16},
        "model": {"dim": 16, "image": {"config": {"width": 8}}},
    }  # fmt: skip
    return resolve(load_config(tree | more), dataset)


def train(config, path):
    run = RunDirectory(path)
    with Trainer.open(config, run) as trainer:
        trainer.run()
    return run


def stop_at(step):
    """A report that ends the run like Ctrl-C."""

    def report(report):
        if report.step == step:
            raise KeyboardInterrupt

    return report


def lines(run):
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def losses(run):
    return {line["step"]: line["loss"] for line in lines(run)}


def assert_same_state(one, other):
    one, other = StateReader.open(one.state), StateReader.open(other.state)
    for column in (*one.fields, "visits", "last_step"):
        np.testing.assert_array_equal(one.column(column), other.column(column))
