"""What a pass without training says of pairs: against plain float64."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import log_softmax, logsumexp
from torch.nn.functional import normalize

from thermopile.trainer.config import RANDOM
from thermopile.trainer.objectives import Progress, create_objective

B, D, TAU, RHO = 300, 24, 0.07, 1.5


@pytest.fixture(scope="module")
def judged():
    """The features of a batch, [2, b, d], and the objective's rows of it."""
    random = torch.Generator().manual_seed(5)
    pictures = normalize(torch.randn(B, D, generator=random), dim=1)
    captions = normalize(pictures + 0.2 * torch.randn(B, D, generator=random), dim=1)
    objective = create_objective("frozen", tau=TAU, rho=RHO)
    state = {name: torch.full((B,), value) for name, value in objective.fields.items()}
    with torch.no_grad():
        outcome = objective(pictures, captions, state | {"visits": torch.zeros(B, dtype=torch.int32)}, Progress(0, 1))
    return np.stack([pictures, captions]).astype(np.float64), outcome


@pytest.mark.parametrize(("side", "first", "second"), [("image", 0, 1), ("text", 1, 0)])
def test_log_s_margin_and_similarity_are_those_of_float64(judged, side, first, second):
    features, outcome = judged
    similarity = features[first] @ features[second].T
    h = np.where(np.eye(B, dtype=bool), -np.inf, similarity - np.diag(similarity)[:, None])
    log_s = logsumexp(h / TAU, axis=1) - np.log(B - 1)
    np.testing.assert_allclose(outcome.state[f"{side}/log_s"], log_s, atol=1e-5)
    np.testing.assert_allclose(outcome.state[f"{side}/margin"], -h.max(1), atol=1e-6)
    np.testing.assert_allclose(outcome.state["pair/similarity"], np.diag(similarity), atol=1e-6)


def test_the_temperature_is_where_the_divergence_of_the_weights_is_rho(judged):
    features, outcome = judged
    similarity = features[0] @ features[1].T

    def beyond_rho(log_tau, row):
        q = log_softmax(np.delete(similarity[row], row) / np.exp(log_tau))
        return (np.exp(q) * q).sum() + np.log(B - 1) - RHO

    exact = [np.exp(brentq(beyond_rho, -7, 3, args=(row,))) for row in range(B)]
    tau = outcome.state["image/tau"].numpy()
    assert np.median(tau / exact) == pytest.approx(1, abs=0.06)  # as of a population, of which 299 others are few
    assert np.corrcoef(np.log(tau), np.log(exact))[0, 1] > 0.95


def test_a_random_pair_is_a_picture_with_the_next_samples_caption(judged):
    features, outcome = judged
    others = np.roll(features[1], -1, axis=0)
    similarity, own = features[0] @ features[1].T, (features[0] * others).sum(1)
    itself, k = np.eye(B, dtype=bool), (np.arange(B) + 1) % B
    of_picture = np.where(itself, -np.inf, similarity - own[:, None])
    of_caption = np.where(itself, -np.inf, similarity.T)[k] - own[:, None]
    log_s = sum(logsumexp(h / TAU, axis=1) - np.log(B - 1) for h in (of_picture, of_caption))
    np.testing.assert_allclose(outcome.state[RANDOM], log_s, atol=2e-5)


def test_taus_beyond_the_bounds_are_the_bounds():
    alike = torch.eye(4)[:1].repeat(8, 1)
    apart = normalize(torch.eye(8, 4) + 0.01, dim=1)
    objective = create_objective("frozen", tau=0.1, rho=1.0, tau_min=0.01, tau_max=0.5)
    state = {name: torch.full((8,), value) for name, value in objective.fields.items()}
    state["visits"] = torch.zeros(8, dtype=torch.int32)
    with torch.no_grad():
        tau = objective(apart, alike, state, Progress(0, 1)).state["image/tau"]
    assert tau.min() == tau.max() == pytest.approx(0.01)  # all captions are as near: no weights are far from uniform


def test_it_is_for_pairs_and_takes_no_weights():
    with pytest.raises(ValueError, match="no mode 'unimodal'"):
        create_objective("frozen", "unimodal")
    with pytest.raises(ValueError, match="takes no weights"):
        create_objective("frozen").check_weights()
