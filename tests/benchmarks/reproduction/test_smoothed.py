"""CLIP with label smoothing: without it, it is CLIP; and its scale stays where it is not learned."""

import pytest
import torch
from torch.nn import functional as F

from thermopile.benchmarks.reproduction.smoothed import SmoothedClip, SmoothedClipSettings
from thermopile.trainer.objectives import Progress, create_objective

START = Progress(0, 10)


@pytest.fixture
def features():
    torch.manual_seed(0)
    return [F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1).requires_grad_() for _ in range(2)]


def test_without_smoothing_it_is_clip(features):
    made = (
        SmoothedClip("bimodal", SmoothedClipSettings(log_logit_scale=1.4)),
        create_objective("clip", log_logit_scale=1.4),
    )
    found, expected = (objective(*features, {}, START).loss for objective in made)
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(loss, [*features, objective.log_logit_scale])
        for loss, objective in zip((found, expected), made, strict=True)
    ]
    for got, of_clip in zip(*gradients, strict=True):
        torch.testing.assert_close(got, of_clip)


def test_targets_are_smoothed_over_all_candidates(features):
    objective = SmoothedClip("bimodal", SmoothedClipSettings(log_logit_scale=1.4, label_smoothing=0.3))
    scores = (torch.e**1.4 * features[0] @ features[1].T).detach()
    of_sides = [-side.log_softmax(1) for side in (scores, scores.T)]
    expected = sum(0.7 * of_side.diag().mean() + 0.3 * of_side.mean() for of_side in of_sides) / 2
    assert objective(*features, {}, START).loss.item() == pytest.approx(expected.item())


def test_a_scale_that_is_not_learned_is_no_parameter_and_gives_the_same_loss(features):
    fixed, learned = (SmoothedClip("bimodal", SmoothedClipSettings(learned=learned)) for learned in (False, True))
    assert not list(fixed.parameters())
    assert fixed(*features, {}, START).loss == learned(*features, {}, START).loss
