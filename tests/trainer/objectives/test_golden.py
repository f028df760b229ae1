"""Loss, gradients and new rows of every objective, in float64, as a released version had them; and gradcheck.

To write data/golden_steps.npz anew: delete it and run this file twice.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from thermopile.trainer.objectives import OBJECTIVES, Progress

from support.objectives import (
    FRAMED,
    PLAIN,
    START,
    Frame,
    keys_of,
    local_of,
    make_features,
    make_objective,
    make_state,
    run_step,
)

GOLDEN = Path(__file__).parents[2] / "data" / "golden_steps.npz"
LATER = Progress(step=13, steps_per_epoch=10)
KEYS, LOCAL = Frame(keys=True), Frame(local=2)
FURTHER = [
    ("sogclr", "bimodal", PLAIN, {"doubt_after": 1, "eps": 0.1}),
    ("isogclr", "bimodal", PLAIN, {"doubt_after": 1, "tau_step": 0.01}),
    ("isogclr", "unimodal", KEYS, {"gamma_schedule": "cosine", "gamma_decay_epochs": 3, "eta_decay_epochs": 3}),
    ("fastclip_v0", "bimodal", PLAIN, {"doubt_after": 1}),
    ("clip", "bimodal", PLAIN, {"doubt_after": 1}),
    ("decl", "bimodal", PLAIN, {"doubt_after": 1}),
    ("decl", "bimodal", PLAIN, {"mixing": "decay", "t0": 5.0}),
    ("decl", "unimodal", PLAIN, {"mixing": "loss2"}),
    ("decl", "unimodal", KEYS, {"rate": "momentum"}),
    ("decl", "unimodal", PLAIN, {"auxiliary": "sample"}),
    ("decl", "bimodal", PLAIN, {"similarity": "distance"}),
    ("decl", "unimodal", PLAIN, {"mixing": "geometric", "auxiliary": "sample"}),
    ("simclr", "unimodal", PLAIN, {"similarity": "distance"}),
    ("auc_cl", "unimodal", PLAIN, {"views": "all", "negatives": "weighted", "similarity": "shifted", "a": 10.0}),
    ("auc_cl", "unimodal", Frame(True, 2), {"negatives": "weighted", "p": 3.0, "learn_b": False}),
    ("auc_cl", "unimodal", PLAIN, {"learn_a": True, "learn_alpha": True}),
    ("spectral", "unimodal", PLAIN, {"mu": 0.5}),
    ("spectral", "unimodal", PLAIN, {"mu": 2.0}),
]
STEPS = [(*case, {}) for case in FRAMED] + FURTHER
DEFAULTS = {("isogclr", "bimodal"): {"rho": 2.0, "eta": 0.01}, ("fastclip_v2", "bimodal"): {"rho": 2.0}}
"""What was the default when the file was written."""
HELD = ("flatnce", "simco", "dclw")
"""Objectives whose gradient is not that of their value even if s is the batch's own g: they hold weights constant."""


def name_of(step):
    name, mode, frame, settings = step
    return f"{name}-{mode}{frame}" + "".join(
        f"-{key}={value}" for key, value in settings.items() if key != "gamma_schedule"
    )


def numbers_of(step, weighted, dtype=torch.float64):
    """Loss, gradients of features and parameters, and new rows, one after the other."""
    name, mode, frame, settings = step
    settings = settings | DEFAULTS.get((name, mode), {})
    objective = make_objective(name, mode, frame, auxiliary=settings.get("auxiliary", "mean"), **{
        key: value for key, value in settings.items() if key != "auxiliary"
    })  # fmt: skip
    features, state = make_features(6, seed=5, dtype=dtype), make_state(objective, 6, seed=5, dtype=dtype)
    if settings.get("similarity") == "distance":
        features = [3 * side for side in features]
    if weighted:
        state["weight"] = torch.linspace(0, 2, 6, dtype=dtype)
    outcome, *gradients = run_step(objective, features, state, LATER)
    parts = [outcome.loss, *(each for each in gradients if each is not None), *outcome.state.values()]
    return torch.cat([part.detach().double().flatten() for part in parts]).numpy()


CASES = [(step, weighted) for step in STEPS for weighted in (False, True)[: 1 + OBJECTIVES[step[0]].takes_weights]]
NAMES = [f"{name_of(step)}{', weighted' * weighted}" for step, weighted in CASES]


def golden():
    if not GOLDEN.exists():
        np.savez_compressed(GOLDEN, **{name: numbers_of(*case) for name, case in zip(NAMES, CASES, strict=True)})
        pytest.fail(f"wrote {GOLDEN}; run this again")
    return np.load(GOLDEN)


@pytest.mark.parametrize(("step", "weighted"), CASES, ids=NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)
def test_a_step_is_that_of_the_golden_file(step, weighted, dtype, tolerance):
    expected = golden()[f"{name_of(step)}{', weighted' * weighted}"]
    found = numbers_of(step, weighted, dtype)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_the_golden_file_has_no_other_steps():
    assert set(golden().files) == set(NAMES)


@pytest.mark.parametrize("case", [case for case in FRAMED if case[0] not in HELD], ids=str)
@pytest.mark.parametrize("budget", [0, 300])
def test_the_gradient_is_the_slope_of_the_value(case, budget):
    objective = make_objective(*case, gamma=1.0, tau=0.3, mixing="loss2", similarity_budget=budget)
    state = make_state(objective, 4)
    first, second = make_features(4, columns=5)  # each number is moved to and fro: few of them
    objective.check_values = lambda *views, **how: None  # gradcheck moves features off the sphere
    own = list(objective.parameters())

    keys = keys_of(case[2], first, second)  # constants

    def value(first, second, *own):
        local = local_of(case[2], first, second)
        return objective(first, second, state, START, keys=keys, local=local).loss

    assert torch.autograd.gradcheck(value, (first, second, *own), atol=1e-6, rtol=1e-4)
