"""TempNet against its definition written out plainly: loss, gradients of features and network, state."""

import math

import numpy as np
import pytest
import torch

from thermopile.trainer.objectives import Progress, create_objective

from support.objectives import log_mean, make_features, make_state, run_step

MODES = ["bimodal", "unimodal"]
SAMPLES, WIDTH = 7, 16
LATER = Progress(step=3, steps_per_epoch=10)
"""Not the first step, which sets the prototypes."""
SMALL = {"width": WIDTH, "prototypes": 5, "rho": 0.7, "gamma": 0.6, "tau_min": 0.02, "tau_max": 0.3}
CASES = [{}, {"dropout": 0.0}, {"gamma": 1.0, "eps": 1e-3}, {"similarity_budget": 200, "rho": 0.0}]


@pytest.fixture
def make_trained():
    def make(mode, **settings):
        """The objective with weights unlike the initial ones, of which some are 0 and others equal."""
        objective = create_objective("tempnet", mode, **SMALL | settings).double()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weights in objective.parameters():
                weights += 0.3 * torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        return objective

    return make


def plain_tau(objective, side, feature, kept):
    """The temperature of one feature, [d]; kept: dropout's factors, [d]."""
    own = {name.rpartition(".")[2]: weights for name, weights in objective.named_parameters() if f".{side}." in name}
    settings = objective.settings
    v = [kept[k] / (1 + torch.exp(-(own["transform"][k] @ feature + own["shift"][k]))) for k in range(len(feature))]
    z = [sum(a * b for a, b in zip(v, p, strict=True)) / (p * p).sum().sqrt() for p in own["prototypes"]]
    exponentials = [torch.exp(each / own["log_scale"].exp()) for each in z]
    total = own["bias"]
    for weight, product, exponential in zip(own["weights"], z, exponentials, strict=True):
        share = exponential / sum(exponentials) - 1 / len(z)
        total = total + weight * share / (1 + torch.exp(-product))
    return settings.tau_min + (settings.tau_max - settings.tau_min) / (1 + torch.exp(-total))


def drawn(settings, step):
    """Dropout's factors of a batch, [2, b, d]."""
    seed = int(np.random.SeedSequence((settings.seed, step)).generate_state(1)[0])
    kept = torch.empty(2, SAMPLES, WIDTH, dtype=torch.float64)
    kept.bernoulli_(1 - settings.dropout, generator=torch.Generator().manual_seed(seed))
    return kept / (1 - settings.dropout)


def plain_step(objective, first, second, state, step):
    """Return the value, new state, and a scalar whose gradients are the step's."""
    settings, value, differentiable, new = objective.settings, 0.0, 0.0, {}
    views, kept = [first, second], drawn(settings, step)
    anchors_of = {"image": [0], "text": [1]} if len(objective.sides) == 2 else {"sample": [0, 1]}
    for side, anchors in anchors_of.items():
        for i in range(SAMPLES):
            predicted = [plain_tau(objective, side, views[view][i].detach(), kept[view, i]) for view in anchors]
            tau = sum(predicted) / len(anchors)
            h = []  # of each anchor, for its negatives
            for view in anchors:
                others = [views[1 - view]] if len(anchors_of) == 2 else views
                positive = views[view][i] @ views[1 - view][i]
                h.append(torch.stack([views[view][i] @ rows[j] - positive
                                      for rows in others for j in range(SAMPLES) if j != i]))  # fmt: skip
            exponentials = torch.stack(h).detach() / tau.detach()
            g = exponentials.exp().mean()
            old = state[f"{side}/log_s"][i].exp()
            s = g if old == 0 else (1 - settings.gamma) * old + settings.gamma * g
            weights = exponentials.exp() / (s + settings.eps) / exponentials[0].numel()
            log_s = (s + settings.eps).log()
            of_tau = log_s + settings.rho - (weights * exponentials).sum(1).mean()
            value += tau.item() * (log_s + settings.rho) / SAMPLES
            pulls = sum((weight * of_anchor).sum() for weight, of_anchor in zip(weights, h, strict=True))
            differentiable = differentiable + (pulls / len(anchors) + of_tau * tau) / SAMPLES
            new.setdefault(f"{side}/log_s", []).append(s.log())
            new.setdefault(f"{side}/tau", []).append(tau.detach())
    return value, {name: torch.stack(values) for name, values in new.items()}, differentiable


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", CASES, ids=lambda settings: "-".join(settings) or "defaults")
def test_a_step_is_its_definition_written_out(mode, settings, make_trained):
    objective = make_trained(mode, **settings)
    features, state = make_features(SAMPLES), make_state(objective, SAMPLES)
    outcome, *gradients = run_step(objective, features, state, LATER)
    value, new, differentiable = plain_step(objective, *features, state, LATER.step)
    expected = torch.autograd.grad(differentiable, [*features, *objective.parameters()])
    torch.testing.assert_close(outcome.loss, value, rtol=1e-9, atol=1e-9)
    for name, values in new.items():
        torch.testing.assert_close(outcome.state[name], values, rtol=1e-9, atol=1e-9)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert wanted.any()
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_the_network_learns_the_derivative_of_the_robust_loss_at_gamma_one(mode, make_trained):
    objective = make_trained(mode, gamma=1.0, dropout=0.0)
    features, state = make_features(6), make_state(objective, 6)
    _, _, _, *gradients = run_step(objective, features, state, LATER)
    views = [[side.detach()] for side in features] if mode == "bimodal" else [[side.detach() for side in features]]
    of_sides = zip(objective.networks.values(), views, strict=True)
    tau = torch.stack([torch.stack([network(view) for view in of_side]).mean(0) for network, of_side in of_sides])
    log_g = log_mean(*(side.detach() for side in features), tau, mode)
    if mode == "unimodal":
        log_g = log_g.exp().mean(0).log()
    robust = (tau * (log_g + objective.settings.rho)).mean(-1).sum()
    expected = torch.autograd.grad(robust, list(objective.parameters()))
    torch.testing.assert_close(gradients, list(expected), rtol=1e-9, atol=1e-11)


