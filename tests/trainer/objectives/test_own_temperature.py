"""A temperature of one's own, from the public classes: examples/own_temperature.py is iSogCLR, bit for bit."""

import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.nn import functional as F

import thermopile
from thermopile import testing
from thermopile.trainer.objectives import Progress, create_objective

EXAMPLES = Path(__file__).parents[3] / "examples"
OWN = "own_temperature:Own"


class Unbounded(thermopile.IndividualTemperature):
    settings_of_mode: ClassVar = {"bimodal": thermopile.RobustSettings}

    def move(self, rows, gradient, progress):
        return {"tau": rows["tau"] + 1}


class Halved(Unbounded):
    def move(self, rows, gradient, progress):
        return {"tau": rows["tau"]}

    def loss(self, anchors, rows, progress):
        outcome = super().loss(anchors, rows, progress)
        return thermopile.Outcome((outcome.loss + outcome.loss.detach()) / 2, outcome.state, outcome.metrics)


class Unweighted(Halved):
    takes_weights = False


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, "wrong_temperature", sys.modules[__name__])


def run(objective, steps=4, keys=False, weighted=False):
    """Losses, gradients and states of some steps on the same rows."""
    state = {field: torch.full((12,), value) for field, value in objective.fields.items()}
    state["visits"] = torch.zeros(12, dtype=torch.uint32)
    found = []
    for number in range(steps):
        torch.manual_seed(number)
        views = [F.normalize(torch.randn(12, 8), dim=1).requires_grad_() for _ in range(2)]
        momentum = tuple(F.normalize(torch.randn(12, 8), dim=1) for _ in range(2)) if keys else None
        rows = state | ({"weight": torch.linspace(0.5, 1.5, 12)} if weighted else {})
        outcome = objective(*views, rows, Progress(number, 10), keys=momentum)
        found += [outcome.loss, *torch.autograd.grad(outcome.loss, views), *outcome.state.values()]
        state |= outcome.state
    return found


@pytest.mark.parametrize(
    ("mode", "frame"),
    [("bimodal", {}), ("bimodal", {"weighted": True}), ("unimodal", {}), ("unimodal", {"keys": True})],
)
def test_isogclr_from_the_public_classes_is_isogclr_bit_for_bit(mode, frame):
    same = {"rho": 2.0, "tau_init": 0.05, "tau_min": 0.005, "eta": 0.05, "grad_clip": 3.0}
    own, built_in = (run(create_objective(name, mode, **same), **frame) for name in (OWN, "isogclr"))
    assert len(own) > 20
    assert all(torch.equal(one, other) for one, other in zip(own, built_in, strict=True))


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_the_example_passes_the_check_of_temperatures(mode):
    testing.check_temperature(OWN, mode, rho=0.3, eta=0.2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unbounded", "step 1, image/tau leaves tau_min … tau_max"),
        ("Halved", "step 1, and state gradient 0 is"),
    ],
)
def test_a_temperature_that_is_wrong_is_told_what_is(name, said):
    with pytest.raises(AssertionError, match=said):
        testing.check_temperature(f"wrong_temperature:{name}", "bimodal")


def test_whether_weights_are_taken_is_inherited_unless_the_class_says_otherwise():
    create_objective("wrong_temperature:Halved", "bimodal").check_weights()
    with pytest.raises(ValueError, match="'wrong_temperature:Unweighted' takes no weights of samples"):
        create_objective("wrong_temperature:Unweighted", "bimodal").check_weights()
