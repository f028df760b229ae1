"""Clipping the gradients: their norm over all weights, under a loss scale, and in a run's log."""

import json
import math

import pytest
import torch
from torch import nn

from thermopile.trainer.config import OptimizerConfig
from thermopile.trainer.loop import Trainer
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import create_optimizer
from thermopile.trainer.precision import MixedPrecision
from thermopile.trainer.run_directory import RunDirectory

from support.runs import losses, small, train
from support.waits import no_waits

CPU = torch.device("cpu")
SGD = OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0)


def stepped(max_norm, scale=1.0, precision="float32", objective="clip"):
    """Let each weight and the temperature have the gradient 3; return the norm, and how far each moved at rate 1."""
    model, learner = nn.Linear(3, 5), create_objective(objective)
    optimizer, mixed = create_optimizer(SGD, model, learner, {}), MixedPrecision(precision, CPU)
    if mixed.scaler.is_enabled():
        mixed.scaler.load_state_dict(mixed.scaler.state_dict() | {"scale": scale})
    optimizer.set_learning_rate(1.0)
    parameters = [*model.parameters(), *learner.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    mixed.backward(sum(3 * parameter.sum() for parameter in parameters))
    norm = mixed.step(optimizer, max_norm)
    return norm, [old - new for old, new in zip(before, parameters, strict=True)], mixed


ALL = 3 * math.sqrt(3 * 5 + 5 + 1)
"""Norm over the weights, the biases and CLIP's logit scale."""


@pytest.mark.parametrize("precision", ["float32", "fp16"])
def test_gradients_are_clipped_over_the_encoders_and_the_objectives_parameters(precision):
    norm, moved, _ = stepped(0.5, scale=2.0**8, precision=precision)
    assert norm.item() == pytest.approx(ALL)
    for each in moved:
        torch.testing.assert_close(each, torch.full_like(each, 3 * 0.5 / ALL), rtol=1e-4, atol=0)


def test_smaller_gradients_are_left_as_they_are():
    norm, moved, _ = stepped(100.0)
    assert norm.item() == pytest.approx(ALL)
    unclipped = stepped(None)
    assert unclipped[0] is None
    for each, other in zip(moved, unclipped[1], strict=True):
        torch.testing.assert_close(each, other, rtol=1e-5, atol=1e-6)


def test_a_global_temperature_with_its_own_optimiser_is_left_out():
    norm, _, _ = stepped(0.5, objective="fastclip_v3")
    assert norm.item() == pytest.approx(3 * math.sqrt(3 * 5 + 5))


def test_clipping_reads_nothing_from_the_device():
    model = nn.Linear(3, 5)
    optimizer = create_optimizer(SGD, model, create_objective("isogclr"), {})
    model(torch.randn(4, 3)).sum().backward()
    with no_waits():
        optimizer.clip_gradients(0.5)


def test_a_step_that_fp16_skips_moves_nothing_and_its_norm_is_not_finite():
    norm, moved, mixed = stepped(0.5, scale=2.0**127, precision="fp16")
    assert not norm.isfinite()
    assert not any(each.any() for each in moved)
    assert mixed.scaler.get_scale() == 2.0**126


def test_a_run_logs_the_norm_and_null_for_a_step_that_fp16_skips(pairs_dataset, tmp_path):
    config = small(pairs_dataset, epochs=1, precision="fp16", optimizer={"grad_clip_norm": 0.5})
    run = RunDirectory(tmp_path / "run")
    with Trainer.open(config, run) as trainer:
        scaler = trainer.precision.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**40})
        trainer.train(
            lambda report: scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**8}),
            lambda: trainer.run.steps_done == 3,
        )
    first, *others = (json.loads(line)["gradient_norm"] for line in run.metrics_file.read_text().splitlines())
    assert first is None
    assert len(others) == 2
    assert all(norm > 0 for norm in others)


def test_a_norm_that_no_gradient_reaches_changes_no_loss(finished, pairs_dataset, tmp_path):
    run = train(small(pairs_dataset, optimizer={"grad_clip_norm": 1e6}), tmp_path / "run")
    assert losses(run) == losses(finished)