def test_no_step_reads_the_stored_temperature(make_trained):
    objective = make_trained("bimodal")
    features, state = make_features(SAMPLES), make_state(objective, SAMPLES)
    moved = state | {name: values * 2 for name, values in state.items() if name.endswith("/tau")}
    here, there = run_step(objective, features, state, LATER), run_step(objective, features, moved, LATER)
    assert torch.equal(here[0].loss, there[0].loss)
    assert all(torch.equal(here[0].state[name], there[0].state[name]) for name in state)


def test_dropout_changes_from_step_to_step_and_comes_again_with_the_step(make_trained):
    objective = make_trained("unimodal")
    features, state = make_features(SAMPLES), make_state(objective, SAMPLES)
    taus = [run_step(objective, features, state, Progress(step, 10))[0].state["sample/tau"] for step in (1, 2, 1)]
    assert torch.equal(taus[0], taus[2])
    assert (taus[0] != taus[1]).all()


def test_predictions_are_those_of_the_sides_own_network_without_dropout(make_trained):
    objective, dropping = make_trained("bimodal", dropout=0.0), make_trained("bimodal")
    features = make_features(SAMPLES)
    new = run_step(objective, features, make_state(objective, SAMPLES), LATER)[0].state
    for side, of_side in zip(objective.sides, features, strict=True):
        assert torch.equal(objective.predict(side, of_side), new[f"{side}/tau"])
        assert torch.equal(dropping.predict(side, of_side), new[f"{side}/tau"])
        assert not objective.predict(side, of_side).requires_grad
    assert (objective.predict("image", features[0]) != objective.predict("text", features[0])).all()


def test_only_tempnet_predicts():
    objective = create_objective("isogclr")
    assert not objective.predicts
    with pytest.raises(NotImplementedError, match="objective 'isogclr' predicts no temperatures"):
        objective.predict("image", torch.ones(2, 4))
    assert create_objective("tempnet").predicts


def test_the_network_starts_as_in_the_authors_code():
    objective = create_objective("tempnet", width=40)
    for side in ("image", "text"):
        network = objective.networks[side]
        assert network.prototypes.shape == (256, 40)
        assert 0.9 < network.prototypes.std() < 1.1
        assert 0.9 / math.sqrt(40) < network.transform.abs().max() <= 1 / math.sqrt(40)
        assert network.log_scale.exp().item() == pytest.approx(0.01)
        assert (network.weights == 1).all()
        assert network.bias == 0
    assert not torch.equal(objective.networks["image"].prototypes, objective.networks["text"].prototypes)
    again, other = create_objective("tempnet", width=40), create_objective("tempnet", width=40, seed=1)
    assert torch.equal(again.networks["text"].transform, objective.networks["text"].transform)
    assert not torch.equal(other.networks["text"].transform, objective.networks["text"].transform)


@pytest.mark.parametrize("prototypes", [5, 16])
def test_the_first_step_puts_the_prototypes_at_the_other_sides_features(prototypes):
    objective = create_objective("tempnet", width=WIDTH, prototypes=prototypes).double()
    features, state = make_features(SAMPLES), make_state(objective, SAMPLES)
    run_step(objective, features, state, Progress(0, 10))
    for side, other in zip(objective.sides, features[::-1], strict=True):
        expected = other[torch.arange(prototypes) % SAMPLES]
        assert torch.equal(objective.networks[side].prototypes, expected)
    before = {name: weights.clone() for name, weights in objective.named_parameters()}
    run_step(objective, make_features(SAMPLES, seed=1), state, Progress(1, 10))
    assert all(torch.equal(weights, before[name]) for name, weights in objective.named_parameters())


def test_defaults_are_those_of_the_authors_run_on_pairs():
    settings, rate = create_objective("tempnet").settings, create_objective("tempnet").temperature_rate
    assert (settings.gamma, settings.tau_min, settings.tau_max, settings.dropout) == (0.8, 0.005, 0.05, 0.5)
    assert (rate.lr, rate.decay, rate.betas, rate.slow_below) == (3e-5, 0.9, (0.9, 0.999), None)


def test_features_of_another_width_are_refused():
    objective = create_objective("tempnet", width=12)
    with pytest.raises(ValueError, match=r"'tempnet': features have 16 numbers, but width is 12"):
        run_step(objective, make_features(5), make_state(objective, 5))
