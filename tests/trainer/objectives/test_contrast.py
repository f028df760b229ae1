"""The comparison of anchors with candidates against plain softmaxes, whatever the blocks, chunks and pieces."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import pairs as pairs_module
from thermopile.trainer.objectives.contrastive import AnchorSums, PowerSums, accumulate
from thermopile.trainer.objectives.gathering import GlobalBatch
from thermopile.trainer.objectives.pairs import Pairs


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
def test_the_backward_pass_gives_own_features_the_gradient_of_every_anchors_log_sum(layout, across, seed):
    batch, own, budget, piece = layout
    features, tau = make_features(batch, seed).requires_grad_(), temperatures(batch, seed).requires_grad_()
    incoming = torch.randn(2, batch, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    positives = (features[0] * features[1]).sum(1)
    similarities = dense(features, across)
    finite = similarities.masked_fill(similarities.isneginf(), 0.0) / tau[:, None]
    exponents = finite.masked_fill(similarities.isneginf(), -math.inf)
    log_sums = exponents.logsumexp(1).view(2, batch) - positives / tau.view(2, batch)
    (incoming * log_sums).sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pairs_module.PIECE, "cpu", piece)
        with torch.no_grad():
            whole = Pairs(features.detach(), slice(0, batch), across=across, budget=10**6)
            sums, positive = accumulate(whole, tau.view(2, batch)), whole.positives.expand(2, -1)
        pairs = Pairs(features.detach(), own, across=across, budget=budget)
        views = features.detach()[:, own].clone().requires_grad_()
        of_tau = tau.detach().view(2, batch).clone().requires_grad_()
        found, *_ = AnchorSums.apply(views, of_tau, pairs, 1, positive, sums)
        for _ in range(2):  # the second recomputes the similarities that the first overwrote
            found_gradients = torch.autograd.grad(found, [views, of_tau], incoming, retain_graph=True)
    torch.testing.assert_close(found, log_sums.detach(), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(found_gradients[0], features.grad[:, own], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found_gradients[1].flatten(), tau.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("budget", [1, 10**6])
@pytest.mark.parametrize("tau", [1e-4, 1.0, 1e6])
def test_a_sample_itself_has_no_weight_at_any_temperature_in_float32(across, tau, budget):
    features = make_features(5, 0, torch.float32)
    pairs = Pairs(features, slice(0, 5), across=across, budget=budget)
    sums = accumulate(pairs, torch.full((2, 5), tau))
    candidates = 4 if across else 8
    assert all(values.isfinite().all() for values in sums)
    assert (sums.total <= candidates + 1e-5).all()
    positive, views = pairs.positives.expand(2, -1), features.clone().requires_grad_()
    found, *_ = AnchorSums.apply(views, torch.full((2, 5), tau), pairs, 1, positive, sums)
    weights = []
    pairs.gradients = lambda weigh, in_positives: (
        [
            weights.append((block, at, part.clone()))
            for block in pairs.blocks
            for at, part in pairs.weights(block, weigh)
        ]
        and torch.zeros_like(features)
    )
    found.sum().backward()
    for block, at, part in weights:
        own_sample = torch.zeros_like(part)
        pairs.fill_own(own_sample, at, block, 1.0)
        assert part.isfinite().all()
        assert (part[own_sample == 1] == 0).all()


@settings(max_examples=30)
@given(layout=layouts(), seed=st.integers(0, 2**31))
def test_power_sums_and_their_gradients_are_those_of_the_plain_ones(layout, across, seed):
    batch, _, budget, piece = layout
    features = make_features(batch, seed).requires_grad_()
    similarities = dense(features, across)[: batch if across else None]
    candidates = similarities[similarities.isfinite()].view(len(similarities), -1)
    expected = candidates.sum(1).mean(), candidates.square().sum(1).mean(), (features[0] * features[1]).sum(1).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pairs_module.PIECE, "cpu", piece)
        pairs = Pairs(features.detach(), slice(0, batch), across=across, budget=budget)
        positive, total, squares, peak = PowerSums.apply(features, pairs, GlobalBatch(0, 1))
        for found, wanted in zip((total, squares, positive[0].sum()), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
            given, there = (torch.autograd.grad(each, features, retain_graph=True)[0] for each in (found, wanted))
            torch.testing.assert_close(given, there, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(peak.flatten(), candidates.amax(1))
