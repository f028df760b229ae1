"""The learning rate as a pure function of the step, who is spared weight decay, and steps that go on bit for bit."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.config import OPTIMIZERS, ModelConfig, OptimizerConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import create_optimizer, learning_rate

CONFIG = OptimizerConfig(lr=0.5, warmup=4)


def rates(config, total, steps_per_epoch=10):
    return [learning_rate(config, step, steps_per_epoch, total) for step in range(total)]


def test_the_learning_rate_rises_linearly_to_its_highest_value():
    assert rates(CONFIG, 100)[:5] == [0.125, 0.25, 0.375, 0.5, 0.5]


def test_with_a_cooldown_it_stays_until_the_last_share_of_the_steps_and_falls_linearly_whatever_their_number():
    config = CONFIG.model_copy(update={"cooldown": 0.25, "lr_min": 0.1})
    seen = rates(config, 100)
    assert seen[3:76] == [0.5] * 73
    assert seen[75:100] == pytest.approx([0.5 - 0.4 * step / 25 for step in range(25)])
    assert rates(config, 200)[:76] == seen[:76]


@pytest.mark.parametrize("cooldown", [0.97, 1.0])
def test_a_cooldown_of_more_than_what_the_warm_up_leaves_begins_at_its_end_without_a_jump(cooldown):
    seen = rates(CONFIG.model_copy(update={"cooldown": cooldown}), 100)
    assert seen[3:100] == pytest.approx([0.5, *(0.5 * (1 - step / 96) for step in range(96))])


def test_then_it_falls_as_a_cosine_towards_zero():
    seen = rates(CONFIG, 100)
    assert seen[4 + 48] == pytest.approx(0.25)
    assert seen[99] == pytest.approx(0.25 * (1 - math.cos(math.pi / 96)))
    assert seen[4:] == sorted(seen[4:], reverse=True)


def test_the_cosine_ends_at_lr_min():
    config = OptimizerConfig(lr=0.5, lr_min=0.1, warmup=0)
    assert learning_rate(config, 0, 10, 100) == 0.5
    assert learning_rate(config, 50, 10, 100) == pytest.approx(0.3)
    assert learning_rate(config, 100, 10, 100) == pytest.approx(0.1)


@given(epochs=st.integers(0, 5), steps_per_epoch=st.integers(1, 50))
def test_a_warm_up_of_epochs_is_one_of_so_many_steps(epochs, steps_per_epoch):
    by_epochs = OptimizerConfig(warmup=f"{epochs} epochs")
    by_steps = OptimizerConfig(warmup=epochs * steps_per_epoch)
    assert rates(by_epochs, 300, steps_per_epoch) == rates(by_steps, 300, steps_per_epoch)


def test_a_run_shorter_than_the_warm_up_only_rises():
    assert learning_rate(CONFIG, 1, 2, 2) == 0.25


# Optimisers


class Weights(nn.Module):
    """Something of every kind: kernel, norm, matrix, biases."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 2))
        for parameter in self.parameters():
            nn.init.normal_(parameter)


DECAYED = {"layers.0.weight", "layers.2.weight"}


def some_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def moved_by_no_gradient(name, objective_name):
    model, objective = Weights(), create_objective(objective_name)
    optimizer = create_optimizer(OptimizerConfig(name=name, lr=0.1, weight_decay=0.3), model, objective)
    parameters = dict(model.named_parameters()) | dict(objective.named_parameters())
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {key for key, parameter in parameters.items() if not torch.equal(parameter, before[key])}


