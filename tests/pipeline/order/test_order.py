"""The sample order: without replacement, the same for any number of ranks, and O(1) at any size."""

import math
import time
import tracemalloc
from dataclasses import asdict
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare

from thermopile.pipeline.order.bijection import shuffled
from thermopile.pipeline.order.order import MAX_BLOCK_ROWS, ORDER_VERSION, Order

from support.orders import EPOCHS, ORDERS, SEEDS, SHARDS, SOME, epoch_ids, shard_sequence

GOLDEN_FULL_START = [307, 1999, 3280, 4668, 5772, 6918, 9370, 10371]
GOLDEN_FULL_END = [730, 2555, 3666, 4817, 5973, 7722, 8506, 9679]
GOLDEN_WINDOWS = [653, 1646, 4788, 3303, 6347, 5671, 8625, 10137]
GOLDEN_HUGE = [51998236, 205876379, 371631854, 458422748, 582008363, 671446947, 789451430, 979995108]


def fits_uniform(counts: NDArray[np.int64]) -> bool:
    return bool(chisquare(counts).pvalue > 1e-3)


# Which ids


@SOME
@given(ORDERS, EPOCHS)
def test_an_epoch_never_repeats_an_id_and_stays_in_range(order: Order, epoch: int) -> None:
    ids = epoch_ids(order, epoch).reshape(-1)
    assert ids.dtype == np.int64
    assert len(np.unique(ids)) == ids.size
    assert ids.min() >= 0
    assert ids.max() < order.samples


@SOME
@given(ORDERS, EPOCHS)
def test_an_order_of_whole_epochs_serves_every_id_and_else_the_same_batches(order: Order, epoch: int) -> None:
    served = epoch_ids(order.serving_all(), epoch)
    assert (np.unique(served) == np.arange(order.samples)).all()
    assert all(len(np.unique(batch)) == order.batch_size for batch in served)
    assert (served[: order.steps_per_epoch] == epoch_ids(order, epoch)).all()


@SOME
@given(ORDERS, EPOCHS)
def test_every_step_takes_as_many_ids_of_each_shard_in_shard_order(order: Order, epoch: int) -> None:
    shards = epoch_ids(order, epoch) // order.shard_rows
    assert (shards == np.repeat(np.arange(order.canonical_shards), order.rows_per_step)).all()


@SOME
@given(ORDERS)
def test_shards_and_blocks_cut_the_ids_into_equal_contiguous_ranges_but_for_the_last(order: Order) -> None:
    shards = [order.shard_ids(shard) for shard in range(order.canonical_shards)]
    assert [i for ids in shards for i in ids] == list(range(order.samples))
    assert {len(ids) for ids in shards[:-1]} <= {order.blocks_per_shard * order.block_rows}
    assert order.block_rows == math.ceil(order.samples / (order.canonical_shards * order.blocks_per_shard))
    assert order.steps_per_epoch == len(shards[-1]) // order.rows_per_step


@SOME
@given(SHARDS, st.integers(16, 24), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), SEEDS)
def test_an_epoch_covers_every_id_when_steps_divide_the_shards(
    shards: int, step_rows: int, steps_per_block: int, blocks: int, window: int, seed: int
) -> None:
    window = blocks if window > 2 * shards else window
    samples = shards * blocks * steps_per_block * step_rows
    order = Order.create(samples, shards * step_rows, seed, shards, blocks, window)
    assert (np.sort(epoch_ids(order, 3), axis=None) == np.arange(samples)).all()


