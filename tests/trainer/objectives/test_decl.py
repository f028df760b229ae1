"""What is DeCL's own: the draws of its auxiliary variables, and a gradient that batches do not bias."""

import itertools
import math

import pytest
import torch

from thermopile.trainer.objectives import Progress, create_objective

from support.objectives import make_features, make_state

MODES = ["bimodal", "unimodal"]


def loss_at(step, features, mode="unimodal", **settings):
    """The loss of samples never seen."""
    objective = create_objective("decl", mode, **settings)
    state = {name: torch.full((len(features[0]),), -math.inf) for name in objective.fields}
    return objective(*features, state | {"visits": torch.zeros(len(features[0]))}, Progress(step, 10)).loss


@pytest.mark.parametrize("mode", MODES)
def test_draws_follow_from_the_seed_and_the_step_so_that_a_resumed_run_repeats_them(mode):
    features = make_features(6)
    drawn = loss_at(7, features, mode, seed=3)
    assert torch.equal(loss_at(7, features, mode, seed=3), drawn)
    assert not torch.equal(loss_at(8, features, mode, seed=3), drawn)
    assert not torch.equal(loss_at(7, features, mode, seed=4), drawn)


def draws(step, samples=16, tau=0.5):
    """The draws e of one step, [samples], read off the gradient; and the loss they gave.

    With rows of the identity as both views every similarity between samples is 0, so the gradient of second_j along
    row i is (e_i + e_j) / (2 tau · samples · (samples - 1)), which three samples tell apart.
    """
    first, second = (torch.eye(samples, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loss = loss_at(step, (first, second), tau=tau)
    (gradient,) = torch.autograd.grad(loss, second)
    sums = gradient * 2 * tau * samples * (samples - 1)
    i = torch.arange(samples)
    j, k = i.roll(1), i.roll(2)
    return (sums[i, j] + sums[i, k] - sums[j, k]) / 2, loss.detach()


def test_draws_are_of_the_unit_exponential_and_serve_value_and_gradient_alike():
    tau, drawn = 0.5, []
    for step in range(60):
        of_step, loss = draws(step, tau=tau)
        torch.testing.assert_close(of_step.mean() - 1 / tau, loss, rtol=1e-9, atol=1e-9)
        drawn.append(of_step)
    drawn = torch.cat(drawn)
    four_sigmas = 4 / math.sqrt(len(drawn))
    assert drawn.min() >= 0
    assert abs(drawn.mean() - 1) < four_sigmas
    assert abs((drawn < math.log(2)).double().mean() - 0.5) < four_sigmas / 2
    assert abs((drawn > math.log(10)).double().mean() - 0.1) < 0.3 * four_sigmas
    assert drawn.unique().numel() == drawn.numel()


def mean_over_batches(objective, features, state, size):
    """Mean over all batches of `size` samples of the loss's gradient in all features, [2, n, d]."""
    table = torch.stack([side.detach() for side in features]).requires_grad_()
    batches = list(itertools.combinations(range(table.shape[1]), size))
    for batch in batches:
        ids = torch.tensor(batch)
        rows = {name: values[ids] for name, values in state.items()}
        (objective(*table[:, ids], rows, Progress(0, 1)).loss / len(batches)).backward()
    return table.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_mean_of_loss_1_s_gradient_over_all_batches_is_that_of_the_whole_data(mode, size):
    objective = create_objective("decl", mode, tau=0.2, auxiliary="mean", gamma=1e-15)
    features, state = make_features(7), make_state(objective, 7, unseen=0.0)
    of_batches, of_all = (mean_over_batches(objective, features, state, count) for count in (size, 7))
    torch.testing.assert_close(of_batches, of_all, rtol=0, atol=1e-9 * of_all.abs().max().item())


@pytest.mark.parametrize(
    ("name", "mode", "setting"),
    [("simclr", "unimodal", {"tau": 0.2}), ("clip", "bimodal", {"log_logit_scale": math.log(5)})],
)
def test_the_mean_of_infonces_gradients_is_not_the_gradient_of_the_whole_data(name, mode, setting):
    objective, features = create_objective(name, mode, **setting), make_features(7)
    of_batches, of_all = (mean_over_batches(objective, features, {}, count) for count in (3, 7))
    assert (of_batches - of_all).norm() > 0.1 * of_all.norm()


def plain_geometric(views, targets, tau, draws, old_rate, gamma):
    """Appendix E: log of the batch's sum, less three logs of the positives, and u_i r_i; anchor by anchor.

    draws: [n] of Gamma(2, 1). views: first, second and local; its positives are the targets that are not itself.
    """
    samples, terms, means = len(targets[0]), [], torch.zeros(len(targets[0]), dtype=torch.float64)
    for number, view in enumerate(views):
        for i in range(samples):
            similar = sum((view[i] @ targets[a][i] / tau).exp() for a in (0, 1) if a != number)
            similar = similar / sum(a != number for a in (0, 1))
            negatives = [(view[i] @ targets[a][j] / tau).exp() for a in (0, 1) for j in range(samples) if j != i]
            r = sum(negatives) / len(negatives)
            means[i] += r.detach() / len(views)
            terms.append((i, r, sum(negatives).log() - 3 * similar.log()))
    rate = (1 - gamma) * old_rate + gamma * means
    return sum(draws[i] / rate[i] * r + rest for i, r, rest in terms) / len(terms)


@pytest.mark.parametrize("local", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_the_geometric_loss_with_several_positives_in_float32_is_that_of_plain_loops_in_float64(seed, local):
    tau, gamma, samples = 0.3, 0.4, 8
    features = make_features(samples, seed)
    views = [*features, *make_features(samples, seed + 100)[:local]]
    objective = create_objective("decl", "unimodal", mixing="geometric", auxiliary="mean", tau=tau, gamma=gamma)
    state = make_state(objective, samples, seed, unseen=0.0)
    expected = plain_geometric(views, features, tau, [2.0] * samples, state["sample/log_rate"].exp(), gamma)
    there = torch.autograd.grad(expected, views)

    narrow = [view.detach().float().requires_grad_() for view in views]
    state = {name: values.float() for name, values in state.items()}
    loss = objective(*narrow[:2], state, Progress(0, 10), local=narrow[2:]).loss
    assert abs(loss.item() - expected.item()) <= 1e-5 * abs(expected.item())
    for given, reference in zip(torch.autograd.grad(loss, narrow), there, strict=True):
        assert (given - reference).abs().max() <= 1e-4 * reference.abs().max()


def test_the_geometric_losss_auxiliary_is_drawn_from_gamma_2():
    tau, features = 0.5, [torch.eye(2, dtype=torch.float64) for _ in range(2)]
    # All similarities are 0 but the positives': each side has the mean of two U_i, log 1, and three of 1 / tau.
    means = torch.stack([
        loss_at(step, features, "bimodal", mixing="geometric", tau=tau) / 2 + 3 / tau for step in range(500)
    ])  # fmt: skip
    assert means.min() > 0
    assert means.mean().item() == pytest.approx(2, abs=4 * (2 / 4 / 500) ** 0.5)
    assert means.var().item() == pytest.approx(2 / 4, rel=0.25)
