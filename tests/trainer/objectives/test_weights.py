"""Losses of every frame, written out plainly: the mean of the samples' own terms, weighted or not."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import OBJECTIVES, Progress, create_objective

from support.objectives import FRAMED, START, Frame, directions_of, make_features, make_objective, make_state, one_step

WEIGHTED = [case for case in FRAMED if OBJECTIVES[case[0]].takes_weights]
OTHERS = sorted({name for name, known in OBJECTIVES.items() if not known.takes_weights})
EACH = pytest.mark.parametrize("case", WEIGHTED, ids=lambda case: f"{case[0]}-{case[1]}{case[2]}")


def weights_of(samples, seed=3):
    """Random factors with mean 1, of which one is 0."""
    weights = torch.rand(samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights[1] = 0.0
    return weights / weights.mean()


def exponents(anchors, positives, candidates, tau):
    """(S_ij - S_ii) / tau_i of each anchor's negatives, [b, negatives]; -inf for its own sample's."""
    itself, positive = torch.eye(len(anchors), dtype=torch.bool), (anchors * positives).sum(1)
    similarities = torch.cat([anchors @ rows.T for rows in candidates], dim=1)
    x = (similarities - positive[:, None]) / tau.expand(len(anchors))[:, None]
    return x.masked_fill(itself.repeat(1, len(candidates)), -math.inf)


def of_views(of_directions):
    """Means over the directions of each view: the first two have one, each local view two."""
    return torch.cat([of_directions[:2], (of_directions[2::2] + of_directions[3::2]) / 2])


def plain_terms(objective, name, mode, frame, first, second, state):
    """Each sample's term of the loss, [b]; their mean has the value and the gradients that the objective should."""
    sides = ["image", "text"] if mode == "bimodal" else ["sample", "sample"]
    across = mode == "bimodal" or name == "simco"
    directions = directions_of(frame, across, first, second)
    if mode == "unimodal":
        sides = ["sample"] * len(directions)
    if name == "clip":
        taus = [objective.log_logit_scale.neg().exp()] * 2
    elif f"{sides[0]}/tau" in state:
        taus = [state[f"{side}/tau"] for side in sides]
    else:
        tau = getattr(objective, "tau", None)
        taus = [torch.tensor(objective.settings.tau, dtype=torch.float64) if tau is None else tau] * len(directions)
    x = [exponents(*each, tau) for each, tau in zip(directions, taus, strict=True)]
    of_anchors = torch.stack([each.logsumexp(1) for each in x])
    positives = torch.stack([(anchors * of_anchor).sum(1) for anchors, of_anchor, _ in directions])
    negatives = int(x[0][0].isfinite().sum())
    tau = torch.stack([tau.expand(len(first)) for tau in taus])
    if name in ("clip", "simclr"):
        return F.softplus(of_anchors).mean(0)
    if name == "moco_v3":
        return 2 * (tau * F.softplus(of_anchors)).mean(0)
    if name == "dcl":
        return of_anchors.mean(0)
    if name == "flatnce":
        return (of_anchors + (F.softplus(of_anchors) - of_anchors).detach()).mean(0)
    if name == "dclw":
        likeness = (positives / objective.settings.sigma).softmax(1).detach() * len(first)
        return (of_anchors + positives / tau - (2 - likeness) * positives / tau).mean(0)
    if name == "simco":
        beta = torch.tensor(objective.settings.tau_beta, dtype=torch.float64)
        of_beta = torch.stack([exponents(*each, beta).logsumexp(1) for each in directions])
        return (of_beta.sigmoid() / of_anchors.sigmoid()).detach().mul(F.softplus(of_anchors)).mean(0)
    # A moving average of each sample and side.
    log_g = of_anchors.detach() - math.log(negatives)
    if name == "decl":  # of its anchors: a local view is one, with two positives
        similar = of_views((positives / tau).exp())
        r = of_views((of_anchors + positives / tau).exp() / negatives)
        log_g = r.detach().log()
    pooled = log_g if mode == "bimodal" else (log_g.logsumexp(0) - math.log(len(log_g))).expand_as(log_g)
    field = "log_rate" if name == "decl" else "log_s"
    old = torch.stack([state[f"{side}/{field}"] for side in sides[: len(log_g)]])
    gamma, eps = objective.settings.gamma, getattr(objective.settings, "eps", 0.0)
    log_s = torch.where(old.isneginf(), pooled, ((1 - gamma) * old.exp() + gamma * pooled.exp()).log())
    if name == "decl":  # loss1
        return (r / log_s.exp() - similar.log()).mean(0) * len(set(sides))
    log_s = (log_s.exp() + eps).log()
    p = [(each - log[:, None]).exp().detach() / negatives for each, log in zip(x, log_s, strict=True)]
    pull = torch.stack([(weight * each.nan_to_num(neginf=0)).sum(1) for weight, each in zip(p, x, strict=True)])
    scale = torch.ones_like(tau) if name == "fastclip_v0" else tau
    rho = objective.settings.rho if name in ("isogclr", "fastclip_v2") else 0.0
    return (scale * (log_s + rho + pull - pull.detach())).mean(0) * len(set(sides))


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


