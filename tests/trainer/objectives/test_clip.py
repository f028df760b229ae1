"""What is CLIP's own: its logit scale. Its loss is held to plain autograd in test_plain_losses.py."""

import math

import pytest
import torch

from thermopile.trainer.objectives import create_objective

from support.objectives import START, make_features


def test_the_logit_scale_starts_at_one_over_seven_hundredths():
    objective = create_objective("clip")
    assert objective.log_logit_scale.item() == pytest.approx(math.log(1 / 0.07))
    assert [name for name, _ in objective.named_parameters()] == ["log_logit_scale"]


@pytest.mark.parametrize(("past", "bound"), [(9.0, math.log(100)), (-3.0, 0.0)])
def test_a_logit_scale_past_a_bound_is_moved_to_the_bound_before_it_is_used(past, bound):
    objective = create_objective("clip")
    parameter = objective.log_logit_scale
    with torch.no_grad():
        parameter.fill_(past)
    outcome = objective(*make_features(6), {}, START)
    assert objective.log_logit_scale is parameter
    assert parameter.item() == bound
    assert outcome.metrics["logit_scale"].item() == pytest.approx(math.exp(bound))


def test_at_a_bound_a_descent_step_outward_is_undone_and_one_inward_stays():
    alike, first = make_features(6)[0], make_features(6, seed=1)[0]
    for pairs, learned_past in (((alike, alike), True), ((first, alike), False)):
        objective = create_objective("clip", log_logit_scale=math.log(100))
        optimizer = torch.optim.SGD(objective.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            objective(*pairs, {}, START).loss.backward()
            optimizer.step()
        gradient = objective.log_logit_scale.grad.item()
        assert (gradient < 0) == learned_past
        objective(*pairs, {}, START)
        assert (objective.log_logit_scale.item() == math.log(100)) == learned_past


def test_it_counts_visits_where_given():
    objective, features = create_objective("clip"), make_features(3)
    assert objective(*features, {}, START).state == {}
    visits = objective(*features, {"visits": torch.tensor([0.0, 4.0, 2.0])}, START).state["visits"]
    assert visits.tolist() == [1.0, 5.0, 3.0]
