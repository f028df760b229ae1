"""The fast path beside `reference.py`, the algorithm as the paper writes it: losses, gradients, state, over steps."""

import pytest
import torch

from thermopile.trainer.objectives import Progress, create_objective
from thermopile.trainer.objectives.reference import isogclr_step

from support.objectives import make_features, run_step

SAMPLES, BATCH, STEPS = 40, 12, 6
SETTINGS = [{}, {"gamma": 1.0}, {"beta_u": 0.5, "rho": 0.4, "eta": 0.2, "grad_clip": 0.5}]


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "defaults")
def test_the_fast_path_makes_the_losses_gradients_and_state_of_the_reference(mode, settings):
    objective = create_objective("isogclr", mode, **settings)
    fast = {path: torch.full((SAMPLES,), value, dtype=torch.float64) for path, value in objective.fields.items()}
    plain = {path: values.clone() for path, values in fast.items()}
    fast["visits"] = torch.zeros(SAMPLES, dtype=torch.float64)
    for step in range(STEPS):  # a batch meets samples never seen and samples seen before
        ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]
        features = make_features(BATCH, seed=step)
        outcome, *gradients = run_step(
            objective, features, {path: rows[ids] for path, rows in fast.items()}, Progress(0, 1)
        )
        for path, values in outcome.state.items():
            fast[path][ids] = values
        loss = isogclr_step(*features, ids, plain, objective.settings)
        loss.backward()
        torch.testing.assert_close(outcome.loss, loss, rtol=1e-10, atol=1e-12)
        for side, gradient in zip(features, gradients, strict=True):
            torch.testing.assert_close(gradient, side.grad, rtol=1e-9, atol=1e-12)
    for path, values in plain.items():
        torch.testing.assert_close(fast[path], values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_the_reference_updates_the_rows_of_the_batch_alone(mode):
    objective = create_objective("isogclr", mode)
    state = {path: torch.full((SAMPLES,), value, dtype=torch.float64) for path, value in objective.fields.items()}
    before = {path: values.clone() for path, values in state.items()}
    isogclr_step(*make_features(BATCH), torch.arange(BATCH), state, objective.settings)
    for path, values in state.items():
        assert torch.equal(values[BATCH:], before[path][BATCH:])
        assert not torch.equal(values[:BATCH], before[path][:BATCH])
