"""Every objective against the reference: inputs and outputs made by plain loops over anchors, in float64."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from thermopile.trainer.objectives import OBJECTIVES, Progress, create_objective

from support.objectives import PAPER

VECTORS = Path(__file__).parents[2] / "data" / "vectors"
CASES = [entry for entry in json.loads((VECTORS / "index.json").read_text()) if entry["objective"] in OBJECTIVES]
SETTINGS_OF_KEY = {"clip": ["grad_clip"], "tau": ["tau", "tau_init"], "which": ["mixing"]}


def error(given, reference):
    """max|given - reference| / max|reference|, the measure of the tolerances below."""
    return np.abs(given - reference).max() / np.abs(reference).max()


def arrays_of(entry):
    """The arrays of one case, by the program's names: the vectors call the sides of pairs first and second."""
    arrays = np.load(VECTORS / entry["file"])
    return {name.replace("first/", "image/").replace("second/", "text/"): array for name, array in arrays.items()}


def make_objective(entry):
    """The objective of one entry of the index, with those of its configuration's values that the objective knows."""
    known = OBJECTIVES[entry["objective"]].settings_of_mode[entry["mode"]].model_fields
    config = entry["config"]
    settings = {name: value for key, value in config.items() for name in SETTINGS_OF_KEY.get(key, [key])}
    settings |= PAPER | {"auxiliary": "mean", "betas": (config.get("b1"), config.get("b2"))}
    return create_objective(
        entry["objective"], entry["mode"], **{name: value for name, value in settings.items() if name in known}
    )


def errors_of(entry, dtype):
    """Error of each output array of one case, computed in `dtype`."""
    arrays = arrays_of(entry)
    tensors = {name: torch.tensor(array).to(dtype) for name, array in arrays.items()}
    objective = make_objective(entry).to(dtype)
    state = {name.removeprefix("state/"): value for name, value in tensors.items() if name.startswith("state/")}
    stateless = not state
    if stateless:  # the reference has no state where no step reads it
        state = {name: torch.zeros(len(tensors["first"]), dtype=dtype) for name in (*objective.fields, "visits")}
    views = {name: value for name, value in tensors.items() if name in ("first", "second") or name.startswith("local/")}
    first, second, *local = (view.requires_grad_() for view in views.values())
    keys = (tensors["key_first"], tensors["key_second"]) if "key_first" in tensors else None
    outcome = objective(first, second, state, Progress(step=0, steps_per_epoch=10), keys=keys, local=local)
    outcome.loss.backward()

    outputs = {"value": outcome.loss.detach()} | {f"grad_{name}": view.grad for name, view in views.items()}
    outputs |= {f"new/{name}": value for name, value in outcome.state.items() if name != "visits" and not stateless}
    outputs |= {f"grad_{name}": parameter.grad for name, parameter in objective.named_parameters()}
    assert all(value.dtype == dtype for value in outputs.values())
    assert outputs.keys() == {name for name in arrays if name.startswith(("value", "grad_", "new/"))}
    return {name: error(value.numpy(), arrays[name]) for name, value in outputs.items()}


def test_every_objective_without_a_plain_definition_has_vectors():
    covered = {(entry["objective"], entry["mode"]) for entry in CASES}
    known = {(name, mode) for name, objective in OBJECTIVES.items() for mode in objective.settings_of_mode}
    elsewhere = {("dcl", "unimodal"), ("dclw", "unimodal")}
    assert known - covered == elsewhere


@pytest.mark.parametrize("entry", CASES, ids=lambda entry: entry["file"])
def test_value_gradients_and_new_state_agree_with_the_reference_in_float64(entry):
    assert {name: wrong for name, wrong in errors_of(entry, torch.float64).items() if not wrong <= 1e-9} == {}


@pytest.mark.parametrize("entry", CASES, ids=lambda entry: entry["file"])
def test_value_gradients_and_new_state_agree_with_the_reference_in_float32(entry):
    tolerance = 1e-3 if entry["case"].startswith(("cold", "offset")) else 1e-4
    assert {name: wrong for name, wrong in errors_of(entry, torch.float32).items() if not wrong <= tolerance} == {}