@SOME
@given(ORDERS, EPOCHS, st.data())
def test_the_ranks_joined_are_the_batch_of_one_process_for_any_world(
    order: Order, epoch: int, data: st.DataObject
) -> None:
    world = data.draw(st.sampled_from([w for w in range(1, 9) if order.canonical_shards % w == 0]))
    step = data.draw(st.integers(0, order.steps_per_epoch - 1))
    parts = [order.batch_ids(epoch, step, rank, world) for rank in range(world)]
    assert {part.shape for part in parts} == {(order.batch_size // world,)}
    assert (np.concatenate(parts) == order.batch_ids(epoch, step)).all()


# Where an id is


@SOME
@given(ORDERS, EPOCHS)
def test_the_place_of_an_id_leads_to_the_step_that_serves_it(order: Order, epoch: int) -> None:
    served = epoch_ids(order, epoch)
    steps = order.places_of(served.reshape(-1), epoch) // order.rows_per_step
    assert (steps.reshape(served.shape) == np.arange(order.steps_per_epoch)[:, None]).all()
    rows = np.arange(order.samples)
    places, shards = order.places_of(rows, epoch), rows // order.shard_rows
    left_out = np.setdiff1d(rows, served)
    assert (places[left_out] // order.rows_per_step >= order.steps_per_epoch).all()
    for shard in range(order.canonical_shards):
        assert (np.sort(places[shards == shard]) == np.arange(len(order.shard_ids(shard)))).all()


@SOME
@given(ORDERS, st.integers(1, 3))
def test_the_first_use_of_an_id_is_in_the_first_epoch_that_serves_it(order: Order, epochs: int) -> None:
    every = np.concatenate([epoch_ids(order, epoch) for epoch in range(epochs)])
    first = np.full(order.samples, len(every))
    for step in reversed(range(len(every))):
        first[every[step]] = step
    ids = np.random.default_rng(0).permutation(order.samples)
    assert (order.first_uses(ids, epochs) == first[ids]).all()


def test_many_ids_of_a_billion_samples_are_found_at_once() -> None:
    order = Order.create(10**9, 4096, seed=1, canonical_shards=8, window_blocks=16)
    ids = np.concatenate([order.batch_ids(0, step) for step in range(0, order.steps_per_epoch, 10_000)])
    steps = np.repeat(np.arange(0, order.steps_per_epoch, 10_000), order.batch_size)
    start = time.perf_counter()
    assert (order.first_uses(ids, 30) == steps).all()
    assert len(ids) >= 100_000
    assert time.perf_counter() - start < 2  # by itself 0.04 s


# How they are shuffled


def test_the_order_of_version_1_never_changes() -> None:
    """A resumed run relies on these literal ids. If they must change, raise ORDER_VERSION."""
    assert ORDER_VERSION == 1
    full = Order.create(10_847, 256, seed=7)
    assert full.batch_ids(0, 0)[::32].tolist() == GOLDEN_FULL_START
    assert full.batch_ids(3, 41)[::32].tolist() == GOLDEN_FULL_END
    windows = Order.create(10_847, 64, seed=2**64 - 1, canonical_shards=4, blocks_per_shard=40, window_blocks=5)
    assert windows.batch_ids(1, 100)[::8].tolist() == GOLDEN_WINDOWS
    assert windows.batch_ids(1, 100, rank=1, world=2)[::8].tolist() == GOLDEN_WINDOWS[4:]
    huge = Order.create(10**9, 4096, seed=1, canonical_shards=8, window_blocks=16)
    assert huge.batch_ids(9, 200_000)[::512].tolist() == GOLDEN_HUGE


@SOME
@given(ORDERS, EPOCHS)
def test_another_epoch_or_seed_gives_another_order(order: Order, epoch: int) -> None:
    other_seed = Order(**(asdict(order) | {"seed": order.seed ^ 1}))
    ids = order.batch_ids(epoch, 0)
    assert (ids != order.batch_ids(epoch + 1, 0)).any()
    assert (ids != other_seed.batch_ids(epoch, 0)).any()


def test_equal_shards_are_shuffled_differently() -> None:
    order = Order.create(8 * 512, 128)
    within = epoch_ids(order, 0).reshape(-1, 8, 16) % 512
    agreeing = sum((within[:, a] == within[:, b]).mean() for a in range(8) for b in range(a)) / 28
    assert agreeing < 0.01  # by chance 1 in 512


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_a_tiny_domain_comes_in_every_permutation_equally_often(size: int) -> None:
    counts = dict.fromkeys(permutations(range(size)), 0)
    for key in range(100 * len(counts)):
        counts[tuple(shuffled(place, size, np.uint64(key)) for place in range(size))] += 1
    assert size == 1 or fits_uniform(np.array(list(counts.values())))


@pytest.mark.parametrize("size", [*range(6, 18), 100, 255, 256, 257, 300])
def test_a_small_domain_sends_every_place_everywhere_equally_often(size: int) -> None:
    images = np.array([[shuffled(p, size, np.uint64(key)) for p in (0, 1, size - 1)] for key in range(30 * size)])
    for column in images.T:
        assert fits_uniform(np.bincount(column, minlength=size))
    # Two places together: their distance round the circle is uniform, too.
    assert fits_uniform(np.bincount((images[:, 1] - images[:, 0]) % size, minlength=size)[1:])


@SOME
@given(st.integers(1, 3_000), SEEDS)
def test_the_keyed_shuffle_is_a_bijection(size: int, key: int) -> None:
    assert sorted(shuffled(place, size, np.uint64(key)) for place in range(size)) == list(range(size))


@pytest.mark.parametrize("window", [None, 2])
def test_an_id_comes_at_any_place_of_its_shard_equally_often_over_the_epochs(window: int | None) -> None:
    order = Order.create(2 * 64, 32, seed=5, blocks_per_shard=4, window_blocks=window)
    sequences = np.stack([shard_sequence(order, epoch, shard=1) for epoch in range(3_200)])
    for sample_id in (64, 77, 100, 127):
        assert fits_uniform(np.bincount((sequences == sample_id).argmax(axis=1), minlength=64))


def test_ids_that_follow_each_other_rarely_do_so_again_in_the_next_epoch() -> None:
    order = Order.create(8 * 1024, 128, seed=3)
    followers = [set(pairwise(shard_sequence(order, epoch, shard=0).tolist())) for epoch in range(161)]
    again = sum(len(now & then) for now, then in pairwise(followers))
    assert 110 < again < 210  # by chance one a shard and epoch, 160 in all: within four standard deviations


def test_blocks_come_in_every_order_equally_often_over_the_epochs() -> None:
    order = Order.create(4 * 16, 16, canonical_shards=1, blocks_per_shard=4, window_blocks=1)
    counts = dict.fromkeys(permutations(range(4)), 0)
    for epoch in range(2_400):
        counts[tuple((epoch_ids(order, epoch)[:, 0] // 16).tolist())] += 1
    assert fits_uniform(np.array(list(counts.values())))


def test_the_short_last_block_lands_at_every_turn_equally_often() -> None:
    order = Order.create(5 * 36 - 4, 16, canonical_shards=1, blocks_per_shard=5, window_blocks=1)
    assert order.block_rows == 36
    turns = [shard_sequence(order, epoch, shard=0).tolist().index(150) // 36 for epoch in range(1_000)]
    assert fits_uniform(np.bincount(turns, minlength=5))


# Size


@pytest.mark.parametrize("batch_size", [4096, 32768])
@pytest.mark.parametrize("window", [None, 16])
def test_a_billion_ids_cost_no_more_memory_than_the_batch(batch_size: int, window: int | None) -> None:
    Order.create(1_000, 128).batch_ids(0, 0)  # compiling takes memory of its own
    tracemalloc.start()
    order = Order.create(10**9, batch_size, window_blocks=window)
    last = order.steps_per_epoch - 1
    batches = [order.batch_ids(epoch, step) for epoch, step in [(0, 0), (0, last), (10**6, last // 2)]]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 8 * batch_size + 100_000
    for ids in batches:
        assert len(np.unique(ids)) == batch_size
        assert ids.min() >= 0
        assert ids.max() < 10**9


# Defaults and errors


@pytest.mark.parametrize(
    ("samples", "batch_size", "shards"),
    [
        *((25_599, batch, shards) for batch, shards in [(4096, 8), (128, 8), (112, 4), (96, 4), (48, 2), (47, 1)]),
        *((samples, 4096, shards) for samples, shards in [(25_600, 16), (102_399, 16), (102_400, 32), (409_600, 64)]),
        (27_172, 6_784, 8),  # with 16, an epoch would have three steps in place of four
        *((10**9, batch, shards) for batch, shards in [(65_536, 64), (1008, 16), (512, 32), (128, 8)]),
    ],
)
def test_shards_default_to_as_many_as_the_batch_allows_and_to_more_than_eight_for_many_samples(
    samples: int, batch_size: int, shards: int
) -> None:
    assert Order.create(samples, batch_size).canonical_shards == shards


@pytest.mark.parametrize("samples", [25_600, 102_400, 409_600, 10**6 + 1])
def test_by_default_an_epoch_leaves_out_a_batch_and_a_hundredth_at_most(samples: int) -> None:
    order = Order.create(samples, 1024)
    assert samples - order.steps_per_epoch * 1024 < 1024 + samples // 100


@SOME
@given(st.integers(128, 10**10))
def test_blocks_default_to_the_fewest_that_keep_a_block_within_65_536_rows(samples: int) -> None:
    order = Order.create(max(samples, 1_000), 128)
    assert order.block_rows <= MAX_BLOCK_ROWS
    fewer = order.blocks_per_shard - 1
    assert fewer == 0 or order.samples > fewer * 8 * MAX_BLOCK_ROWS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, r"samples is 0; it must be at least 1"),
        ({"window_blocks": 0}, r"window_blocks is 0; it must be at least 1"),
        ({"seed": -1}, r"seed -1 is out of range; it must be in 0 … 2\*\*64 - 1"),
        ({"canonical_shards": 7}, r"batch_size 128 is not a multiple of canonical_shards 7\. Use 133"),
        ({"batch_size": 8}, r"takes 8 ids of each of the 1 canonical .* minimum is 16\. Raise batch_size to 16"),
        (
            {"canonical_shards": 16},
            r"takes 8 ids of each of the 16 .* Raise batch_size to 256 or lower canonical_shards",
        ),
        (
            {"samples": 10**6, "blocks_per_shard": 1},
            r"blocks of 125,000 rows, above 65,536\. Raise blocks_per_shard to 2",
        ),
        ({"samples": 120}, r"120 samples leave 15 for the last of 8 .* takes 16 of it\. Lower batch_size"),
        ({"samples": 130}, r"130 samples leave 11 for the last"),
        ({"samples": 17, "batch_size": 128}, r"17 samples leave 0 for the last"),
        (
            {"blocks_per_shard": 40, "window_blocks": 17},
            r"window_blocks 17 is above 16, .* raise canonical_shards to 9",
        ),
        ({"blocks_per_shard": 80, "window_blocks": 4}, r"takes 16 ids of each shard, more than a block of 13 rows"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_numbers_and_the_cure(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Order.create(**({"samples": 8_000, "batch_size": 128} | changes))


def test_a_window_above_the_shard_is_refused_when_built_directly() -> None:
    with pytest.raises(ValueError, match=r"window_blocks 5 is above blocks_per_shard 4; use 4 for a full shuffle"):
        Order(8_000, 128, 0, 8, 4, 5)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ((-1, 0, 0, 1), r"epoch is -1; epochs count from 0"),
        ((0, -1, 0, 1), r"step -1 is not in the epoch's steps 0 … 61"),
        ((0, 62, 0, 1), r"step 62 is not in the epoch's steps 0 … 61; continue with the next epoch"),
        ((0, 0, 0, 3), r"world 3 does not divide canonical_shards 8"),
        ((0, 0, 0, 16), r"world 16 does not divide canonical_shards 8"),
        ((0, 0, 0, 0), r"world 0 does not divide"),
        ((0, 0, 2, 2), r"rank 2 is not in 0 … 1, the ranks of world 2"),
        ((0, 0, -1, 2), r"rank -1 is not in 0 … 1"),
    ],
)
def test_a_position_outside_the_run_is_refused(position: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order.create(8_000, 128).batch_ids(*position)
