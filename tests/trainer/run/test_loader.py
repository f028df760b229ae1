"""Batches for another library's loop: those of a run, from any position, on any number of ranks."""

import copy
import multiprocessing
import random
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from thermopile import Loader
from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.order.sampler import OrderSampler
from thermopile.storage.bucket import Address
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory
from thermopile.trainer.world import World

from support.mixtures import made_parts
from support.runs import small

SETTINGS = {"batch_size": 256, "data": {"image_size": 16, "workers": 1}}


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        assert torch.equal(batch.sample_ids, other.sample_ids)
        assert torch.equal(batch.tokens, other.tokens)
        assert torch.equal(batch.views[0], other.views[0])


def joined(of_ranks):
    """The batches of several ranks as one rank's."""
    for batches in zip(*of_ranks, strict=True):
        ids, views, tokens = zip(*((each.sample_ids, each.views[0], each.tokens) for each in batches), strict=True)
        first = batches[0]
        yield type(first)(torch.cat(ids), (torch.cat(views),), torch.cat(tokens))


def served(loaders, steps):
    """Take this many steps of loaders, one for each rank, over the ends of epochs."""
    taken = []
    for loader in loaders:
        of_rank = []
        while len(of_rank) < steps:
            for batch in loader:
                of_rank.append(batch)
                if len(of_rank) == steps:
                    break
        taken.append(of_rank)
    return list(joined(taken))


def ranks(opened, data, settings, size):
    return [opened.enter_context(Loader(data, settings, world=World(rank, size))) for rank in range(size)]


def test_a_loader_serves_the_batches_of_a_run_with_its_settings(pairs_dataset, tmp_path):
    config = small(pairs_dataset)
    with (
        Loader(pairs_dataset.path, SETTINGS) as loader,
        Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer,
    ):
        assert len(loader) == 7
        for epoch in range(2):
            assert_same(list(loader), list(trainer.run.loader.epoch(epoch)))
        assert loader.steps_done == 14


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.soak)])
def test_killed_anywhere_it_goes_on_with_other_ranks_as_if_never_killed(pairs_dataset, rounds):
    drawn = random.Random(rounds)
    with Loader(pairs_dataset.path, SETTINGS) as whole:
        expected = served([whole], 21)
    for _ in range(rounds):
        found, state = [], None
        stops = sorted(drawn.sample(range(1, 21), 2))
        for size, steps in zip((1, 2, 4), np.diff([0, *stops, 21]), strict=True):
            with ExitStack() as opened:
                loaders = ranks(opened, pairs_dataset.path, SETTINGS, size)
                for loader in loaders:
                    if state is not None:
                        loader.load_state_dict(state)
                found += served(loaders, steps)
                (state,) = {str(loader.state_dict()): loader.state_dict() for loader in loaders}.values()
        assert_same(found, expected)


def test_an_epoch_that_is_set_begins_unless_the_position_is_within_it(pairs_dataset):
    with Loader(pairs_dataset.path, SETTINGS) as loader, Loader(pairs_dataset.path, SETTINGS) as other:
        next(iter(loader))
        loader.set_epoch(0)
        assert loader.steps_done == 1
        loader.set_epoch(3)
        for _ in range(3):
            other.set_epoch(other.steps_done // 7 + 1)
        assert loader.steps_done == other.steps_done == 21
        assert_same([next(iter(loader))], [next(iter(other))])


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 128}, {"data": {"image_size": 32, "recipe": "glyphs"}}])
def test_a_position_of_other_batches_is_refused(pairs_dataset, change):
    with Loader(pairs_dataset.path, SETTINGS) as loader, Loader(pairs_dataset.path, SETTINGS | change) as other:
        with pytest.raises(ConfigError, match=rf"{'data.recipe' if 'data' in change else next(iter(change))}: .* → "):
            other.load_state_dict(loader.state_dict())
        other.load_state_dict(other.state_dict() | {"steps_done": 4})
        assert other.steps_done == 4


def test_selected_and_mixed_samples_are_served(pairs_dataset, tmp_path):
    kept = np.arange(3, 1_500, 2)
    pq.write_table(
        pa.table({"sample_id": kept, "key": pairs_dataset.take(kept, ["key"])["key"]}), tmp_path / "kept.parquet"
    )
    select = SETTINGS | {"data": SETTINGS["data"] | {"select": str(tmp_path / "kept.parquet")}}
    with Loader(pairs_dataset.path, select) as loader:
        ids = torch.cat([batch.sample_ids for batch in loader]).tolist()
    assert set(ids) <= set(kept.tolist())
    assert len(set(ids)) == len(ids) >= 2 * 256
    parts = made_parts(pairs_dataset, tmp_path, 400, 300)
    with Loader([part.path for part in parts], SETTINGS | {"batch_size": 64}) as loader:
        counts = [int((batch.sample_ids < 400).sum()) for batch in loader]
    assert set(counts) == {32}


@pytest.mark.wide
def test_a_bucket_is_read_ahead_from_any_position(pairs_dataset, s3, monkeypatch, tmp_path):
    monkeypatch.setenv("THERMOPILE_CACHE", str(tmp_path / "cache"))
    place = uploaded(pairs_dataset.path, Address("bucket", "pairs"))
    with Loader(pairs_dataset.path, SETTINGS) as local, Loader(place, SETTINGS) as remote:
        for position in (0, 9, 3):
            local.steps_done = remote.steps_done = position
            assert_same(served([remote], 9), served([local], 9))


def iterate(loader):
    next(iter(loader))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_would_hang_in_another_process_is_an_error(pairs_dataset):
    with Loader(pairs_dataset.path, SETTINGS) as loader:
        with pytest.raises(TypeError, match="cannot be copied to another process"):
            copy.deepcopy(loader)
        child = multiprocessing.get_context("fork").Process(target=iterate, args=(loader,))
        child.start()
        child.join(60)
        assert child.exitcode == 1


def test_the_numbers_of_ranks_that_cannot_share_batches_are_named(pairs_dataset):
    with pytest.raises(ConfigError, match="world 3 does not divide canonical_shards 8"):
        Loader(pairs_dataset.path, SETTINGS, world=World(0, 3))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.wide)])
def test_a_data_loader_of_torch_follows_the_order_also_after_a_stop_in_an_epoch(workers):
    order, samples = Order.create(1_000, 64), torch.arange(1_000)
    whole = [order.batch_ids(epoch, step).tolist() for epoch in range(2) for step in range(15)]

    def epochs(rank, world, steps_done):
        sampler = OrderSampler(order, rank, world)
        loader = torch.utils.data.DataLoader(samples, batch_sampler=sampler, num_workers=workers)
        sampler.steps_done = steps_done
        found = []
        for epoch in range(steps_done // 15, 2):
            sampler.set_epoch(epoch)
            found += [batch.tolist() for batch in loader]
        return found

    assert len(OrderSampler(order)) == 15
    assert epochs(0, 1, 0) == whole
    assert [low + high for low, high in zip(epochs(0, 2, 4), epochs(1, 2, 4), strict=True)] == whole[4:]


def test_a_sampler_of_ranks_that_do_not_divide_the_shards_is_refused():
    with pytest.raises(ValueError, match="world 3 does not divide"):
        OrderSampler(Order.create(1_000, 64), 0, 3)
