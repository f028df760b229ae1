"""AUC-CL's min-max problem, eq 5 to 7 of its paper, against plain loops in float64."""

import pytest
import torch

from thermopile.trainer.objectives import create_objective

from support.objectives import make_features, run_step

SAMPLES = 12
LEARNED = {"learn_a": True, "learn_alpha": True}


def plain_min_max(first, second, a, b, alpha):
    """Eq 7, its a(w) and b(w) being the variables a and b in the squares and the batch's means in the last term."""
    loss = 0
    for i in range(SAMPLES):
        positive = first[i] @ second[i]
        negatives = [first[i] @ second[j] for j in range(SAMPLES) if j != i]
        a3 = 2 * alpha * (1 - positive + sum(negatives)) - alpha**2
        loss = loss + (positive - a) ** 2 + sum((each - b) ** 2 for each in negatives) + a3
    return loss / SAMPLES


def error(given, reference):
    return ((given.double() - reference).abs().max() / reference.abs().max()).item()


@pytest.mark.parametrize("seed", range(8))
def test_value_and_gradients_in_float32_are_those_of_plain_loops_in_float64(seed):
    drawn = torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    a, b, alpha = (value.requires_grad_() for value in drawn)
    first, second = make_features(SAMPLES, seed)
    expected = plain_min_max(first, second, a, b, alpha)
    of_first, of_second, of_a, of_b, of_alpha = torch.autograd.grad(expected, [first, second, a, b, alpha])

    start = {"a": a.item(), "b": b.item(), "alpha": alpha.item()}
    objective = create_objective("auc_cl", "unimodal", **LEARNED, **start)
    features = [side.detach().float() for side in (first, second)]
    outcome, *gradients = run_step(objective, features, {})
    assert [name for name, _ in objective.named_parameters()] == ["a", "b", "alpha"]
    assert error(outcome.loss, expected) <= 1e-5
    # What an optimiser takes down the slope: alpha goes up it.
    for given, reference in zip(gradients, [of_first, of_second, of_a, of_b, -of_alpha], strict=True):
        assert error(given, reference) <= 1e-4


def test_descent_ends_at_the_means_and_at_the_margin_that_theorem_3_2_has():
    objective, features = create_objective("auc_cl", "unimodal", **LEARNED).double(), make_features(SAMPLES)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.08)
    for _ in range(150):
        outcome, *_ = run_step(objective, features, {})
        optimizer.step()
    similarities = (features[0] @ features[1].T).detach()
    positive = similarities.diagonal().mean()
    of_others = similarities.sum() / SAMPLES - positive
    found = torch.stack([objective.a, objective.b, objective.alpha]).detach()
    torch.testing.assert_close(found, torch.stack([positive, of_others / (SAMPLES - 1), 1 + of_others - positive]))
    assert outcome.metrics["alpha"].item() == pytest.approx(objective.alpha.item())
