"""Objectives on features of any norm: against their losses written out plainly, far from 0, and where rows coincide."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import create_objective
from thermopile.trainer.objectives import pairs as pairs_module

from support.objectives import run_step

COLUMNS = ["barlow_twins-unimodal", "vicreg-unimodal"]
DISTANCES = ["simclr-unimodal", "decl-unimodal", "decl-bimodal"]
RAW = [*COLUMNS, "spectral-unimodal", *DISTANCES]


def make_raw(case, **chosen):
    """The objective of a case of RAW, by distance where it has the choice."""
    name, mode = case.split("-")
    if case in DISTANCES:
        chosen["similarity"] = "distance"
    if name == "decl":
        chosen["auxiliary"] = "mean"
    return create_objective(name, mode, **chosen)


def make_features(samples, seed=0, dtype=torch.float64, scale=1.0):
    """Rows [samples, 7] of two sides whose columns differ in width, of which pairs are alike."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(samples, 7, generator=generator, dtype=torch.float64)
    second = first + torch.randn(samples, 7, generator=generator, dtype=torch.float64)
    widths = scale * torch.linspace(0.4, 1.5, 7, dtype=torch.float64)
    return [(side * widths).to(dtype).requires_grad_() for side in (first, second)]


def plain_barlow_twins(objective, first, second):
    chosen = objective.settings
    normalised = [F.batch_norm(side, None, None, training=True, eps=chosen.eps) for side in (first, second)]
    c = normalised[0].T @ normalised[1] / len(first)
    return (1 - c.diagonal()).square().sum() + chosen.redundancy * (c.square().sum() - c.diagonal().square().sum())


def plain_vicreg(objective, first, second):
    chosen, loss = objective.settings, objective.settings.invariance * F.mse_loss(first, second)
    for side in (first, second):
        covariances = torch.cov(side.T)
        missing = F.relu(1 - (covariances.diagonal() + chosen.eps).sqrt())
        apart = covariances.square().sum() - covariances.diagonal().square().sum()
        loss = loss + chosen.variance * missing.mean() / 2 + chosen.covariance * apart / side.shape[1]
    return loss


def plain_spectral(objective, first, second):
    mu, samples = objective.settings.mu, len(first)
    shortened = [math.sqrt(mu) * F.normalize(side, dim=1) for side in (first, second)]
    inside = [side.square().sum(1, keepdim=True) < mu for side in (first, second)]
    first, second = (torch.where(*sides) for sides in zip(inside, (first, second), shortened, strict=True))
    products = first @ second.T
    apart = products.square().sum() - products.diagonal().square().sum()
    return (apart / (samples * (samples - 1)) - 2 * products.diagonal().mean()) / mu


def distance_exponents(objective, first, second):
    """-|x - y| / tau of the positives, [b], and of every anchor's negatives, [2, b, negatives]."""

    def similarities(anchors, others):
        return -(anchors[:, None] - others).norm(dim=2) / objective.settings.tau

    samples = len(first)
    others = ~torch.eye(samples, dtype=torch.bool)
    across = similarities(first, second)
    negatives = [across[others].view(samples, -1), across.T[others].view(samples, -1)]
    if len(objective.sides) == 1:
        within = [(side[:, None] - side)[others].norm(dim=1).view(samples, -1) for side in (first, second)]
        negatives = [
            torch.cat([rows, -of_side / objective.settings.tau], 1)
            for rows, of_side in zip(negatives, within, strict=True)
        ]
    return across.diagonal(), torch.stack(negatives)


def plain_simclr(objective, first, second):
    positive, negatives = distance_exponents(objective, first, second)
    return (torch.logaddexp(negatives.logsumexp(2), positive) - positive).mean()


def plain_decl(objective, first, second):
    """Rows of samples never seen, so that the rate is the batch's own mean."""
    positive, negatives = distance_exponents(objective, first, second)
    one = {"loss1": 1.0, "loss2": 0.0}[objective.settings.mixing]
    log_r = negatives.logsumexp(2)  # r itself may underflow; its factor of 1 / negatives falls out
    log_r = log_r if len(objective.sides) == 2 else log_r.logsumexp(0, keepdim=True)
    of_sides = one * ((log_r - log_r.detach()).exp() - positive).mean(1).sum()
    loss2 = (negatives.logsumexp(2) - positive).mean(1)
    return of_sides + (1 - one) * (loss2.sum() if len(objective.sides) == 2 else loss2.mean())


PLAIN = {
    "barlow_twins": plain_barlow_twins,
    "vicreg": plain_vicreg,
    "spectral": plain_spectral,
    "simclr": plain_simclr,
    "decl": plain_decl,
}


def unseen(objective, samples, dtype=torch.float64):
    state = {path: torch.full((samples,), initial, dtype=dtype) for path, initial in objective.fields.items()}
    return state | ({"visits": torch.zeros(samples, dtype=dtype)} if state else {})


