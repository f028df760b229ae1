"""What is iSogCLR's own, in both modes, beyond the reference vectors."""

import math

import pytest
import torch

from thermopile.pipeline.dataset.index import Content
from thermopile.trainer.objectives import Progress, create_objective

from support.objectives import START, log_mean, make_features, make_state, run_step

MODES = ["bimodal", "unimodal"]
NEVER_SEEN = -math.inf


@pytest.mark.parametrize("mode", MODES)
def test_temperature_gradient_at_gamma_one_is_the_derivative_of_the_robust_loss(mode):
    objective = create_objective("isogclr", mode, gamma=1.0, rho=0.7, beta_u=1.0, grad_clip=1e9)
    features, state = make_features(6), make_state(objective, 6)
    outcome, *_ = run_step(objective, features, state)
    tau = torch.stack([state[f"{side}/tau"] for side in objective.sides]).requires_grad_()
    log_g = log_mean(*(side.detach() for side in features), tau, mode)
    if mode == "unimodal":
        log_g = log_g.exp().mean(0).log()
    (tau * (log_g + 0.7)).sum().backward()
    for side, gradient in zip(objective.sides, tau.grad, strict=True):
        torch.testing.assert_close(outcome.state[f"{side}/u"], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_scale_saves_float16_gradients_that_would_vanish(mode):
    objective = create_objective("isogclr", mode)
    features, state = make_features(9, dtype=torch.float16), make_state(objective, 9, dtype=torch.float32, unseen=0.0)
    for side in objective.sides:
        state[f"{side}/log_s"] = torch.full((9,), 22.0)
    _, unscaled, _ = run_step(objective, features, state)
    (objective(*features, state, START).loss * 2.0**20).backward()
    assert unscaled.count_nonzero() == 0
    _, wide, _ = run_step(objective, [side.to(torch.float32) for side in features], state)
    torch.testing.assert_close(features[0].grad, (wide * 2.0**20).half(), rtol=0, atol=0)
    assert features[0].grad.count_nonzero() > 0


def test_a_new_sample_has_no_estimate_the_starting_temperature_and_no_momentum():
    bimodal = create_objective("isogclr", "bimodal", tau_init=0.03)
    unimodal = create_objective("isogclr", "unimodal", tau_init=0.4)
    assert bimodal.fields == {
        "image/log_s": NEVER_SEEN, "image/tau": 0.03, "image/u": 0.0,
        "text/log_s": NEVER_SEEN, "text/tau": 0.03, "text/u": 0.0,
    }  # fmt: skip
    assert unimodal.fields == {"sample/log_s": NEVER_SEEN, "sample/tau": 0.4, "sample/u": 0.0}


@pytest.mark.parametrize("mode", MODES)
def test_metrics_describe_the_new_temperatures_and_the_share_of_unseen_samples(mode):
    objective = create_objective("isogclr", mode)
    features, state = make_features(10), make_state(objective, 10)
    outcome, *_ = run_step(objective, features, state)
    for side in objective.sides:
        tau = outcome.state[f"{side}/tau"]
        assert outcome.metrics[f"{side}/tau_mean"] == tau.mean()
        assert outcome.metrics[f"{side}/tau_lowest"] == tau.min()
        assert outcome.metrics[f"{side}/tau_highest"] == tau.max()
        assert outcome.metrics[f"{side}/log_s_mean"] == outcome.state[f"{side}/log_s"].mean()
        unseen = (state[f"{side}/log_s"] == NEVER_SEEN).sum().item() / 10
        assert outcome.metrics[f"{side}/share_unseen"].item() == pytest.approx(unseen)
        assert outcome.metrics[f"{side}/tau_gradient_mean_abs"] > 0
    assert all(figure.shape == () for figure in outcome.metrics.values())


def test_cosine_schedules_give_the_steps_of_their_constant_values():
    schedules = {
        "gamma_schedule": "cosine",
        "gamma_decay_epochs": 2,
        "gamma_min": 0.4,
        "eta": 0.02,
        "eta_min": 0.01,
        "eta_decay_epochs": 2,
    }
    scheduled = create_objective("isogclr", **schedules)
    features, state = make_features(6), make_state(scheduled, 6)
    for epoch, gamma, eta in ((0, 1.0, 0.02), (1, 0.7, 0.015), (2, 0.4, 0.01), (9, 0.4, 0.01)):
        constant, *_ = run_step(create_objective("isogclr", gamma=gamma, eta=eta), features, state)
        outcome, *_ = run_step(scheduled, features, state, Progress(step=10 * epoch + 9, steps_per_epoch=10))
        for name, values in constant.state.items():
            torch.testing.assert_close(outcome.state[name], values, rtol=1e-13, atol=0)


SETTINGS = [("isogclr", "bimodal"), ("isogclr", "unimodal"), ("fastclip_v2", "bimodal")]


@pytest.mark.parametrize(("name", "mode"), SETTINGS)
def test_a_trust_region_bounds_the_factor_of_a_step_and_leaves_small_steps(name, mode):
    bounds = {"tau_min": 1e-4, "tau_max": 100.0, "tau_init": 0.05}
    free, held = (create_objective(name, mode, eta=0.02, tau_step=step, **bounds) for step in (None, 0.1))
    features, state = make_features(40), make_state(held, 40)
    freely, within = run_step(free, features, state)[0], run_step(held, features, state)[0]
    for side in held.sides:
        tau = state[f"{side}/tau"]
        asked = (freely.state[f"{side}/tau"] - tau) / tau
        factor = within.state[f"{side}/tau"] / tau
        torch.testing.assert_close(factor.log(), asked.clamp(-0.1, 0.1))
        assert (asked.abs() > 0.1).any()
    others = [name for name in within.state if not name.endswith("tau")]
    assert all(torch.equal(within.state[name], freely.state[name]) for name in others)


@pytest.mark.parametrize(("name", "mode"), SETTINGS)
def test_a_trust_region_keeps_the_bounds_of_tau(name, mode):
    objective = create_objective(name, mode, eta=0.5, tau_step=5.0, tau_min=0.04, tau_init=0.05, tau_max=0.06)
    features, state = make_features(40), make_state(objective, 40)
    for side in objective.sides:
        state[f"{side}/tau"].clamp_(0.04, 0.06)
        tau = run_step(objective, features, state)[0].state[f"{side}/tau"]
        assert tau.min() >= 0.04
        assert tau.max() <= 0.06


@pytest.mark.parametrize("mode", MODES)
def test_anchors_whose_s_is_far_above_this_batch_are_silent(mode):
    objective = create_objective("isogclr", mode)
    features, state = make_features(10), make_state(objective, 10, unseen=0.0)
    for side in objective.sides:
        state[f"{side}/log_s"][:3] = 60.0
    outcome, *_ = run_step(objective, features, state)
    for side in objective.sides:
        assert outcome.metrics[f"{side}/share_silent"].item() == pytest.approx(0.3)


@pytest.mark.parametrize(("name", "mode", "of_captions"), [
    ("isogclr", "bimodal", 1), ("fastclip_v2", "bimodal", 1), ("isogclr", "unimodal", 0),
])  # fmt: skip
def test_a_caption_or_picture_of_more_than_exp_minus_rho_of_all_samples_is_warned_of(name, mode, of_captions):
    objective = create_objective(name, mode, rho=2.0)  # exp(-2) = 13.5 %
    counted = {"samples": 1_000, "sharing_captions": 200, "caption_sample": 17, "copies": 200, "blank": 0}
    below = Content(**counted, with_caption=135, most_copied=135)
    assert objective.advice_on_repeats(below) == []
    captions = objective.advice_on_repeats(below.model_copy(update={"with_caption": 136}))
    assert len(captions) == of_captions
    for advice in captions:
        assert "13.6% of the dataset's samples have the caption of sample 17, more than exp(-rho) = 13.5%" in advice
        assert "To change that, give different pictures captions of their own, or set objective.rho below" in advice
        assert advice.endswith(" = 2.00")
    (pictures,) = objective.advice_on_repeats(below.model_copy(update={"most_copied": 190}))
    assert pictures.startswith("19.0% of the dataset's samples have the same picture, ")
    assert pictures.endswith("then `curate --thin`), or set objective.rho below log(1/share) = 1.66")
    (all_of_them,) = objective.advice_on_repeats(below.model_copy(update={"most_copied": 1_000}))
    assert "objective.rho" not in all_of_them


def test_a_dataset_without_repeats_gives_no_warning_however_large_rho_is():
    nothing = Content(
        samples=1_000, sharing_captions=0, with_caption=0, caption_sample=0, copies=0, most_copied=0, blank=0
    )
    assert create_objective("isogclr", "bimodal", rho=16.0).advice_on_repeats(nothing) == []
