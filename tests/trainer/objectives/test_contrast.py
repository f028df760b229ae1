"""The comparison of anchors with candidates against plain softmaxes, whatever the blocks, chunks and pieces."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import pairs as pairs_module
from thermopile.trainer.objectives.pairs import Pairs
from thermopile.trainer.objectives.softmax_sums import LN2, Weights, accumulate, grad_weights


def make_features(batch, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(2, batch, 6, generator=generator, dtype=torch.float64), dim=2).to(dtype)


def dense(features, across):
    """[2b, 2b], -inf where the column is no candidate of the row."""
    batch = features.shape[1]
    table, row = features.flatten(0, 1), torch.arange(2 * batch)
    excluded = row[:, None] % batch == row % batch
    if across:
        excluded |= row[:, None] // batch == row // batch
    return (table @ table.T).masked_fill(excluded, -math.inf)


def temperatures(batch, seed, low=0.01):
    return low + torch.rand(2 * batch, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=[True, False], ids=["across", "all"], scope="module")
def across(request):
    return request.param


@st.composite
def layouts(draw):
    """Samples in the global batch, the slice of them that is this rank's, bytes for similarities, pairs in a piece."""
    batch = draw(st.integers(2, 8))
    start = draw(st.integers(0, batch - 1))
    own = draw(st.sampled_from([slice(0, batch), slice(start, start + 1), slice(start, batch)]))
    return batch, own, draw(st.sampled_from([1, 200, 10**6])), draw(st.sampled_from([1, 9, 10**6]))


@settings(max_examples=50)
@given(layout=layouts(), seed=st.integers(0, 2**31))
def test_an_anchor_sees_its_candidates_softmax(layout, across, seed):
    batch, own, budget, piece = layout
    features, tau = make_features(batch, seed), temperatures(batch, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pairs_module.PIECE, "cpu", piece)
        pairs = Pairs(features, own, across=across, budget=budget)
        sums = accumulate(pairs, tau.view(2, batch)[:, own])

    exponents = dense(features, across) / tau[:, None]
    softmax = exponents.softmax(1)
    entropy_like = torch.where(softmax > 0, softmax * exponents, 0.0).sum(1)
    log_sum, mean_exponent = (values.view(2, batch)[:, own] for values in (exponents.logsumexp(1), entropy_like))
    tau = tau.view(2, batch)[:, own]
    torch.testing.assert_close(sums.total.log() + sums.peak / tau, log_sum, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sums.spread / sums.total + sums.peak / tau, mean_exponent, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sums.peak, dense(features, across).amax(1).view(2, batch)[:, own])


@settings(max_examples=50)
@given(layout=layouts(), seed=st.integers(0, 2**31))
def test_weights_give_own_features_the_gradient_of_every_anchors_log_sum(layout, across, seed):
    batch, own, budget, piece = layout
    features, tau = make_features(batch, seed).requires_grad_(), temperatures(batch, seed)
    negative_weight = torch.randn(2 * batch, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    (negative_weight * tau * (dense(features, across) / tau[:, None]).logsumexp(1)).sum().backward()

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(pairs_module.PIECE, "cpu", piece)
        everyone = accumulate(Pairs(features, slice(0, batch), across=across, budget=10**6), tau.view(2, batch))
        pairs = Pairs(features, own, across=across, budget=budget)
        weights = Weights(everyone.peak.flatten(), tau * LN2, negative_weight / everyone.total.flatten())
        gradients = pairs.gradients(lambda *piece: grad_weights(*piece, weights), in_positives=tau.new_zeros(batch))
    torch.testing.assert_close(gradients, features.grad[:, own], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", [1, 10**6])
@pytest.mark.parametrize("tau", [1e-4, 1.0, 1e6])
def test_a_sample_itself_has_no_weight_at_any_temperature_in_float32(across, tau, budget):
    features = make_features(5, 0, torch.float32)
    pairs = Pairs(features, slice(0, 5), across=across, budget=budget)
    sums = accumulate(pairs, torch.full((2, 5), tau))
    candidates = 4 if across else 8
    assert all(values.isfinite().all() for values in sums)
    assert (sums.total <= candidates + 1e-5).all()
    weights = Weights(sums.peak.flatten(), torch.full((10,), tau * LN2), torch.ones(10))
    for block in pairs.blocks:
        for rows, similarities in pairs.pieces(block):
            grad_weights(similarities, rows, block, weights)
            own_sample = torch.zeros_like(similarities)
            pairs.fill_own(own_sample, rows, block, 1.0)
            assert similarities.isfinite().all()
            assert (similarities[own_sample == 1] == 0).all()
