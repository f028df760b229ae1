"""Runs with memory for part of the rows. 2,000 rows of 32 bytes are 64,000."""

import re

import numpy as np
import pytest

from thermopile.pipeline.order.order import Order
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import resolve, windows_from
from thermopile.trainer.run.resume_settings import differences
from thermopile.trainer.run_directory import RunDirectory

from support.runs import assert_same_run, resumed, small, stopped, train

WINDOWED = {"batch_size": 128, "order": {"canonical_shards": 2}, "state": {"memory_budget": "40KB"}}


def with_budget(config, budget, **more):
    return config.model_copy(update={"state": config.state.model_copy(update={"memory_budget": budget} | more)})


@pytest.fixture(scope="module")
def resident(pairs_dataset, tmp_path_factory):
    """2 epochs of a windowed order, every row in memory all the time."""
    config = with_budget(small(pairs_dataset, **WINDOWED), None)
    return train(config, tmp_path_factory.mktemp("runs") / "resident")


def test_a_budget_for_fewer_rows_than_there_are_makes_the_order_windowed(pairs_dataset):
    config = small(pairs_dataset, **WINDOWED)
    assert (config.order.canonical_shards, config.order.window_blocks) == (2, 4)
    assert config.order.blocks_per_shard > 10


@pytest.mark.parametrize("budget", ["64KB", "1TB", "none"])
def test_a_budget_for_all_rows_changes_nothing(pairs_dataset, budget):
    assert with_budget(small(pairs_dataset, state={"memory_budget": budget}), None) == small(pairs_dataset)


def test_a_run_with_few_rows_in_memory_equals_one_with_all_bit_for_bit(resident, pairs_dataset, tmp_path):
    run = RunDirectory(tmp_path / "run")
    with Trainer.open(small(pairs_dataset, **WINDOWED), run) as trainer:
        trainer.train()
        all_blocks = -(-pairs_dataset.n // trainer.run.order.block_rows)
        # About once an epoch, not once a step: the store was told the windows.
        assert all_blocks < trainer.run.store.blocks_read < 3 * all_blocks
    assert_same_run(run, resident)


@pytest.mark.wide
def test_a_windowed_run_stopped_within_an_epoch_goes_on_with_another_budget(resident, pairs_dataset, tmp_path):
    config = small(pairs_dataset, **WINDOWED, checkpoint={"every_steps": 4})
    run = stopped(config, tmp_path / "run", 11)
    other = resolve(with_budget(config, 30_000, prefetch_steps=5), pairs_dataset)[0]
    assert differences(config, other) == []
    assert_same_run(resumed(other, run, from_step=8), resident)


@pytest.mark.parametrize(
    "tree", [{}, WINDOWED, {"order": {"window_blocks": 3, "blocks_per_shard": 7}}, {"order": {"blocks_per_shard": 9}}]
)
def test_a_budget_too_small_for_the_order_is_refused_with_one_that_would_do(pairs_dataset, tree):
    with pytest.raises(ConfigError, match=r"memory_budget = 300 holds 9 rows of 32 bytes, but") as refusal:
        small(pairs_dataset, **tree | {"state": {"memory_budget": 300}})
    enough = int(re.search(r"to at least ([\d,]+)", str(refusal.value))[1].replace(",", ""))
    small(pairs_dataset, **tree | {"state": {"memory_budget": enough}})
    with pytest.raises(ConfigError, match="at least"):
        small(pairs_dataset, **tree | {"state": {"memory_budget": enough - 1}})


@pytest.mark.parametrize("steps_done", [0, 1, 20, 29, 30, 31, 59])
def test_the_store_is_told_the_windows_of_every_step_to_come_by_its_puts(steps_done):
    order = Order.create(2_000, 64, canonical_shards=2, blocks_per_shard=20, window_blocks=4)
    assert order.steps_per_epoch == 31
    told = list(windows_from(steps_done, order, 2))
    assert [window.first_step for window in told] == sorted(window.first_step for window in told)
    for put in range(steps_done + 1, 2 * 31 + 1):
        blocks = np.unique(order.batch_ids(*divmod(put - 1, 31)) // order.block_rows)
        live = [window.blocks for window in told if window.first_step <= put <= window.last_step]
        assert np.isin(blocks, np.concatenate(live)).all()
    assert all(steps_done < window.last_step <= 2 * 31 for window in told)