@EACH
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**31),
    samples=st.integers(2, 9),
    tau=st.floats(0.05, 1.0),
    gamma=st.sampled_from([0.6, 1.0]),
    is_weighted=st.booleans(),
)
def test_the_loss_is_the_weighted_mean_of_the_samples_terms(case, seed, samples, tau, gamma, is_weighted):
    name, mode, frame = case
    objective = make_objective(name, mode, frame, auxiliary="mean", tau=tau, gamma=gamma)
    first, second = make_features(samples, seed)
    state = make_state(objective, samples, seed)
    weights = weights_of(samples, seed) if is_weighted else torch.ones(samples, dtype=torch.float64)
    outcome = one_step(objective, first, second, state | ({"weight": weights} if is_weighted else {}))
    expected = (weights * plain_terms(objective, name, mode, frame, first, second, state)).mean()
    if name == "fastclip_v3":
        expected = expected + 2 * objective.settings.rho * objective.tau
    factor = 2 if frame.keys else 1  # the sum of both directions
    inputs = (first, second, *objective.parameters())
    assert outcome.loss.item() == pytest.approx(factor * expected.item(), rel=1e-9, abs=1e-11)
    found = gradients(outcome.loss, *inputs)
    scale = max(1.0, *(gradient.abs().max().item() for gradient in found))
    wanted = [factor * gradient for gradient in gradients(expected, *inputs)]
    torch.testing.assert_close(list(found), wanted, rtol=1e-9, atol=1e-12 * scale)


@EACH
def test_weights_leave_state_and_metrics_alone_and_those_of_1_the_loss_as_well(case):
    name, mode, frame = case
    objective = make_objective(name, mode, frame)
    first, second = make_features(9, dtype=torch.float32)
    state = make_state(objective, 9, dtype=torch.float32)
    without, ones, weighted = (
        one_step(objective, first, second, state | more)
        for more in ({}, {"weight": torch.ones(9)}, {"weight": weights_of(9).float()})
    )
    assert weighted.state.keys() == without.state.keys()
    for of_one in (ones, weighted):
        for path, rows in without.state.items():
            assert torch.equal(of_one.state[path], rows), path
    inputs = (first, second, *objective.parameters())
    assert torch.equal(ones.loss, without.loss)
    assert not torch.equal(weighted.loss, without.loss)
    for found, expected in zip(gradients(ones.loss, *inputs), gradients(without.loss, *inputs), strict=True):
        assert torch.equal(found, expected)
    for path in without.metrics.keys() - {"tau_gradient"}:  # the gradient of a temperature that all samples share
        assert torch.equal(weighted.metrics[path], without.metrics[path]), path


@pytest.mark.parametrize("settings", [{"mixing": "loss2"}, {"mixing": "decay"}, {"auxiliary": "sample"}])
def test_either_loss_of_decl_is_linear_in_the_weights(settings):
    objective = create_objective("decl", "bimodal", **settings)
    (first, second), weights = make_features(9), weights_of(9)
    state = make_state(objective, 9)

    def loss(weights):
        return objective(first, second, state | {"weight": weights}, Progress(500, 10)).loss

    of_each = [loss(row) for row in torch.eye(9, dtype=torch.float64)]
    assert loss(weights).item() == pytest.approx((weights @ torch.stack(of_each)).item(), rel=1e-10)
    of_first = gradients(of_each[0], second)[0]
    directions = F.normalize(of_first[1:], dim=1) @ F.normalize(first[0], dim=0)
    torch.testing.assert_close(directions.abs(), torch.ones_like(directions))


@EACH
def test_chunks_of_similarities_change_the_weighted_gradients_by_rounding_only(case):
    name, mode, frame = case
    found = []
    for budget in (0, 200):
        objective = make_objective(name, mode, frame, similarity_budget=budget)
        first, second = make_features(9)
        state = make_state(objective, 9) | {"weight": weights_of(9)}
        found.append(gradients(one_step(objective, first, second, state).loss, first, second))
    for whole, chunks in zip(*found, strict=True):
        torch.testing.assert_close(chunks, whole, rtol=1e-10, atol=1e-13)


def test_losses_that_are_no_means_over_anchors_take_no_weights():
    assert OTHERS == ["auc_cl", "barlow_twins", "cyclip", "siglip", "spectral", "vicreg"]
    first, second = make_features(9)
    for name in OTHERS:
        objective = create_objective(name, next(iter(OBJECTIVES[name].settings_of_mode)))
        with pytest.raises(ValueError, match=f"'{name}' takes no weights of samples; valid: clip, dcl, "):
            objective(first, second, {"weight": torch.ones(9)}, START)


def test_weights_of_another_number_of_samples_are_refused():
    with pytest.raises(ValueError, match=r"state: 'weight' is \[8\] but the batch has 9 samples"):
        create_objective("clip")(*make_features(9), {"weight": torch.ones(8)}, START)


def test_every_frame_is_tested():
    assert {frame for *_, frame in WEIGHTED} >= {Frame(), Frame(keys=True), Frame(local=2), Frame(keys=True, local=2)}
