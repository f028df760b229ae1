"""What is FastCLIP's own: the Adam of every sample's temperature in version 2, the start and rate of a global one."""

import math

import pytest
import torch

from thermopile.trainer.objectives import Progress, create_objective
from thermopile.trainer.objectives.base import TemperatureRate

from support.objectives import log_mean, make_features, make_state, run_step

SAMPLES, BATCH = 9, 4


def temperature_gradient(objective, features, log_s, tau, log_mean):
    """G of every sample and side, [2, b], written out: log(eps + s') + rho - sum_j p_ij h_ij / tau_i, then clipped."""
    settings = objective.settings
    tau = tau.clone().requires_grad_()
    log_g = log_mean(*features, tau, "bimodal")
    (slope,) = torch.autograd.grad(log_g.sum(), tau)
    g = log_g.detach().exp()
    s = torch.where(log_s.isneginf(), g, (1 - settings.gamma) * log_s.exp() + settings.gamma * g) + settings.eps
    gradient = s.log() + settings.rho + g / s * tau.detach() * slope
    return gradient.clamp(-settings.grad_clip, settings.grad_clip)


def test_version_2_moves_every_temperature_as_an_adam_of_its_own_would():
    settings = {
        "eta": 0.003,
        "betas": (0.8, 0.95),
        "rho": 0.5,
        "grad_clip": 1.0,
        "tau_init": 0.05,
        "tau_min": 0.005,
        "tau_max": 0.06,
    }
    objective = create_objective("fastclip_v2", gamma_schedule="constant", **settings)
    state = {name: torch.full((SAMPLES,), value, dtype=torch.float64) for name, value in objective.fields.items()}
    state["visits"] = torch.zeros(SAMPLES, dtype=torch.float64)
    taus = [[torch.tensor(0.05, dtype=torch.float64, requires_grad=True) for _ in range(SAMPLES)] for _ in range(2)]
    adams = [[torch.optim.Adam([tau], lr=0.003, betas=(0.8, 0.95)) for tau in side] for side in taus]
    generator, sizes, at_ceiling = torch.Generator().manual_seed(0), [], 0
    for step in range(25):
        # Low ids come more often than high ones.
        ids = torch.multinomial(torch.linspace(1, 0.1, SAMPLES), BATCH, generator=generator)
        features = [side.detach() for side in make_features(BATCH, seed=step)]
        rows = {name: values[ids] for name, values in state.items()}
        old_tau = torch.stack([rows["image/tau"], rows["text/tau"]])
        log_s = torch.stack([rows["image/log_s"], rows["text/log_s"]])
        gradients = temperature_gradient(objective, features, log_s, old_tau, log_mean)
        new = objective(*features, rows, Progress(step, 3)).state
        for name, values in new.items():
            state[name][ids] = values
        for side, of_side in enumerate(gradients):
            for number, gradient in zip(ids.tolist(), of_side, strict=True):
                taus[side][number].grad = gradient
                adams[side][number].step()
                with torch.no_grad():
                    taus[side][number].clamp_(0.005, 0.06)
                at_ceiling += taus[side][number].item() == 0.06
                sizes.append(gradient.abs().item())
    for side, name in enumerate(("image", "text")):
        torch.testing.assert_close(state[f"{name}/tau"], torch.stack(taus[side]).detach(), rtol=1e-10, atol=0)
    assert state["visits"].unique().numel() > 2
    assert 0 < sum(size == 1.0 for size in sizes) < len(sizes)
    assert at_ceiling > 0


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.999), (0.999999999, 0.999999999)])
def test_corrections_of_version_2_are_exact_in_float32_for_any_betas(betas):
    objective = create_objective("fastclip_v2", betas=betas, eta=0.01)
    features, state = make_features(6), make_state(objective, 6)
    wide, narrow = (
        run_step(objective, [side.detach().to(dtype) for side in features], {n: v.to(dtype) for n, v in state.items()})[
            0
        ]
        for dtype in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(narrow.state["image/tau"].double(), wide.state["image/tau"], rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "start", "floor"), [("fastclip_v0", 0.03, None), ("fastclip_v3", 0.07, 0.03)])
