"""The rivals compute what the objective computes: else their times would say nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from thermopile.tools.bench.objective.contenders import FASTCLIP, RIVALS
from thermopile.trainer.objectives import Progress, create_objective

VECTORS = Path(__file__).parents[3] / "data" / "vectors"
CASES = [
    entry
    for entry in json.loads((VECTORS / "index.json").read_text())
    if (entry["objective"], entry["mode"]) == ("isogclr", "bimodal")
]
SETTING_OF_KEY = {"clip": "grad_clip", "tau": "tau_init"}


def settings_of(entry):
    renamed = {SETTING_OF_KEY.get(key, key): value for key, value in entry["config"].items()}
    return create_objective(
        "isogclr", "bimodal", **{key: value for key, value in renamed.items() if key not in ("b1", "b2")}
    ).settings


def outputs(step, first, second, state):
    """Loss, feature gradients and new state of `step(first, second, state)`, by name."""
    first, second = (features.clone().requires_grad_() for features in (first, second))
    loss, new = step(first, second, state)
    loss.backward()
    return {"value": loss.detach(), "grad_first": first.grad, "grad_second": second.grad} | {
        f"new/{name}": values for name, values in new.items()
    }


def errors(given, reference):
    """max|given - reference| / max|reference| of each array of the reference, but for the counts."""
    return {
        name: float(np.abs(np.asarray(given[name]) - np.asarray(values)).max() / np.abs(np.asarray(values)).max())
        for name, values in reference.items()
        if name != "new/visits"
    }


@pytest.mark.parametrize(
    ("entry", "rival"),
    # In FastCLIP's path an s below 1e-35 counts as never seen, and the cold ones are far below.
    [(entry, rival) for entry in CASES for rival in RIVALS if (entry["case"], rival) != ("cold", FASTCLIP)],
    ids=lambda given: given if isinstance(given, str) else given["file"],
)
def test_a_rival_agrees_with_the_reference(entry, rival):
    arrays = np.load(VECTORS / entry["file"])
    arrays = {name.replace("first/", "image/").replace("second/", "text/"): array for name, array in arrays.items()}
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    state = {name.removeprefix("state/"): values for name, values in tensors.items() if name.startswith("state/")}
    given = outputs(
        lambda *inputs: RIVALS[rival](*inputs, settings_of(entry)), tensors["first"], tensors["second"], state
    )
    reference = {name: array for name, array in arrays.items() if name.startswith(("value", "grad_", "new/"))}
    assert {name: wrong for name, wrong in errors(given, reference).items() if not wrong <= 1e-9} == {}


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rival_agrees_with_the_objective_over_steps_in_float32(rival):
    objective = create_objective("isogclr", rho=3.0, tau_init=0.05, eps=1e-8)

    def ours(first, second, state):
        outcome = objective(first, second, state, Progress(0, 1))
        return outcome.loss, outcome.state

    torch.manual_seed(0)
    state = {path: torch.full((96,), value) for path, value in objective.fields.items()}
    state["visits"] = torch.zeros(96, dtype=torch.int64)
    for _ in range(3):
        first, second = (normalize(torch.randn(96, 16)) for _ in range(2))
        expected = outputs(ours, first, second, state)
        given = outputs(lambda *inputs: RIVALS[rival](*inputs, objective.settings), first, second, state)
        assert {name: wrong for name, wrong in errors(given, expected).items() if not wrong <= 1e-4} == {}
        assert given["new/visits"].tolist() == expected["new/visits"].tolist()
        state = {name.removeprefix("new/"): values for name, values in expected.items() if name.startswith("new/")}
