"""The temperature at which a sample's weights are as far from uniform as rho allows: against plain float64."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import spearmanr
from torch.nn.functional import normalize

from thermopile.trainer.objectives import Progress, create_objective
from thermopile.trainer.solved_temperatures import Bounds, at_rest, solve

N, D = 3000, 16


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def features():
    """Pairs in classes of very different sizes: float32 [n, d] each."""
    random = np.random.default_rng(0)
    centres, of = random.normal(size=(40, D)), (40 * random.random(N) ** 3).astype(int)
    pictures = centres[of] + 0.8 * random.normal(size=(N, D))
    return unit(pictures), unit(pictures + 0.3 * random.normal(size=(N, D)))


def divergence(h, tau):
    """Kullback–Leibler divergence of softmax(h / tau) from uniform, by its definition."""
    log_q = h / tau - logsumexp(h / tau)
    return float((np.exp(log_q) * (log_q + math.log(len(h)))).sum())


def plain(similarity, own, rho, lowest, highest):
    """The temperature of one sample, float64, against all others."""
    h = np.delete(similarity.astype(np.float64), own)
    if divergence(h, lowest) < rho:
        return 0.0
    if divergence(h, highest) > rho:
        return math.inf
    return math.exp(brentq(lambda log_tau: divergence(h, math.exp(log_tau)) - rho, math.log(lowest), math.log(highest)))


@pytest.mark.parametrize("rho", [0.1, 0.3, 1.0, 2.0, 4.0, 6.5])
def test_against_all_others_it_is_the_root_of_the_divergence(features, rho):
    pictures, captions = features
    ids, bounds = np.arange(0, N, 100), Bounds(rho, 0.003, 1.0)
    found = solve([pictures[ids]], [captions], ids, bounds, population=N)
    expected = [plain(captions @ pictures[i], i, *bounds) for i in ids]
    np.testing.assert_allclose(found.tau, expected, rtol=1e-3)
    assert (found.tau > 0).any()


def test_two_views_of_pictures_are_one_softmax_over_both_anchors_and_both_views_of_the_others(features):
    ids, bounds = np.arange(0, N, 200), Bounds(0.3, 0.003, 1.0)
    found = solve([view[ids] for view in features], list(features), ids, bounds, population=N)
    for i, tau in zip(ids, found.tau, strict=True):
        others = np.concatenate([np.delete(view, i, axis=0) for view in features])
        h = np.concatenate([others @ view[i] for view in features]).astype(np.float64)
        assert divergence(h, float(tau)) == pytest.approx(0.3, rel=1e-3)


def test_of_drawn_others_most_of_the_bias_is_taken_off_and_ranks_stay(features):
    pictures, captions = features
    ids, bounds = np.arange(0, N, 3), Bounds(2.0, 0.003, 1.0)
    whole = solve([pictures[ids]], [captions], ids, bounds, population=N).tau
    errors, uncorrected = [], []
    for seed in range(8):
        drawn = np.random.default_rng(seed).permutation(N)[: N // 6]
        place = np.full(N, -1)
        place[drawn] = np.arange(len(drawn))
        for population, into in ((N, errors), (len(drawn), uncorrected)):
            found = solve([pictures[ids]], [captions[drawn]], place[ids], bounds, population=population).tau
            into.append(np.log(found / whole))
        assert spearmanr(found, whole)[0] > 0.9
    assert abs(np.mean(errors)) < 0.005 < 0.01 < -np.mean(uncorrected)


def test_where_more_negatives_than_rho_allows_are_as_near_as_the_nearest_no_temperature_is_low_enough():
    random = np.random.default_rng(1)
    others = unit(random.normal(size=(1000, D)))
    others[:300] = others[0]  # 30 %, more than exp(-2) = 13.5 %
    anchors = np.stack([others[0], others[999]])
    found = solve([anchors], [others], np.array([0, 999]), Bounds(2.0, 1e-4, 1.0), population=1000)
    assert found.tau[0] == 0
    assert 0 < found.tau[1] < 1


def test_where_no_temperature_up_to_the_highest_is_high_enough_it_is_infinite(features):
    pictures, captions = features
    found = solve([pictures[:3]], [captions], np.arange(3), Bounds(2.0, 0.003, 0.01), population=N)
    assert np.isinf(found.tau).all()


def test_the_divergence_at_given_temperatures_is_told(features):
    pictures, captions = features
    tau = np.array([0.05, 0.2, 0.0], np.float32)
    found = solve([pictures[:3]], [captions], np.arange(3), Bounds(2.0, 0.003, 1.0), population=N, tau=tau)
    for i in range(2):
        h = np.delete((captions @ pictures[i]).astype(np.float64), i)
        assert found.divergence[i] == pytest.approx(divergence(h, float(tau[i])), rel=1e-3)
    assert np.isnan(found.divergence[2])  # of no temperature


def test_a_sample_that_is_not_among_the_others_leaves_none_of_them_out(features):
    pictures, captions = features
    found = solve([pictures[:1]], [captions[1:]], np.array([-1]), Bounds(2.0, 0.003, 1.0), population=N - 1)
    same = solve([pictures[:1]], [captions], np.array([0]), Bounds(2.0, 0.003, 1.0), population=N)
    assert found.tau == pytest.approx(same.tau, rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("start", [0.1, 0.5])
def test_temperatures_come_to_rest_where_the_objective_takes_them(start):
    n, batch, d, random = 512, 64, 12, np.random.default_rng(0)
    centres = np.repeat(random.normal(size=(32, d)), n // 32, axis=0)
    features = [normalize(torch.tensor(centres + 0.7 * random.normal(size=(n, d)), dtype=torch.float32)) for _ in "ab"]
    objective = create_objective("isogclr", rho=1.0, eta=0.01, tau_init=0.1, tau_step=0.1)
    state = {name: torch.full((n,), value) for name, value in objective.fields.items()}
    order = torch.Generator().manual_seed(0)
    ends = []
    for step in range(160 * n // batch):
        ids = torch.randperm(n, generator=order)[:batch]
        rows = {name: values[ids] for name, values in state.items()} | {"visits": torch.full((batch,), 10)}
        made = objective(*(side[ids] for side in features), rows, Progress(step, n // batch))
        for name, values in state.items():
            values[ids] = made.state[name].detach()
        if step > 100 * n // batch and step % 8 == 0:
            ends.append(state["image/tau"].log().numpy().copy())
    image, text = (side.numpy() for side in features)
    h = image @ text.T - (image * text).sum(1, keepdims=True)
    h = h[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    settings = objective.settings
    bounds = Bounds(1.0, settings.tau_min, settings.tau_max)
    found = at_rest(h, np.full(n, start, np.float32), bounds, settings.gamma, settings.grad_clip, batch - 1)
    ratio = np.log(found) - np.mean(ends, axis=0)
    assert abs(np.median(ratio)) < 0.05
    assert np.corrcoef(np.log(found), np.mean(ends, axis=0))[0, 1] > 0.95
