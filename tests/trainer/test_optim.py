"""The learning rate as a pure function of the step, and who is spared weight decay."""

import math

import pytest
import torch
from torch import nn

from thermopile.trainer.config import OptimizerConfig
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import create_optimizer, learning_rate

CONFIG = OptimizerConfig(lr=0.5, warmup_steps=4)


def test_the_learning_rate_rises_linearly_to_its_highest_value():
    assert [learning_rate(CONFIG, step, 100) for step in range(5)] == [0.125, 0.25, 0.375, 0.5, 0.5]


def test_then_it_falls_as_a_cosine_towards_zero():
    assert learning_rate(CONFIG, 4 + 48, 100) == pytest.approx(0.25)
    assert learning_rate(CONFIG, 99, 100) == pytest.approx(0.25 * (1 - math.cos(math.pi / 96)))
    rates = [learning_rate(CONFIG, step, 100) for step in range(4, 100)]
    assert rates == sorted(rates, reverse=True)


def test_a_run_shorter_than_the_warm_up_only_rises():
    assert learning_rate(CONFIG, 1, 2) == 0.25


def test_weight_decay_spares_biases_norms_and_the_objectives_own_parameters():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 2))
    objective = create_objective("clip")
    optimizer = create_optimizer(OptimizerConfig(weight_decay=0.3), model, objective)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.3, "0.bias": 0, "1.weight": 0, "1.bias": 0, "2.weight": 0.3, "2.bias": 0,
    }  # fmt: skip
    assert decay[id(objective.log_logit_scale)] == 0


def test_an_objective_without_parameters_makes_no_empty_group():
    optimizer = create_optimizer(OptimizerConfig(), nn.Linear(2, 2), create_objective("isogclr"))
    assert all(isinstance(p, torch.Tensor) for group in optimizer.param_groups for p in group["params"])
    assert all(group["params"] for group in optimizer.param_groups)
