"""Orders as loaders follow them: of selected samples, and in pieces of a batch; and the numbers that an order gives."""

import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline.order.order import Order, Served
from thermopile.storage.selection import IDS, WITHOUT, Selection, SelectionWriter

from support.orders import ORDERS, SOME

ORDER = Order.create(1_000, 128, seed=3)


@pytest.fixture
def selected(tmp_path):
    """Every third of 3,000 samples, from sample 5 on."""
    with SelectionWriter(tmp_path / "selection", samples=3_005) as writer:
        writer.add(IDS, [np.arange(5, 3_005, 3)])
        writer.finish()
    return Served(ORDER, Selection(tmp_path / "selection"), 3_005)


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_an_order_of_selected_samples_gives_the_ids_at_the_positions_of_its_order(selected, rank, world):
    assert (selected.seed, selected.batch_size, selected.steps_per_epoch) == (3, 128, ORDER.steps_per_epoch)
    ids = selected.batch_ids(2, 4, rank, world)
    np.testing.assert_array_equal(ids, 5 + 3 * ORDER.batch_ids(2, 4, rank, world))


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2)])
def test_pieces_of_a_batch_joined_are_the_batch(rank, world):
    pieces = Served(ORDER, None, 1_000, pieces=4)
    assert (pieces.samples, pieces.seed, pieces.batch_size) == (1_000, 3, 32)
    assert pieces.steps_per_epoch == 4 * ORDER.steps_per_epoch
    parts = [pieces.batch_ids(2, step, rank, world) for step in range(20, 24)]
    assert {len(part) for part in parts} == {32 // world}
    np.testing.assert_array_equal(np.concatenate(parts), ORDER.batch_ids(2, 5, rank, world))


HOLES = np.random.default_rng(0).permutation(1_000)[:600]


@pytest.fixture
def with_holes(tmp_path):
    """Every third of 3,000 samples, from sample 5 on, without some."""
    with SelectionWriter(tmp_path / "selection", samples=3_005) as writer:
        writer.add(IDS, [np.arange(5, 3_005, 3)])
        writer.add(WITHOUT, [np.sort(HOLES)])
        writer.finish()
    return Served(ORDER, Selection(tmp_path / "selection"), 3_005)


def test_holes_keep_their_places_and_are_not_served(with_holes):
    for step in range(ORDER.steps_per_epoch):
        places = ORDER.batch_ids(1, step)
        present = places[~np.isin(places, HOLES)]
        np.testing.assert_array_equal(with_holes.batch_ids(1, step), 5 + 3 * present)


def test_shares_and_pieces_are_cut_before_holes_are_dropped(with_holes):
    ranks = [with_holes.batch_ids(1, 2, rank, world=4) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(ranks), with_holes.batch_ids(1, 2))
    assert with_holes.shares(1, 2, world=4) == tuple(map(len, ranks))
    assert len({*map(len, ranks)}) > 1
    places, pieces = ORDER.batch_ids(1, 2, rank=1, world=2), replace(with_holes, pieces=4)
    for piece in range(4):
        of_piece = places[piece * 16 : (piece + 1) * 16]
        present = of_piece[~np.isin(of_piece, HOLES)]
        np.testing.assert_array_equal(pieces.batch_ids(1, 2 * 4 + piece, 1, 2), 5 + 3 * present)


def test_without_holes_shares_are_not_told(selected):
    assert selected.shares(0, 0, world=2) is None


@SOME
@given(ORDERS, st.integers(0, 30), st.floats(0.7, 0.99), st.sampled_from([1, 2]))
def test_a_step_that_holes_leave_too_thin_is_found(order, first_step, share, pieces):
    pieces = pieces if order.batch_size % pieces == 0 else 1
    total = first_step + order.steps_per_epoch
    holes = np.flatnonzero(np.random.default_rng(0).random(order.samples) < share)
    expected = []
    for step in range(first_step, total):
        present = ~np.isin(order.batch_ids(*divmod(step, order.steps_per_epoch)), holes)
        expected += [(step, int(of.sum())) for parts in (order.canonical_shards, pieces)
                     for of in present.reshape(parts, -1) if of.sum() < 2]  # fmt: skip
    with pytest.raises(ValueError, match=r"Leave out fewer samples") if expected else nullcontext() as refused:
        order.refuse_thin_steps(holes, first_step, total, pieces)
    said = re.match(r"step ([\d,]+) would keep (\d) of its", str(refused and refused.value))
    assert expected == [] or (int(said[1].replace(",", "")) - 1, int(said[2])) in expected


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
