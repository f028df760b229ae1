"""Runs on a mixture of datasets."""

import numpy as np
import pytest

from thermopile.pipeline.mixture import Mixture
from thermopile.state_store import StateReader
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.mixtures import made_parts
from support.runs import SMALL_MODEL, assert_same_run, resumed, stopped

RESIDENT = {}
WINDOWED = {"state": {"memory_budget": "20KB"}}


@pytest.fixture(scope="module")
def parts(pairs_dataset, tmp_path_factory):
    return made_parts(pairs_dataset, tmp_path_factory.mktemp("parts"), 900, 400, 300)


def mixed(parts, **more):
    """Settings of 2 epochs: of a batch of 64, 32 : 16 : 16 are of the parts."""
    data = {"parts": [str(part.path) for part in parts], "shares": [2, 1, 1], "image_size": 16}
    tree = {"epochs": 2, "batch_size": 64, "log_every": 1, "model": SMALL_MODEL, "data": data}
    return resolve(load_config(tree | more), Mixture(parts))


def visits_by_hand(trainer):
    """How often each sample is in the run's batches."""
    visits, steps = np.zeros(trainer.dataset.n, int), trainer.order.steps_per_epoch
    for step in range(trainer.steps_done):
        np.add.at(visits, trainer.served.batch_ids(*divmod(step, steps)), 1)
    return visits


@pytest.mark.parametrize("more", [RESIDENT, WINDOWED], ids=["resident", "windowed"])
def test_a_mixture_is_trained_resumed_and_counted_exactly(parts, more, tmp_path):
    config = mixed(parts, **more, checkpoint={"every_steps": 4})
    assert (config.window_blocks < config.blocks_per_shard) == (more is WINDOWED)
    whole = RunDirectory(tmp_path / "whole")
    with Trainer(config, whole) as trainer:
        trainer.run()
        visits = visits_by_hand(trainer)
        assert (trainer.store.blocks_read > 0) == (more is WINDOWED)
    state = StateReader.open(whole.state)
    np.testing.assert_array_equal(state.column("visits"), visits)
    for part, share, first in zip(parts, (32, 16, 16), (0, 900, 1_300), strict=True):
        of_part = visits[first : first + part.n]
        assert of_part.sum() == share * trainer.steps_done
        assert of_part.max() <= -(-trainer.steps_done // (part.n // share))
    ids = np.array([1_599, 3, 900, 899, 1_300])
    np.testing.assert_array_equal(state.rows_at(ids)["visits"], visits[ids])
    np.testing.assert_array_equal(state.array("visits")[880:1_310], visits[880:1_310])
    run = stopped(config, tmp_path / "run", 6)
    assert_same_run(resumed(config, run, from_step=4), whole)
