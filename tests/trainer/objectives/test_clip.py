"""CLIP's loss beyond the reference vectors."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import Progress, create_objective

START = Progress(step=0, steps_per_epoch=10)


def make_features(samples, seed=0, noise=1.0):
    """Unit-norm rows of two sides, float64 [samples, 16]; the pairs are the more alike the smaller `noise`."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(samples, 16, generator=generator, dtype=torch.float64)
    second = first + noise * torch.randn(samples, 16, generator=generator, dtype=torch.float64)
    return [F.normalize(side, dim=1).requires_grad_() for side in (first, second)]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), samples=st.integers(2, 20), log_logit_scale=st.floats(0.01, 4.6))
def test_value_and_gradients_are_those_of_the_symmetric_cross_entropy(seed, samples, log_logit_scale):
    objective = create_objective("clip", log_logit_scale=log_logit_scale)
    first, second = make_features(samples, seed)
    outcome = objective(first, second, {}, START)
    given_gradients = torch.autograd.grad(outcome.loss, [first, second, objective.log_logit_scale])

    logits = objective.log_logit_scale.exp() * first @ second.T
    labels = torch.arange(samples)
    plain = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    expected = torch.autograd.grad(plain, [first, second, objective.log_logit_scale])
    torch.testing.assert_close(outcome.loss, plain, rtol=1e-10, atol=1e-12)
    for here, there in zip(given_gradients, expected, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-12)


def test_the_logit_scale_starts_at_one_over_seven_hundredths():
    objective = create_objective("clip")
    assert objective.log_logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    assert [name for name, _ in objective.named_parameters()] == ["log_logit_scale"]


@pytest.mark.parametrize(("past", "bound"), [(9.0, math.log(100)), (-3.0, 0.0)])
def test_a_logit_scale_past_a_bound_acts_as_the_bound(past, bound):
    beyond, at = create_objective("clip"), create_objective("clip")
    with torch.no_grad():
        beyond.log_logit_scale.fill_(past)
        at.log_logit_scale.fill_(bound)
    features = make_features(6)
    outcome = beyond(*features, {}, START)
    assert torch.equal(outcome.loss, at(*features, {}, START).loss)
    assert outcome.metrics["logit_scale"].item() == pytest.approx(math.exp(bound))


@pytest.mark.parametrize(
    ("past", "noise", "leads_back"),
    [
        (9.0, 3.0, True),  # pairs hardly alike: a lower scale is better
        (9.0, 0.01, False),  # pairs alike: a higher scale is better
        (-3.0, 0.01, True),
    ],
)
def test_past_a_bound_only_a_gradient_that_leads_back_is_learned(past, noise, leads_back):
    objective = create_objective("clip")
    with torch.no_grad():
        objective.log_logit_scale.fill_(past)
    objective(*make_features(6, noise=noise), {}, START).loss.backward()
    learned = objective.log_logit_scale.grad.item()
    assert (learned * past > 0) if leads_back else (learned == 0)


def test_it_has_no_fields_and_counts_visits_where_given():
    objective = create_objective("clip")
    assert objective.fields == {}
    features = make_features(3)
    assert objective(*features, {}, START).state == {}
    visits = objective(*features, {"visits": torch.tensor([0.0, 4.0, 2.0])}, START).state["visits"]
    assert visits.tolist() == [1.0, 5.0, 3.0]


def test_half_features_are_computed_in_float32_and_get_gradients_in_their_own_dtype():
    objective = create_objective("clip")
    first, second = (side.detach().to(torch.bfloat16).requires_grad_() for side in make_features(6))
    outcome = objective(first, second, {}, START)
    outcome.loss.backward()
    wide = objective(first.detach().float(), second.detach().float(), {}, START)
    assert outcome.loss.dtype == torch.float32
    assert torch.equal(outcome.loss, wide.loss)
    assert first.grad.dtype == second.grad.dtype == torch.bfloat16


def test_a_batch_of_one_is_refused():
    with pytest.raises(ValueError, match="batch of 1 sample"):
        create_objective("clip")(*make_features(1), {}, START)
