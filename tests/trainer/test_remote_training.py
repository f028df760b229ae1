"""Runs on a dataset in an object store: the losses of one on disk, and which caches they go on with."""

import os
import re

import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.opening import Dataset
from thermopile.storage import bucket
from thermopile.storage.bucket import Address
from thermopile.storage.bucket_errors import ObjectStoreError
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run import dataset_cache
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import assert_same_state, assert_same_weights, finish, lines, losses, train

pytestmark = pytest.mark.wide

QUARTER = 6_000_000


@pytest.fixture(scope="module")
def address(s3, noise_dataset):
    return uploaded(noise_dataset.path, Address("bucket", "noise"))


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))


def settings(place, *, cache="none", **more):
    """Two epochs of 64 steps, less than two seconds each."""
    tree = {
        "epochs": 2, "batch_size": 64, "log_every": 1, "order": {"canonical_shards": 2},
        "checkpoint": {"every_steps": 20},
        "data": {"path": str(place), "image_size": 16, "cache": cache},
        "model": {"dim": 16, "image": {"config": {"width": 8}}},
    }  # fmt: skip
    return load_config(tree | more)


@pytest.fixture(scope="module")
def windowed(address, noise_dataset, tmp_path_factory):
    """The run on disk, with the order that a cache of a quarter asks for."""
    asked = resolve(settings(address, cache=QUARTER), Dataset(address))[0]
    assert asked.order.window_blocks < asked.order.blocks_per_shard
    config = resolve(settings(noise_dataset.path, order=dict(asked.order)), noise_dataset)[0]
    return train(config, tmp_path_factory.mktemp("runs") / "windowed")


def test_a_run_with_a_cache_of_a_quarter_has_the_losses_of_one_on_disk(s3, address, windowed, tmp_path):
    config = resolve(settings(address, cache=QUARTER), Dataset(address))[0]
    run = train(config, tmp_path / "run")
    assert losses(run) == losses(windowed)
    assert run.config().data.path == "s3://bucket/noise"
    for line in lines(run):
        assert line["fetch_wait_seconds"] >= 0
        assert line["data_wait_seconds"] >= 0
    assert sum(line["fetch_wait_seconds"] for line in lines(run)) > 0
    assert "fetch_wait_seconds" not in lines(windowed)[0]


def test_a_dataset_that_fits_the_cache_is_fully_shuffled(s3, address, noise_dataset):
    fits = resolve(settings(address, cache="1GB"), Dataset(address))[0]
    assert (fits.order.window_blocks, fits.order.blocks_per_shard) == (1, 1)
    local = resolve(settings(noise_dataset.path), noise_dataset)[0]
    assert (fits.order.window_blocks, fits.order.blocks_per_shard) == (
        local.order.window_blocks,
        local.order.blocks_per_shard,
    )


def test_without_a_setting_a_dataset_must_fit_the_free_disk_and_is_fully_shuffled(s3, address, monkeypatch):
    dataset, free = Dataset(address), 100_000_000
    monkeypatch.setattr(dataset_cache, "free_bytes", lambda folder: free)
    fits = resolve(settings(address), dataset)[0]
    assert (fits.order.window_blocks, fits.order.blocks_per_shard) == (1, 1)
    free = 12_000_000
    with pytest.raises(
        ConfigError, match=r"s3://bucket/noise takes .* half of the free disk, 6,000,000\. Set data\.cache"
    ):
        resolve(settings(address), dataset)[0]


def test_the_narrower_of_the_windows_for_state_and_cache_counts(s3, address):
    dataset = Dataset(address)
    of_cache, of_both, of_state = (
        resolve(settings(address, cache=cache, state={"memory_budget": budget}), dataset)[0]
        for cache, budget in ((QUARTER, "none"), (QUARTER, 30_000), ("1GB", 30_000))
    )
    rows = [config.order.window_blocks / config.order.blocks_per_shard for config in (of_cache, of_both, of_state)]
    assert rows[1] == min(rows) < 1
    assert rows[2] < 1


def test_a_resumed_run_may_have_a_larger_cache_but_none_too_small_for_its_order(s3, address, windowed, tmp_path):
    dataset, run = Dataset(address), RunDirectory(tmp_path / "run")
    config = resolve(settings(address, cache=QUARTER), dataset)[0]
    with Trainer.open(config, run) as trainer:
        trainer.train(should_stop=lambda: trainer.run.steps_done >= 30)
    smaller = config.model_copy(update={"data": config.data.model_copy(update={"cache": 1_000_000})})
    with pytest.raises(ConfigError, match=r"data\.cache = 1,000,000 is too small for s3://bucket/noise") as refused:
        Trainer.open(smaller, run, resume=True)
    floor = int(re.search(r"at least ([\d,]+)$", str(refused.value))[1].replace(",", ""))
    assert 1_000_000 < floor <= QUARTER
    larger = config.model_copy(update={"data": config.data.model_copy(update={"cache": 8_000_000})})
    with Trainer.open(larger, run, resume=True) as trainer:
        trainer.train()
    assert losses(run) == losses(windowed)


def test_a_new_run_whose_cache_is_too_small_for_any_order_is_told_the_least(s3, address):
    with pytest.raises(ConfigError, match=r"Set data.cache to at least ") as refused:
        resolve(settings(address, cache=100_000), Dataset(address))[0]
    least = int(re.search(r"at least ([\d,]+)$", str(refused.value))[1].replace(",", ""))
    resolve(settings(address, cache=least), Dataset(address))[0]


def test_a_run_whose_store_goes_away_ends_with_one_error_and_can_be_resumed(
    s3, address, windowed, tmp_path, monkeypatch
):
    monkeypatch.setattr(bucket, "PATIENCE_SECONDS", 2)
    run = RunDirectory(tmp_path / "run")
    with s3.gateway() as gateway:
        config = resolve(settings(address, cache=QUARTER), Dataset(address))[0]

        def outage(report):
            if report.step == 30:
                gateway.stop()

        with (
            pytest.raises(ObjectStoreError, match=r"s3://bucket/noise/shards/.* cannot be used: .*AWS_ENDPOINT_URL"),
            Trainer.open(config, run) as trainer,
        ):
            trainer.train(outage)
        gateway.start()
        with Trainer.open(config, run, resume=True) as trainer:
            assert trainer.run.steps_done >= 20
            trainer.train()
    assert losses(run) == losses(windowed)


def test_ranks_with_a_cache_each_train_as_they_do_on_a_disk(s3, address, noise_dataset, start_ranks, tmp_path):
    variables = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "THERMOPILE_"))}
    codes = [f"os.environ |= {variables}; from thermopile.tools.cli import main; main()"] * 2
    remote, local = RunDirectory(tmp_path / "remote"), RunDirectory(tmp_path / "local")

    def run_ranks(run, place, **more):
        tree = {"data.path": place, "epochs": 1, "batch_size": 64, "order.canonical_shards": 2, "log_every": 1,
                "data.image_size": 16, "model.dim": 16, "model.image.config.width": 8} | more  # fmt: skip
        words = sets(*(f"{name}={value}" for name, value in tree.items()))
        finish(start_ranks(2, "train", "--out", run.path, *words, codes=codes))

    run_ranks(remote, address, **{"data.cache": QUARTER // 2})
    made = remote.config()
    assert made.order.window_blocks < made.order.blocks_per_shard
    run_ranks(local, noise_dataset.path, **{f"order.{name}": number for name, number in made.order})
    assert_same_weights(remote, local)
    assert_same_state(remote, local)