@pytest.mark.parametrize(("scale", "parameter"), [("log", "log_tau"), ("plain", "tau")])
def test_a_global_temperature_starts_as_in_the_paper_and_is_learned_on_its_scale(name, start, floor, scale, parameter):
    objective = create_objective(name, tau_scale=scale, eta=0.5)
    ((found, value),) = objective.named_parameters()
    scaled = {"log": math.log, "plain": float}[scale]
    assert (found, value.item()) == (parameter, scaled(start))
    assert objective.temperature_rate == TemperatureRate(0.5, floor and scaled(floor))
    assert create_objective("fastclip_v0").temperature_rate is None, "it is learned at the encoders' rate"


@pytest.mark.parametrize("name", ["fastclip_v0", "fastclip_v3"])
def test_on_both_scales_the_loss_is_the_same_and_the_gradient_is_that_of_the_scale(name):
    plain, log = (create_objective(name, tau=0.2, tau_scale=scale) for scale in ("plain", "log"))
    features, state = make_features(5), make_state(plain, 5)
    outcome, *_, gradient = run_step(plain, features, state)
    of_log, *_, gradient_of_log = run_step(log, features, state)
    assert outcome.metrics["tau"] == of_log.metrics["tau"] == pytest.approx(0.2)
    torch.testing.assert_close(of_log.loss, outcome.loss)
    torch.testing.assert_close(gradient_of_log, 0.2 * gradient)
    for metrics in (outcome.metrics, of_log.metrics):
        torch.testing.assert_close(metrics["tau_gradient"], gradient, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["fastclip_v0", "fastclip_v3"])
@pytest.mark.parametrize("scale", ["log", "plain"])
def test_a_global_temperature_is_kept_within_the_bounds_of_the_authors_code(name, scale):
    for end in (0.01, 1.0):
        objective = create_objective(name, tau=end, tau_scale=scale)
        with torch.no_grad():
            next(objective.parameters()).add_(-1.0 if end < 1 else 1.0)
            objective.project()
        assert objective.temperature({"log_s": torch.zeros(2, 1)}, torch.zeros(1)).unique().item() == pytest.approx(end)


@pytest.mark.parametrize("name", ["fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3"])
def test_by_name_gamma_falls_from_1_over_half_of_the_runs_epochs(name):
    settings = create_objective(name).settings
    gammas = [settings.gamma_at(Progress(10 * epoch, 10, epochs=8)) for epoch in (0, 2, 4, 7)]
    assert gammas == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert settings.gamma_at(Progress(0, 10)) == 1.0
    constant = create_objective(name, gamma_schedule="constant", gamma=0.6).settings
    assert constant.gamma_at(Progress(0, 10, epochs=8)) == 0.6


def test_epochs_of_a_cosine_without_one_are_refused():
    with pytest.raises(ValueError, match="gamma_decay_epochs is of a cosine: set gamma_schedule to 'cosine'"):
        create_objective("sogclr", gamma_decay_epochs=3)


def test_version_1_makes_the_step_of_sogclr():
    ours, sogclr = (
        create_objective(name, tau=0.1, eps=1e-3, gamma=0.4, gamma_schedule="constant")
        for name in ("fastclip_v1", "sogclr")
    )
    features, state = make_features(6), make_state(ours, 6)
    (outcome, *gradients), (other, *others) = run_step(ours, features, state), run_step(sogclr, features, state)
    assert torch.equal(outcome.loss, other.loss)
    assert all(torch.equal(outcome.state[name], other.state[name]) for name in other.state)
    assert all(torch.equal(here, there) for here, there in zip(gradients, others, strict=True))
