"""What the estimator s is for: small batches whose gradient is that of the whole data.

Features are free parameters, and stay as they are. `pytest -s` prints the figures that stand in docs/figures.md.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from thermopile.trainer.objectives import Progress, create_objective

SAMPLES, BATCH, WIDTH, CLUSTERS = 512, 16, 32, 32
FULL = (40, 60)
"""Epochs in which s settles, and epochs over which a gradient is averaged."""
SHORT = (24, 48)


def make_dataset():
    """Unnormalised features [2, n, d]: clusters of 16 samples that are alike, pairs that are more alike still."""
    generator = torch.Generator().manual_seed(0)

    def noise(rows):
        return torch.randn(rows, WIDTH, generator=generator)

    sample = noise(CLUSTERS).repeat_interleave(SAMPLES // CLUSTERS, dim=0) + 0.6 * noise(SAMPLES)
    return torch.stack([sample + 0.4 * noise(SAMPLES) for _ in range(2)])


def step(objective, features, state, ids, epoch):
    """One step on the rows `ids`, whose new state replaces the old; gives the loss."""
    rows = {name: values[ids] for name, values in state.items()}
    outcome = objective(*F.normalize(features[:, ids], dim=2), rows, Progress(step=epoch, steps_per_epoch=1))
    for name, values in outcome.state.items():
        state[name][ids] = values
    return outcome.loss


def batches(epochs, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(SAMPLES, generator=generator).split(BATCH)


def new_state(objective):
    state = {name: torch.full((SAMPLES,), initial) for name, initial in objective.fields.items()}
    return state | ({"visits": torch.zeros(SAMPLES)} if state else {})


def mean_gradient(objective, state, ids_of_steps, epoch=0):
    """Mean over steps of the gradient in all features; a step reaches its own batch's rows alone."""
    features, steps = make_dataset().requires_grad_(), list(ids_of_steps)
    for ids in steps:
        (step(objective, features, state, ids, epoch) / len(steps)).backward()
    return features.grad


def settled_gradient(mode, tau, settling, measured):
    """With the s of a run whose gamma has fallen, as FastCLIP's does."""
    schedule = {"gamma_schedule": "cosine", "gamma_decay_epochs": settling * 3 // 4, "gamma_min": 0.05}
    objective, features = create_objective("sogclr", mode, tau=tau, **schedule), make_dataset()
    state = new_state(objective)
    with torch.no_grad():
        for number, ids in enumerate(batches(settling, seed=1)):
            step(objective, features, state, ids, number // (SAMPLES // BATCH))
    return mean_gradient(objective, state, batches(measured, seed=2), epoch=settling)


def memoryless_gradient(mode, tau, measured):
    objective = create_objective("sogclr", mode, tau=tau, gamma=1.0)
    return mean_gradient(objective, new_state(objective), batches(measured, seed=2))


def infonce_gradient(mode, tau, measured):
    """The gradient of clip or simclr in the scale of the global loss: times tau, and summed over the sides."""
    if mode == "bimodal":
        objective = create_objective("clip", mode, log_logit_scale=-math.log(tau))
        return 2 * tau * mean_gradient(objective, {}, batches(measured, seed=2))
    return tau * mean_gradient(create_objective("simclr", mode, tau=tau), {}, batches(measured, seed=2))


def full_data_gradient(mode, tau):
    """The global contrastive loss's: at gamma = 1, on all samples at once, the estimator is the inner value."""
    objective = create_objective("sogclr", mode, tau=tau, gamma=1.0)
    return mean_gradient(objective, new_state(objective), [torch.arange(SAMPLES)])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mode", "tau", "epochs"),
    [("bimodal", 0.1, SHORT)]
    + [
        pytest.param(mode, tau, FULL, marks=pytest.mark.soak) for mode in ("bimodal", "unimodal") for tau in (0.1, 0.05)
    ],
)
def test_a_settled_s_brings_sogclrs_gradient_closer_to_the_full_datas(mode, tau, epochs):
    settling, measured = epochs
    full = full_data_gradient(mode, tau)
    estimates = {
        "sogclr": settled_gradient(mode, tau, settling, measured),
        "gamma = 1": memoryless_gradient(mode, tau, measured),
        {"bimodal": "clip", "unimodal": "simclr"}[mode]: infonce_gradient(mode, tau, measured),
    }
    cosine, error = {}, {}
    for name, gradient in estimates.items():
        cosine[name] = F.cosine_similarity(gradient.flatten(), full.flatten(), dim=0).item()
        error[name] = ((gradient - full).norm() / full.norm()).item()
        print(f"{mode:8} tau {tau:<4} {name:9} cosine {cosine[name]:.3f}  norm error {error[name]:.3f}")
    for name in estimates.keys() - {"sogclr"}:
        assert 1 - cosine["sogclr"] < 0.5 * (1 - cosine[name])
        assert error["sogclr"] < 0.6 * error[name]