@pytest.mark.parametrize("objective", ["clip", "fastclip_v3", "isogclr"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_where_the_gradient_is_zero_only_kernels_and_matrices_decay(name, objective):
    assert moved_by_no_gradient(name, objective) == DECAYED


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_follows_its_gradient_once_the_rate_is_set(name):
    model, objective = Weights(), create_objective("clip")
    optimizer = create_optimizer(OptimizerConfig(name=name, lr=1.0, weight_decay=0.0), model, objective)
    parameters = [*model.parameters(), *objective.parameters()]
    optimizer.set_learning_rate(1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    steps = [(old - new).max().item() for old, new in zip(before, parameters, strict=True)]
    assert all(0 < step < 0.02 for step in steps)


@pytest.mark.parametrize("objective", ["clip", "fastclip_v3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_saved_and_loaded_goes_on_bit_for_bit(name, objective):
    model, objective = Weights(), create_objective(objective)
    optimizer = create_optimizer(OptimizerConfig(name=name, lr=1e-2), model, objective)

    def train(optimizer, model, objective, steps):
        for step in steps:
            optimizer.set_learning_rate(1e-2 / (1 + step))
            some_gradients([*model.parameters(), *objective.parameters()], step)
            optimizer.step()

    train(optimizer, model, objective, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other, other_objective = copy.deepcopy(model), copy.deepcopy(objective)
    resumed = create_optimizer(OptimizerConfig(name=name, lr=1e-2), other, other_objective)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(optimizer, model, objective, range(3, 6))
    train(resumed, other, other_objective, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(objective.parameters(), other_objective.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (("sgd", "clip"), "its optimiser is sgd without one for tau, but the settings have adamw with one for tau"),
        (("adamw", "clip"), "adamw without one for tau, but the settings have adamw with one for tau"),
        (None, "its optimiser is of an older format"),
    ],
)
def test_the_state_of_another_optimiser_is_refused(kept, message):
    if kept is None:
        state = torch.optim.AdamW(Weights().parameters()).state_dict()
    else:
        state = create_optimizer(OptimizerConfig(name=kept[0]), Weights(), create_objective(kept[1])).state_dict()
    optimizer = create_optimizer(OptimizerConfig(), Weights(), create_objective("fastclip_v3"))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_a_layer_decay_each_group_of_layers_learns_more_slowly_than_the_next(name):
    model = ModelConfig(dim=4, image={"name": "conv", "config": {"width": 2}}, text={"name": "mean_embedding"})
    tokenizer = TokenizerInfo(vocab_size=50, context_length=8, end_id=2)
    encoders, objective = Encoders.create(model, "bimodal", 16, tokenizer), create_objective("clip")
    optimizer = create_optimizer(OptimizerConfig(name=name), encoders, objective, encoders.learning_rate_factors(0.5))
    optimizer.set_learning_rate(8.0)
    rates = {id(p): group["lr"] for group in optimizer.weights.param_groups for p in group["params"]}
    found = {key.removesuffix(".weight"): rates[id(p)] for key, p in encoders.named_parameters() if p.ndim > 1}
    assert found == {
        "image.backbone.body.0": 1.0, "image.backbone.body.2": 2.0, "image.backbone.body.4": 4.0, "image.head": 8.0,
        "text.backbone.body.0.embedding": 2.0, "text.backbone.body.1": 4.0, "text.head": 8.0,
    }  # fmt: skip
    for key, p in encoders.named_parameters():
        assert rates[id(p)] == found.get(key.rpartition(".")[0], rates[id(p)]), key
    assert rates[id(objective.log_logit_scale)] == 8.0
    if name == "lamb":
        for group in optimizer.weights.param_groups:
            assert group.get("adam", False) == all(p.ndim < 2 for p in group["params"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_a_layer_decay_the_state_is_laid_out_as_without_the_setting(name):
    optimizer = create_optimizer(OptimizerConfig(name=name), Weights(), create_objective("clip"))
    groups = optimizer.weights.param_groups
    assert [[p.ndim for p in group["params"]] for group in groups] == [[4, 2], [1, 1, 1, 1], [0]]
    assert not any("lr_scale" in group for group in groups)


def test_lamb_takes_the_papers_step():
    """FastCLIP procedure 4, in a step so late that the means need no correction for their start."""
    weight = nn.Parameter(torch.randn(40, 30, generator=torch.Generator().manual_seed(0)))  # of norm 35
    model = nn.ParameterList([weight])
    config = OptimizerConfig(name="lamb", lr=1e-2, weight_decay=0.3, betas=(0.5, 0.9), eps=1e-6)
    optimizer = create_optimizer(config, model, create_objective("isogclr"))
    m = v = torch.zeros_like(weight)
    for step in range(400):
        some_gradients([weight], step)
        m, v = 0.5 * m + 0.5 * weight.grad, 0.9 * v + 0.1 * weight.grad**2
        before = weight.detach().clone()
        optimizer.step()
    ratio = m / (v.sqrt() + 1e-6) + 0.3 * before
    torch.testing.assert_close(weight.detach(), before - 1e-2 * before.norm() / ratio.norm() * ratio)


def test_lamb_moves_a_scalar_that_starts_at_zero():
    objective = create_objective("auc_cl", "unimodal")
    optimizer = create_optimizer(OptimizerConfig(name="lamb", lr=1e-3), Weights(), objective)
    for _ in range(20):
        objective.b.grad = torch.ones_like(objective.b)
        optimizer.step()
    assert objective.b < -0.02


# A global temperature


def taus(objective, starts, gradients, name="sgd", **settings):
    """The temperature after each of the gradients, all begun with its own start."""
    seen = []
    for start in starts:
        learner = create_objective(objective, tau=start, **settings)
        optimizer = create_optimizer(OptimizerConfig(name=name), nn.Linear(1, 1), learner)
        for gradient in gradients:
            learner.tau.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.set_learning_rate(123.0)  # the weights'
            optimizer.step()
        seen.append(learner.tau.item())
    return seen


def adamw(start, gradients, rate, betas=(0.9, 0.999)):
    """AdamW without decay, written out; rate: of tau."""
    tau, m, v = start, 0.0, 0.0
    for k, gradient in enumerate(gradients, 1):
        m, v = betas[0] * m + (1 - betas[0]) * gradient, betas[1] * v + (1 - betas[1]) * gradient**2
        step = m / (1 - betas[0] ** k) / (math.sqrt(v / (1 - betas[1] ** k)) + 1e-8)
        tau -= rate(tau) * step
    return tau


GRADIENTS = [0.3, -0.2, 0.5, 0.4, -0.9, -0.8]


def test_v3s_temperature_learns_at_a_third_of_its_rate_while_it_is_below_003():
    starts = [0.02, 0.0299, 0.0301, 0.05]
    seen = taus("fastclip_v3", starts, GRADIENTS, eta=1e-3, betas=(0.8, 0.9))

    def rate(tau):
        return 1e-3 / 3 if tau < 0.03 else 1e-3

    assert seen == pytest.approx([adamw(start, GRADIENTS, rate, (0.8, 0.9)) for start in starts], rel=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_v3s_first_step_is_its_rate_above_and_a_third_below_any_weights_step(name):
    low, high = taus("fastclip_v3", [0.02, 0.05], [1.0], name, eta=3e-3)
    assert (0.02 - low, 0.05 - high) == (pytest.approx(1e-3), pytest.approx(3e-3))


def test_v0s_temperature_keeps_its_rate_below_003():
    starts = [0.02, 0.05]
    expected = [adamw(start, GRADIENTS, lambda tau: 1e-3) for start in starts]
    assert taus("fastclip_v0", starts, GRADIENTS, eta=1e-3) == pytest.approx(expected, rel=1e-12)


def test_the_temperature_is_no_parameter_of_the_weights_optimiser():
    objective = create_objective("fastclip_v3")
    optimizer = create_optimizer(OptimizerConfig(), Weights(), objective)
    held = {id(p) for group in optimizer.weights.param_groups for p in group["params"]}
    assert id(objective.tau) not in held
    assert [group["lr"] for group in optimizer.temperature.param_groups] == [objective.settings.eta]


def test_zero_grad_clears_the_temperature_too():
    objective = create_objective("fastclip_v3")
    optimizer = create_optimizer(OptimizerConfig(), Weights(), objective)
    objective.tau.grad = torch.ones_like(objective.tau)
    optimizer.zero_grad()
    assert objective.tau.grad is None


def test_an_objective_without_parameters_makes_no_empty_group():
    optimizer = create_optimizer(OptimizerConfig(), nn.Linear(2, 2), create_objective("isogclr"))
    assert optimizer.temperature is None
    assert all(group["params"] for group in optimizer.weights.param_groups)
