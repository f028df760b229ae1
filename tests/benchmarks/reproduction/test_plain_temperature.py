"""CLIP with a plain temperature for every image and text: its loss, and where its temperatures go."""

import pytest
import torch
from torch.nn import functional as F

from thermopile.benchmarks.reproduction.plain_temperature import PlainTemperature, PlainTemperatureSettings
from thermopile.trainer.objectives import Progress

ETA = 0.01


@pytest.fixture
def step():
    """Return a function that makes a step at these temperatures: its features, loss and new state."""
    objective = PlainTemperature("bimodal", PlainTemperatureSettings(tau_init=0.2, eta=ETA)).double()
    torch.manual_seed(0)
    first, second = (F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1).requires_grad_() for _ in range(2))

    def step(**taus):
        state = {name: torch.full((6,), value, dtype=torch.float64) for name, value in objective.fields.items()}
        state |= {"visits": torch.zeros(6, dtype=torch.int64)} | {f"{side}/tau": tau for side, tau in taus.items()}
        return first, second, objective(first, second, state, Progress(0, 10))

    return step


def test_a_constant_temperature_gives_clips_loss_and_gradient(step):
    first, second, outcome = step()
    logits = first @ second.T / 0.2
    clip = (F.cross_entropy(logits, torch.arange(6)) + F.cross_entropy(logits.T, torch.arange(6))) / 2
    torch.testing.assert_close(outcome.loss, clip)
    for got, expected in zip(
        *(torch.autograd.grad(loss, [first, second]) for loss in (outcome.loss, clip)), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_each_temperature_goes_against_the_gradient_of_its_own_loss(step):
    """By differences of the loss; Adam's first step is as long as its learning rate."""
    _, _, before = step()
    for side in ("image", "text"):
        for sample in range(6):
            tau = torch.full((6,), 0.2, dtype=torch.float64)
            tau[sample] += 1e-6
            grows = step(**{side: tau})[2].loss > before.loss
            moved = before.state[f"{side}/tau"][sample] - 0.2
            assert float(moved) == pytest.approx(-ETA if grows else ETA, rel=1e-4)


def test_a_temperature_stays_above_its_bound():
    objective = PlainTemperature("bimodal", PlainTemperatureSettings(tau_init=0.2, eta=1.0))
    state = {name: torch.full((6,), value) for name, value in objective.fields.items()}
    aligned = torch.eye(6)  # each pair is nearest to itself, so that colder is better
    outcome = objective(aligned, aligned, state | {"visits": torch.zeros(6, dtype=torch.int64)}, Progress(0, 10))
    assert outcome.state["image/tau"].tolist() == pytest.approx([0.005] * 6)