@pytest.mark.parametrize("case", RAW)
@settings(max_examples=15)
@given(
    data=st.data(),
    seed=st.integers(0, 2**31),
    samples=st.integers(2, 9),
    scale=st.sampled_from([0.01, 0.3, 1.0, 30.0]),
    budget=st.sampled_from([0, 1, 150]),
    piece=st.sampled_from([1, 11, 2**18]),
)
def test_value_and_gradients_are_autograds_of_the_plain_loss_at_any_norm_and_budget(
    case, data, seed, samples, scale, budget, piece
):
    # Wide ranges, which the trained values never have; mu has rows on both sides of it.
    drawn = {
        "barlow_twins": {"redundancy": st.floats(0, 2), "eps": st.floats(1e-6, 1)},
        "vicreg": {name: st.floats(0, 30) for name in ("invariance", "variance", "covariance")},
        "spectral": {"mu": st.sampled_from([0.5, 3.0, 20.0])},
        "simclr": {"tau": st.floats(0.1, 2)},
        "decl": {"tau": st.floats(0.1, 2), "mixing": st.sampled_from(["loss1", "loss2"])},
    }[case.split("-")[0]]
    chosen = {name: data.draw(values) for name, values in drawn.items()}
    objective, features = make_raw(case, similarity_budget=budget, **chosen), make_features(samples, seed, scale=scale)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pairs_module.PIECE, "cpu", piece)
        outcome, *gradients = run_step(objective, features, unseen(objective, samples))
    expected = PLAIN[case.split("-")[0]](objective, *features)
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-9, atol=1e-11)
    expected = torch.autograd.grad(expected, features)
    size = max(gradient.abs().max().item() for gradient in expected)
    for here, there in zip(gradients, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-10 * max(size, 1.0))


@pytest.mark.parametrize("case", RAW)
@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 2**31), samples=st.integers(2, 9))
def test_the_order_of_the_batch_does_not_matter(case, data, seed, samples):
    objective, features = make_raw(case), make_features(samples, seed)
    order = torch.tensor(data.draw(st.permutations(range(samples))))
    outcome, *gradients = run_step(objective, features, unseen(objective, samples))
    moved, *moved_gradients = run_step(objective, [side[order] for side in features], unseen(objective, samples))
    torch.testing.assert_close(moved.loss, outcome.loss, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(moved_gradients, [side[order] for side in gradients], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", [*COLUMNS, *DISTANCES])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)
def test_far_from_the_origin_the_step_is_the_same(case, dtype, rtol):
    objective = make_raw(case)
    # Multiples of 2^-10, which a float32 still holds beside 10,000.
    near = [(side.detach() * 1024).round() / 1024 for side in make_features(9)]
    far = [side + torch.linspace(-10_000, 10_000, 7).round() for side in near]
    here, *gradients = run_step(objective, [side.to(dtype) for side in far], unseen(objective, 9, dtype))
    there, *expected = run_step(objective, near, unseen(objective, 9))
    torch.testing.assert_close(here.loss.double(), there.loss, rtol=rtol, atol=0)
    for gradient, wanted in zip(gradients, expected, strict=True):
        assert (gradient - wanted).abs().max() <= rtol * wanted.abs().max()


@pytest.mark.parametrize("case", RAW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_rows_that_coincide_give_finite_numbers(case, dtype, offset):
    objective, (first, second) = make_raw(case), make_features(6, dtype=dtype)
    row = first.detach()[:1].repeat(6, 1) + offset
    some = torch.cat([row[:3], first.detach()[3:] + offset])
    for features in ([row, row], [some, some], [some, second.detach() + offset], [0 * row, 0 * row]):
        outcome, *gradients = run_step(objective, features, unseen(objective, 6, dtype))
        figures = (outcome.loss, *outcome.state.values(), *outcome.metrics.values(), *gradients)
        assert all(figure.isfinite().all() for figure in figures)


@pytest.mark.parametrize("case", DISTANCES)
def test_a_distance_of_zero_has_no_gradient(case):
    objective, (row, _) = make_raw(case), make_features(1)
    outcome, *gradients = run_step(objective, [row.repeat(4, 1), row.repeat(4, 1)], unseen(objective, 4))
    assert all((gradient == 0).all() for gradient in gradients)
    negatives = 3 if case.endswith("bimodal") else 6
    expected = {"simclr": math.log(1 + negatives), "decl": float(len(objective.sides))}[case.split("-")[0]]
    assert outcome.loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("case", DISTANCES)
def test_a_positive_much_closer_than_the_rest_has_its_exact_direction(case):
    objective = make_raw(case)
    first = make_features(5, dtype=torch.float32)[0].detach()
    second = first.clone()
    second[:, 2] += 2**-20  # a few units of float32's last place
    _, in_first, in_second = run_step(objective, [first, second], unseen(objective, 5, torch.float32))
    _, *expected = run_step(objective, [first.double(), second.double()], unseen(objective, 5))
    torch.testing.assert_close([in_first.double(), in_second.double()], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", RAW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_features_are_computed_in_float32(case, dtype):
    objective, features = make_raw(case), make_features(9, dtype=dtype)
    outcome, *gradients = run_step(objective, features, unseen(objective, 9, torch.float32))
    wide, *wide_gradients = run_step(
        objective, [side.float() for side in features], unseen(objective, 9, torch.float32)
    )
    assert torch.equal(outcome.loss, wide.loss)
    assert all(torch.equal(here, there.to(dtype)) for here, there in zip(gradients, wide_gradients, strict=True))


@pytest.mark.parametrize(("name", "first"), [("barlow_twins", 1.0), ("vicreg", 2.0)])
def test_metrics_tell_how_alike_views_are_or_how_wide_the_columns(name, first):
    same = first * torch.tensor([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    metrics = run_step(create_objective(name, "unimodal"), [same, same], {})[0].metrics
    expected = {"barlow_twins": {"correlation_mean": 1.0}, "vicreg": {"deviation_mean": 2 * math.sqrt(4 / 3)}}[name]
    expected["sample/likeness"] = -1 / 3  # the samples' mean is 0
    assert {metric: value.item() for metric, value in metrics.items()} == pytest.approx(expected, rel=1e-4)
