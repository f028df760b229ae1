"""Every objective against its loss written out plainly and differentiated by autograd.

Global contrastive objectives are held to it at gamma = 1, where the estimator is the batch's own inner value and so
what they report and what their gradient is defined by agree.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import OBJECTIVES, Progress

from support.objectives import START, log_mean, make_features, make_objective, make_state, run_step


def plain_clip(objective, first, second, state, log_g):
    logits, labels = objective.log_logit_scale.exp() * first @ second.T, torch.arange(len(first))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def view_logits(objective, first, second):
    """[2b, 2b] of NT-Xent, an anchor itself left out, and the column of each anchor's positive."""
    views, samples = torch.cat([first, second]), len(first)
    logits = (views @ views.T / objective.settings.tau).fill_diagonal_(-math.inf)
    return logits, (torch.arange(2 * samples) + samples) % (2 * samples)


def plain_simclr(objective, first, second, state, log_g):
    return F.cross_entropy(*view_logits(objective, first, second))


def plain_dcl(objective, first, second, state, log_g, weight=1.0):
    logits, positives = view_logits(objective, first, second)
    positive = logits.gather(1, positives[:, None])
    negatives = logits.scatter(1, positives[:, None], -math.inf)
    return (negatives.logsumexp(1) - weight * positive.squeeze(1)).mean()


def plain_dclw(objective, first, second, state, log_g):
    likeness = ((first * second).sum(1).detach() / objective.settings.sigma).exp()
    return plain_dcl(objective, first, second, state, log_g, weight=(2 - likeness / likeness.mean()).repeat(2))


def plain_auc_cl(objective, first, second, state, log_g):
    similarities, alpha = first @ second.T, objective.settings.alpha
    positive, others = similarities.diagonal(), ~torch.eye(len(first), dtype=torch.bool)
    of_others = (similarities - objective.b) ** 2 + 2 * alpha * similarities
    of_positives = (positive - objective.settings.a) ** 2 + 2 * alpha * (1 - positive) - alpha**2
    return (of_positives.sum() + of_others[others].sum()) / len(first)


def log_estimate(objective, log_g):
    """log(eps + g) of every row of state, [sides, b]."""
    pooled = log_g.exp() if len(objective.sides) == 2 else log_g.exp().mean(0, keepdim=True)
    return (pooled + objective.settings.eps).log()


def plain_scaled(objective, first, second, state, log_g):
    """GCL at a constant temperature."""
    return (
        objective.settings.tau * log_estimate(objective, log_g(first.new_tensor(objective.settings.tau))).mean(1).sum()
    )


def plain_individual(objective, first, second, state, log_g):
    """RGCL, each sample at its own temperature."""
    tau = torch.stack([state[f"{side}/tau"] for side in objective.sides])
    return (tau * (log_estimate(objective, log_g(tau)) + objective.settings.rho)).mean(1).sum()


def plain_unscaled(objective, first, second, state, log_g):
    return log_estimate(objective, log_g(objective.tau)).mean(1).sum()


def plain_robust(objective, first, second, state, log_g):
    """RGCL-g."""
    tau, rho = objective.tau, objective.settings.rho
    return tau * log_estimate(objective, log_g(tau)).mean(1).sum() + 2 * rho * tau


PLAIN = {
    "clip": plain_clip,
    "simclr": plain_simclr,
    "dcl": plain_dcl,
    "dclw": plain_dclw,
    "sogclr": plain_scaled,
    "isogclr": plain_individual,
    "fastclip_v0": plain_unscaled,
    "fastclip_v1": plain_scaled,
    "fastclip_v2": plain_individual,
    "fastclip_v3": plain_robust,
    "auc_cl": plain_auc_cl,
}


def check(plain, objective, mode, samples, seed, state, progress=START):
    """Compare one step with autograd of `plain`: value, and gradients of features and own parameters."""
    outcome, *gradients = run_step(objective, make_features(samples, seed), state, progress)
    first, second = make_features(samples, seed)
    expected = plain(objective, first, second, state, lambda tau: log_mean(first, second, tau, mode))
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-10, atol=1e-11)
    # Autograd loses a gradient below the round-off of its softmax, which is that of 1.
    scale = max(1.0, *(gradient.abs().max().item() for gradient in gradients))
    there = torch.autograd.grad(expected, [first, second, *objective.parameters()])
    torch.testing.assert_close(gradients, list(there), rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in PLAIN for mode in OBJECTIVES[name].settings_of_mode]
)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), samples=st.integers(2, 9), tau=st.floats(0.02, 1.0), eps=st.sampled_from([0.0, 0.1]))
def test_value_and_gradients_are_autograds_of_the_mini_batch_loss(name, mode, seed, samples, tau, eps):
    objective = make_objective(
        name, mode, gamma=1.0, tau=tau, eps=eps, rho=0.7, alpha=tau, b=tau - 0.5, log_logit_scale=-math.log(tau)
    )
    check(PLAIN[name], objective, mode, samples, seed, make_state(objective, samples, seed))


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**31),
    samples=st.integers(2, 9),
    tau=st.floats(0.05, 1.0),
    gamma=st.floats(0.01, 1.0),
    mixing=st.sampled_from(["loss1", "loss2", "alternate", "decay"]),
    step=st.integers(0, 7),
)
def test_decls_value_and_gradients_are_autograds_of_its_two_losses(mode, seed, samples, tau, gamma, mixing, step):
    objective = make_objective("decl", mode, tau=tau, gamma=gamma, mixing=mixing, auxiliary="mean", t0=3.0)
    share_of_loss1 = {"loss1": 1, "loss2": 0, "alternate": 1 - step % 2, "decay": 1 / (1 + step / 3)}[mixing]

    def plain(objective, first, second, state, log_g):
        positive = (first * second).sum(1) / tau
        log_r = log_g(first.new_tensor(tau)) + positive
        r = log_r.exp() if mode == "bimodal" else log_r.exp().mean(0, keepdim=True)
        old = torch.stack([state[f"{side}/log_rate"] for side in objective.sides]).exp()
        rate = torch.where(old == 0, r, (1 - gamma) * old + gamma * r).detach()
        loss1 = (r / rate - positive).mean(1).sum()
        negatives = (samples - 1) * (1 if mode == "bimodal" else 2)
        loss2 = (log_r + math.log(negatives) - positive).mean(1)
        loss2 = loss2.sum() if mode == "bimodal" else loss2.mean()
        return share_of_loss1 * loss1 + (1 - share_of_loss1) * loss2

    check(plain, objective, mode, samples, seed, make_state(objective, samples, seed), Progress(step, 10))
