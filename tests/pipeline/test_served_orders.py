"""Orders as loaders follow them: of selected samples, and in pieces of a batch; and the numbers that an order gives."""

import numpy as np
import pytest

from thermopile.pipeline.order import Order, Pieces, Selected
from thermopile.storage.selection import IDS, Selection, SelectionWriter

ORDER = Order.create(1_000, 128, seed=3)


@pytest.fixture
def selected(tmp_path):
    """Every third of 3,000 samples, from sample 5 on."""
    with SelectionWriter(tmp_path / "selection", samples=3_005) as writer:
        writer.add(IDS, [np.arange(5, 3_005, 3)])
        writer.finish()
    return Selected(ORDER, Selection(tmp_path / "selection"), 3_005)


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_an_order_of_selected_samples_gives_the_ids_at_the_positions_of_its_order(selected, rank, world):
    assert (selected.seed, selected.batch_size, selected.steps_per_epoch) == (3, 128, ORDER.steps_per_epoch)
    ids = selected.batch_ids(2, 4, rank, world)
    np.testing.assert_array_equal(ids, 5 + 3 * ORDER.batch_ids(2, 4, rank, world))


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_pieces_of_a_batch_joined_are_the_batch(rank, world):
    pieces = Pieces(ORDER, 4)
    assert (pieces.samples, pieces.seed, pieces.batch_size) == (1_000, 3, 32)
    assert pieces.steps_per_epoch == 4 * ORDER.steps_per_epoch
    parts = [pieces.batch_ids(2, step, rank, world) for step in range(20, 24)]
    assert {len(part) for part in parts} == {32 // world}
    np.testing.assert_array_equal(np.concatenate(parts), ORDER.batch_ids(2, 5, rank, world))


def test_live_rows_are_those_of_the_windows_and_two_blocks_a_shard():
    assert Order.create(8 * 24 * 260, 8 * 256, 0, 8, 24, 6).live_rows == 8 * 8 * 260


def test_a_window_that_exceeds_the_bound_is_refused_with_both_ways_to_keep_it():
    with pytest.raises(ValueError, match="window_blocks 20") as refused:
        Order.create(8_000, 128, canonical_shards=8, blocks_per_shard=40, window_blocks=20)
    assert str(refused.value) == (
        "window_blocks 20 is above 16, twice canonical_shards 8: one shard that changes windows would exceed 176 live "
        "blocks. Lower window_blocks to 16 or raise canonical_shards to 10; 40 is a full shuffle."
    )


def test_a_wide_window_is_allowed_while_all_blocks_are_within_the_bound():
    assert Order.create(640, 16, 0, 1, blocks_per_shard=10, window_blocks=8).live_rows == 640
    with pytest.raises(ValueError, match="window_blocks 8 is above 2, twice canonical_shards 1"):
        Order.create(704, 16, 0, 1, blocks_per_shard=11, window_blocks=8)
