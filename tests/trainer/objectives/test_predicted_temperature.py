"""A temperature that is a function of the features: examples/predicted_temperature.py."""

import sys
from pathlib import Path

import pytest
import torch

import thermopile
from thermopile import testing
from thermopile.trainer.objectives import create_objective

from support.objectives import START, make_features, make_state

PREDICTED = "predicted_temperature:Predicted"
CHOSEN = {"width": 16, "hidden": 5, "tau_min": 0.05, "tau_max": 0.5}


class Fixed(thermopile.IndividualTemperature):
    """iSogCLR's loss at temperatures that do not move."""

    settings_of_mode = {"bimodal": thermopile.RobustSettings, "unimodal": thermopile.RobustSettings}  # noqa: RUF012

    def move(self, rows, gradient, progress):
        self.gradient = gradient  # as the loss has it, clipped
        return {"tau": rows["tau"]}


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")
    monkeypatch.setitem(sys.modules, "fixed_temperature", sys.modules[__name__])


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_it_passes_the_check_of_objectives(mode):
    testing.check_objective(PREDICTED, mode, width=8)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("budget", [0, 300])
def test_features_get_isogclrs_gradient_and_the_network_that_of_its_temperatures(mode, budget):
    objective = create_objective(PREDICTED, mode, similarity_budget=budget, **CHOSEN).double()
    fixed = create_objective("fixed_temperature:Fixed", mode, rho=2.0, grad_clip=1e9, tau_init=0.1).double()
    (first, second), state = make_features(7), make_state(fixed, 7)
    with torch.no_grad():
        tau = objective.temperature({}, torch.stack([first, second]))
    given = {f"{side}/tau": values for side, values in zip(objective.sides, tau, strict=True)}
    expected = fixed(first, second, state | given, START)
    found = objective(first, second, state | given, START)
    torch.testing.assert_close(found.loss, expected.loss)
    views, networks = [first, second], list(objective.parameters())
    for here, there in zip(
        torch.autograd.grad(found.loss, views, retain_graph=True),
        torch.autograd.grad(expected.loss, views),
        strict=True,
    ):
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
    # iSogCLR eq 13: the derivative of the loss in tau_i is G_i / b.
    again = objective.temperature({}, torch.stack([first, second]).detach())
    of_networks = torch.autograd.grad(again, networks, fixed.gradient / 7)
    for here, there in zip(torch.autograd.grad(found.loss, networks), of_networks, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-12)
    for side, values in zip(objective.sides, tau, strict=True):
        torch.testing.assert_close(found.state[f"{side}/tau"], values)


def test_an_old_run_of_tempnet_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^objective 'tempnet' is no longer here: examples/predicted_temp.*began it$"):
        create_objective("tempnet")
