"""What orders need of a dataset's cache, and what is refused."""

import numpy as np
import pytest

from thermopile.pipeline.order.order import Order
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.run.dataset_cache import DatasetCache

SHARDS, ROWS, MB = 40, 25_000, 1_000_000


def cache(limit, *, sizes=None, ranks=1, is_set=True):
    """A cache for a million samples of 20 KB each, in 40 shards, unless their sizes are given."""
    sizes = np.full(SHARDS, 500 * MB) if sizes is None else np.array(sizes)
    return DatasetCache("s3://bucket/data", limit, is_set, np.arange(SHARDS + 1) * ROWS, sizes, ranks)


def largest_need(order, bytes_of_rows):
    """The most bytes that live blocks have at any step of two epochs, by simulation."""
    most = 0
    for epoch in range(2):
        windows = list(order.windows(epoch))
        for step in range(0, order.steps_per_epoch, 5):
            live = [block for each in windows if each.first_step <= step <= each.last_step for block in each.blocks]
            starts = np.array(live) * order.block_rows
            most = max(most, sum(bytes_of_rows[start : start + order.block_rows].sum() for start in starts))
    return most


@pytest.mark.parametrize("uneven", [False, True])
def test_an_order_needs_what_its_live_blocks_and_all_records_have_at_most(uneven):
    sizes = np.linspace(200, 800, SHARDS) * MB if uneven else np.full(SHARDS, 500 * MB)
    order = Order.for_memory(250_000, SHARDS * ROWS, 1024)
    assert order.window_blocks < order.blocks_per_shard
    needed = cache(1, sizes=sizes.astype(np.int64)).needed(order)
    simulated = largest_need(order, np.repeat(sizes / ROWS, ROWS)) + 64 * SHARDS * ROWS
    assert simulated <= needed <= 2.2 * simulated


def test_a_full_shuffle_needs_all_of_a_ranks_share():
    order = Order.create(SHARDS * ROWS, 1024)
    for ranks in (1, 4):
        assert cache(1, ranks=ranks).needed(order) == pytest.approx(SHARDS * 500 * MB / ranks, rel=0.01)


@pytest.mark.parametrize("every", [4, 100])
def test_selected_samples_take_an_eighth_more_than_their_share_and_the_pages_of_their_records(every):
    kept = SHARDS * ROWS // every
    pages = min(kept, SHARDS * ROWS // 64)
    for ranks in (1, 4):
        expected = kept * 20_000 * 9 // 8 // ranks + 4096 * min(kept // ranks, pages)
        assert cache(1, ranks=ranks).needed(Order.create(kept, 1024)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("every", [1, 4, 16])
def test_rows_that_fit_give_an_order_that_fits(every):
    samples = SHARDS * ROWS // every
    for share in (0.1, 0.25, 0.5) if every < 16 else (0.25, 0.5):
        limit = int(share * samples * 20_000)
        for sizes in (None, (np.linspace(100, 900, SHARDS) * MB).astype(np.int64)):
            found = cache(limit, sizes=sizes)
            order = Order.for_memory(found.rows, samples, 1024)
            order = Order.for_memory(found.narrowed(order, found.rows), samples, 1024)
            found.check(order, order)
            assert found.needed(order) > limit / 3, "most of the cache is not used"


def test_a_cache_too_small_for_a_recorded_order_is_refused_with_what_that_needs():
    order = Order.for_memory(250_000, SHARDS * ROWS, 1024)
    needed = cache(1).needed(order)
    message = f"data.cache = {needed - 1:,} is too small for s3://bucket/data.* at least {needed:,}$"
    with pytest.raises(ConfigError, match=message):
        cache(needed - 1).check(order, order)
    cache(needed).check(order, order)


def test_a_dataset_above_half_of_the_disk_asks_for_a_setting_and_says_the_least():
    order, narrowest = Order.create(SHARDS * ROWS, 1024), Order.for_memory(1, SHARDS * ROWS, 1024)
    with pytest.raises(ConfigError, match=r"half of the free disk, 1,000\. Set data.cache .* at least [\d,]{9,11}, or"):
        cache(1000, is_set=False).check(order, narrowest)
