"""Runs on a mixture of datasets."""

import numpy as np
import pytest

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.mixture import Mixture
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store import StateReader
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import create_order, objective_of, resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets
from support.mixtures import made_parts
from support.runs import SMALL_MODEL, assert_same_run, finish, kill, resumed, stopped, wait_for

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


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Parts of 5,600, 3,000 and 1,800 glyphs."""
    folder = tmp_path_factory.mktemp("three")
    convert(GlyphSource(0), folder / "all", ConvertSettings(), workers=1)
    return made_parts(Dataset(folder / "all"), folder, 5_600, 3_000, 1_800)


@pytest.mark.wide
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("budget", [0, 280_000], ids=["resident", "windowed"])
def test_killed_ranks_count_exactly_and_repeat_their_losses(three, start_ranks, world, budget, tmp_path):
    data = [word for part in three for word in ("--data", part.path)]
    settings = sets(
        "epochs=3", "batch_size=1024", "log_every=1", "data.image_size=16", "model.dim=16", "checkpoint.every_steps=5",
        "model.image.config.width=4", "model.text.config.width=8",
        f"state.memory_budget={budget // world}" if budget else "state.memory_budget=none",
    )  # fmt: skip
    shares = [word for share in (5, 2, 1) for word in ("--share", share)]

    def start(run):
        return start_ranks(world, "train", *data, *shares, "--out", run.path, "--resume", *settings)

    whole, run = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "run")
    finish(start(whole))
    for steps in (8, 21):
        programs = start(run)
        wait_for(run, steps, programs)
        kill(programs)
    finish(start(run))
    assert_same_run(run, whole)
    config = whole.config()
    assert (config.window_blocks < config.blocks_per_shard) == (budget > 0)
    order = create_order(config, Mixture(three), objective_of(config))
    visits = np.zeros(10_400, int)
    for step in range(config.total_steps(order.steps_per_epoch)):
        visits[order.rows.ids_at(order.batch_ids(*divmod(step, order.steps_per_epoch)))] += 1
    np.testing.assert_array_equal(StateReader.open(run.state).column("visits"), visits)
    by_part = [of_part.sum() for of_part in np.split(visits, [5_600, 8_600])]
    assert by_part == [share * config.total_steps(order.steps_per_epoch) for share in (640, 256, 128)]


def test_what_does_not_fit_a_mixture_is_refused_in_one_line(parts, pairs_dataset, images_dataset, tmp_path):
    one, two, _ = (part.path for part in parts)
    out = ("--out", tmp_path / "run", *sets("data.image_size=16"))

    def train_on(*places, shares=(2, 1), more=()):
        data = [word for place in places for word in ("--data", place)]
        return cli("train", *data, *(word for share in shares for word in ("--share", share)), *out, *more)

    assert_one_line(train_on(one, two, more=sets("batch_size=100")), 2, "2 : 1", "use 96 or 144")
    assert_one_line(train_on(one, two, more=sets("batch_size=30")), 2, "use 48 or 96")
    assert_one_line(train_on(one, two, shares=(2, 1, 1)), 2, "2 parts and 3 shares")
    assert_one_line(train_on(one, shares=(1,)), 2, "0 parts and 1 shares")
    assert_one_line(train_on(one, images_dataset.path), 1, one, images_dataset.path, "holds images")
    assert_one_line(train_on(one, two, more=("--weights", "x")), 2, "not for a mixture")
    assert not (tmp_path / "run").exists()
