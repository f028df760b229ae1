"""The table of similarities against the dense one: blocks, chunks, own pairs left out, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import pairs as module
from thermopile.trainer.objectives.pairs import EXCLUDED, Pairs

BYTES = torch.float64.itemsize


@st.composite
def layouts(draw):
    """Samples in the global batch, the slice of them that is this rank's, and bytes for similarities."""
    batch = draw(st.integers(2, 8))
    start = draw(st.integers(0, batch - 1))
    own = slice(start, draw(st.integers(start + 1, batch)))
    return batch, own, draw(st.sampled_from([1, 3 * batch * BYTES, 10**6]))


def make_features(batch, seed=0):
    return torch.randn(2, batch, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(features, across):
    """[2b, 2b], EXCLUDED where two rows are one sample's; NaN where rows of one side are no candidates."""
    batch = features.shape[1]
    table = features.flatten(0, 1)
    similarities = table @ table.T
    sample = torch.arange(2 * batch) % batch
    similarities[sample[:, None] == sample] = EXCLUDED
    if across:
        similarities[:batch, :batch] = similarities[batch:, batch:] = torch.nan
    return similarities


@pytest.fixture(params=[True, False], ids=["across", "all"], scope="module")
def across(request):
    return request.param


@settings(max_examples=40)
@given(layout=layouts())
def test_the_blocks_hold_what_own_rows_see_with_their_own_sample_excluded(layout, across):
    batch, own, budget = layout
    features = make_features(batch)
    pairs, expected = Pairs(features, own, across=across, budget=budget), dense(features, across)
    covered = torch.zeros_like(expected, dtype=torch.int)
    for block in pairs.blocks:
        for rows, similarities in pairs.visit(block):
            torch.testing.assert_close(similarities, expected[rows, block.columns], rtol=1e-13, atol=1e-14)
            covered[rows, block.columns] += 1
            if pairs.mirrored:
                covered[block.columns, rows] += 1
    mine = torch.zeros(batch, dtype=torch.bool)
    mine[own] = True
    seen = mine.repeat(2)[:, None] & ~expected.isnan()
    assert torch.equal(covered, seen.int())


@settings(max_examples=40)
@given(layout=layouts())
def test_similarities_are_kept_if_all_fit_the_budget_and_else_come_in_chunks(layout, across):
    batch, own, _ = layout
    features = make_features(batch)
    blocks = len(Pairs(features, own, across=across, budget=1).blocks)
    exact = blocks * (own.stop - own.start) * (batch if across else 2 * batch) * BYTES
    for budget in (exact, exact - 1, 1):
        pairs = Pairs(features, own, across=across, budget=budget)
        for block in pairs.blocks:
            for _, similarities in pairs.visit(block):
                assert similarities.nbytes <= budget or len(similarities) == 1
                similarities.fill_(7.0)  # and see whether the next visit finds it
        for block in pairs.blocks:
            for _, similarities in pairs.visit(block):
                assert (similarities == 7.0).all() == (budget == exact)
            for _, weights in pairs.weights(block, lambda piece, rows, block: piece.fill_(9.0)):
                assert (weights == 9.0).all()
            assert all((similarities != 9.0).all() for _, similarities in pairs.visit(block))  # computed again


@settings(max_examples=20)
@given(layout=layouts())
def test_the_second_half_is_read_off_the_first_halfs_columns_on_one_rank_alone(layout, across):
    batch, own, budget = layout
    pairs = Pairs(make_features(batch), own, across=across, budget=budget)
    assert pairs.mirrored == (across and own == slice(0, batch))
    assert len(pairs.blocks) == (1 if pairs.mirrored else 2)


@settings(max_examples=40)
@given(layout=layouts(), piece=st.sampled_from([1, 9, 10**6]), seed=st.integers(0, 2**31))
def test_gradients_of_own_rows_are_the_weights_times_candidates_and_positives(layout, across, piece, seed):
    batch, own, budget = layout
    features = make_features(batch, seed)
    # Symmetric: dR/dS_ij of a pair is one number, whichever row is called the anchor.
    weights = torch.randn(2 * batch, 2 * batch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights += weights.T.clone()
    in_positives = weights.diagonal(batch).clone()
    of_directions = torch.stack([in_positives / 4, in_positives * 3 / 4])
    similarities = dense(features, across)
    weights[similarities.isnan() | (similarities == EXCLUDED)] = 0.0

    def grad_weights(similarities, rows, block):
        similarities.copy_(weights[rows, block.columns])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.PIECE, "cpu", piece)
        gradients = Pairs(features, own, across=across, budget=budget).gradients(grad_weights, of_directions)
    weights.diagonal(batch).copy_(in_positives)
    weights.diagonal(-batch).copy_(in_positives)
    expected = (weights @ features.flatten(0, 1)).unflatten(0, (2, batch))[:, own]
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("piece", "compiled", "heights"),
    [(1, False, [1] * 7), (10, False, [3, 3, 1]), (100, False, [7]), (1, True, [7])],
)
def test_a_chunk_is_split_into_views_of_whole_rows_no_larger_than_a_piece(piece, compiled, heights, monkeypatch):
    """Compiled operations take the whole chunk."""
    monkeypatch.setitem(module.PIECE, "cpu", piece)
    monkeypatch.setattr(Pairs, "compiled", compiled)
    chunk, similarities = torch.zeros(7, 3), Pairs(make_features(2), slice(0, 2), across=True, budget=1)
    parts = list(similarities.split(slice(20, 27), chunk))
    assert [len(part) for _, part in parts] == heights
    for rows, part in parts:
        part += torch.arange(rows.start, rows.stop)[:, None]
    assert torch.equal(chunk, torch.arange(20.0, 27)[:, None].expand(7, 3))
