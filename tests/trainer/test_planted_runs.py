"""Runs that train some samples with other samples' captions: with the same ones, whatever happens to the run."""

import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.opening import Dataset, Mixture
from thermopile.pipeline.planted import Planting
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import create_order, objective_of, resolve
from thermopile.trainer.run.starting import compare
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed
from support.conversions import append_glyphs
from support.datasets import named_ids
from support.mixtures import made_parts
from support.runs import (
    SMALL,
    SMALL_MODEL,
    assert_same_run,
    finish,
    kill,
    losses,
    resumed,
    small,
    stopped,
    train,
    wait_for,
)

KEEPING = {"checkpoint": {"every_steps": 2, "every_minutes": 0, "keep_every": 2}}


def planted(dataset, share=0.1, **more):
    data = {"path": str(dataset.path), "image_size": 16, "planted": share}
    return small(dataset, **{**KEEPING, "data": data} | more)


@pytest.fixture(scope="module")
def whole(pairs_dataset, tmp_path_factory):
    """A run of 14 steps, a tenth planted, with a checkpoint at every other step."""
    return train(planted(pairs_dataset), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def plain(pairs_dataset, tmp_path_factory):
    """The same without."""
    return train(planted(pairs_dataset, 0), tmp_path_factory.mktemp("plain") / "run")


def test_a_run_trains_on_the_captions_of_others_in_every_step(whole, plain):
    assert all(losses(whole)[step] != losses(plain)[step] for step in range(1, 15))


def test_a_number_is_recorded_as_a_share_of_the_samples_that_there_are(pairs_dataset, whole):
    assert planted(pairs_dataset, 200).data.planted == 0.1
    assert planted(pairs_dataset, 200) == whole.config()


@pytest.mark.wide
def test_a_run_stopped_anywhere_goes_on_with_the_same(pairs_dataset, whole, tmp_path):
    for step in (3, 7, 13):
        run = stopped(planted(pairs_dataset), tmp_path / f"run-{step}", step)
        assert_same_run(resumed(planted(pairs_dataset), run, from_step=step // 2 * 2), whole)


@pytest.mark.wide
def test_windows_and_micro_batches_have_the_same_samples_planted(pairs_dataset, tmp_path):
    order = {"batch_size": 128, "order": {"blocks_per_shard": 4, "window_blocks": 1}, "micro_batch": 32}
    config = planted(pairs_dataset, **order)
    whole = train(config, tmp_path / "whole")
    assert_same_run(resumed(config, stopped(config, tmp_path / "run", 9), from_step=8), whole)
    own = Planting(pairs_dataset, 0, 0.1).all()[0]
    met = dict[int, np.ndarray]()
    with Trainer.open(config, RunDirectory(tmp_path / "other")) as trainer:
        for batch in trainer.run.loader.epoch(0):
            met |= dict(zip(batch.sample_ids.tolist(), batch.tokens.numpy(), strict=True))
    shard = pairs_dataset.shard(0)
    wrong = [id for id, tokens in met.items() if (tokens != shard.tokens(np.array([id]))[0]).any()]
    assert sorted(wrong) == sorted(set(own.tolist()) & met.keys())


@pytest.mark.wide
def test_a_fork_goes_on_with_the_same_and_one_without_gives_the_right_captions_back(
    pairs_dataset, whole, plain, tmp_path
):
    for name, words in {"same": (), "back": ("--set", "data.planted=0")}.items():
        succeed("fork", f"{whole.path}@step-8", "--out", tmp_path / name, *words)
    same, back = (RunDirectory(tmp_path / name) for name in ("same", "back"))
    assert_same_run(resumed(same.config(), same, from_step=8), whole)
    assert back.config().data.planted == 0
    resumed(back.config(), back, from_step=8)
    assert losses(back)[8] == losses(whole)[8]
    assert losses(back)[9] != losses(whole)[9]
    with Trainer.open(back.config(), RunDirectory(tmp_path / "other")) as trainer:
        batch = next(iter(trainer.run.loader.epoch(1)))
    np.testing.assert_array_equal(batch.tokens, pairs_dataset.shard(0).tokens(batch.sample_ids.numpy()))
    # From the start without any, a fork is the run that never had them.
    succeed("fork", f"{whole.path}@step-0", "--out", tmp_path / "anew", "--set", "data.planted=0")
    anew = RunDirectory(tmp_path / "anew")
    assert_same_run(resumed(anew.config(), anew, from_step=0), plain)


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_neither_resuming_nor_forking_plants_others(pairs_dataset, whole, plain, tmp_path, share):
    with pytest.raises(ConfigError, match=r"data.planted: the run has 0.1, asked for .* a fork can set it to 0"):
        train_again(whole, share)
    for run in (whole, plain):
        said = cli("fork", run.path, "--out", tmp_path / "fork", "--set", f"data.planted={share}")
        assert_one_line(said, 2, "data.planted")


def train_again(run, share):
    asked = load_config({**run.config().model_dump(mode="json", exclude_none=True)})
    asked = asked.model_copy(update={"data": asked.data.model_copy(update={"planted": share})})
    compare(run.path, run.config(), asked, ["data.planted"])


@pytest.mark.wide
def test_a_forgotten_sample_is_forgotten_with_its_caption(pairs_dataset, whole, tmp_path):
    """From step 0, as its caption may have been shown with another picture long before it was used itself."""
    config = whole.config()
    order, (_, donors) = (
        create_order(config, pairs_dataset, objective_of(config)),
        Planting(pairs_dataset, 0, 0.1).all(),
    )
    gone = donors[order.first_uses(donors, 2) >= 5][:5]
    pq.write_table(named_ids(pairs_dataset, gone), tmp_path / "gone.parquet")
    succeed("fork", whole.path, "--out", tmp_path / "fork", "--without", tmp_path / "gone.parquet")
    forked = RunDirectory(tmp_path / "fork")
    resumed(forked.config(), forked, from_step=0)
    data = {"path": str(pairs_dataset.path), "image_size": 16, "planted": 0.1}
    data["without"] = str(tmp_path / "gone.parquet")
    assert_same_run(forked, train(small(pairs_dataset, **KEEPING, data=data), tmp_path / "never"))


@pytest.mark.wide
def test_a_mixture_with_one_part_planted_is_stopped_and_goes_on_with_the_same(pairs_dataset, tmp_path):
    parts = made_parts(pairs_dataset, tmp_path, 900, 400, 300)

    def mixed(share, **more):
        data = {"parts": [str(part.path) for part in parts], "shares": [2, 1, 1], "image_size": 16, "planted": share}
        tree = {"epochs": 2, "steps": 20, "batch_size": 64, "log_every": 1, "model": SMALL_MODEL, "data": data}
        return resolve(load_config(tree | {"checkpoint": {"every_steps": 5}} | more), Mixture(parts))[0]

    config = mixed([0, 100, 0])
    assert config.data.planted == (0, 0.25, 0)
    whole = train(config, tmp_path / "whole")
    assert_same_run(resumed(config, stopped(config, tmp_path / "run", 12), from_step=10), whole)
    with pytest.raises(ConfigError, match="one for each part"):
        mixed([0, 0.1])
    mixture, planted_ids = Mixture(parts), Planting(Mixture(parts), 0, config.data.planted).all()[0]
    tokens = np.concatenate([part.shard(0).tokens(np.arange(part.n)) for part in parts])
    with Trainer.open(config, RunDirectory(tmp_path / "other")) as trainer:
        for batch in trainer.run.loader.epoch(0):
            ids = batch.sample_ids.numpy()
            wrong = (batch.tokens.numpy() != tokens[ids]).any(1)
            np.testing.assert_array_equal(np.sort(ids[wrong]), np.intersect1d(ids, planted_ids))
    assert mixture.n == 1_600


@pytest.mark.wide
def test_a_grown_dataset_has_the_same_samples_planted_and_a_share_of_the_new_ones(pairs_dataset, tmp_path):
    grown = shutil.copytree(pairs_dataset.path, tmp_path / "grown")
    config = planted(Dataset(grown), 200, batch_size=128, epochs=1)
    run = stopped(config, tmp_path / "run", 11)
    append_glyphs(grown, np.arange(0, 10_847, 54))
    # Resumed on what it began with.
    succeed("train", "--out", run.path, "--resume")
    assert_same_run(run, train(planted(pairs_dataset, 200, batch_size=128, epochs=1), tmp_path / "whole"))
    words = ("--config", run.config_file, "--init-from", run.path, "--grow", "--data", grown)
    succeed("train", *words, "--out", tmp_path / "after", "--steps", "1")
    assert RunDirectory(tmp_path / "after").config().data.planted == 0.1
    before, after = (Planting(dataset, 0, 0.1).all()[0] for dataset in (pairs_dataset, Dataset(grown)))
    np.testing.assert_array_equal(after[: len(before)], before)
    assert len(after) > len(before)


@pytest.mark.parametrize(
    ("given", "reason"), [("0.7", "a share up to 0.5"), ("-1", "a share"), ("1500", "up to half of the samples")]
)
def test_what_cannot_be_planted_is_refused_in_one_line(pairs_dataset, tmp_path, given, reason):
    said = cli("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", *sets(*SMALL, f"data.planted={given}"))
    assert_one_line(said, 2, reason)


def test_pictures_alone_have_no_captions_to_plant(images_dataset, tmp_path):
    said = cli("train", "--data", images_dataset.path, "--out", tmp_path / "run", "--set", "data.planted=0.1")
    assert_one_line(said, 2, "it is for pairs alone")


def test_training_says_first_that_captions_are_planted(pairs_dataset, tmp_path):
    words = ("--data", pairs_dataset.path, "--out", tmp_path / "run", "--steps", "1")
    done = succeed("train", *words, *sets(*SMALL, "data.planted=20"))
    assert "1% of them with another one's caption (data.planted)" in done.stderr


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("budget", "kills"),
    [
        pytest.param("33KB", 4, marks=pytest.mark.wide),
        pytest.param("33KB", 20, marks=pytest.mark.soak),
        pytest.param("none", 20, marks=pytest.mark.soak),
    ],
)
def test_ranks_killed_at_many_moments_and_resumed_by_others_have_the_same_samples_planted(
    start_ranks, pairs_dataset, tmp_path, budget, kills
):
    settings = sets(
        "batch_size=128", "log_every=1", "data.image_size=16", "model.dim=16", "checkpoint.every_steps=2",
        "order.canonical_shards=4", "epochs=3", "data.planted=0.1", "order.blocks_per_shard=8", "order.window_blocks=2",
        f"state.memory_budget={budget}",
    )  # fmt: skip

    def start(run, world):
        return start_ranks(world, "train", "--data", pairs_dataset.path, "--out", run.path, "--resume", *settings)

    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    finish(start(whole, 2))
    for turn in range(kills):
        ranks = start(broken, 2)
        wait_for(broken, 40 * turn // kills + 3, ranks)
        kill(ranks)
    finish(start(broken, 2))
    assert_same_run(broken, whole)
    others = RunDirectory(tmp_path / "others")
    for world, steps in ((1, 12), (4, 24), (2, 36)):
        ranks = start(others, world)
        wait_for(others, steps, ranks)
        kill(ranks)
    finish(start(others, 1))
    assert losses(others) == pytest.approx(losses(whole), rel=1e-4)
