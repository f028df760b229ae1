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
    optimizer = create_optimizer(OptimizerConfig(name=name, lr=0.1, weight_decay=0.3), model, objective, {})
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
    optimizer = create_optimizer(OptimizerConfig(name=name, lr=1.0, weight_decay=0.0), model, objective, {})
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
    optimizer = create_optimizer(OptimizerConfig(name=name, lr=1e-2), model, objective, {})

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
    resumed = create_optimizer(OptimizerConfig(name=name, lr=1e-2), other, other_objective, {})
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(optimizer, model, objective, range(3, 6))
    train(resumed, other, other_objective, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(objective.parameters(), other_objective.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            ("sgd", "clip"),
            "its optimiser is sgd without a rate of tau's own, but the settings have adamw with a rate of tau's own",
        ),
        (("adamw", "clip"), "adamw without a rate of tau's own, but the settings have adamw with a rate of tau's own"),
        (None, "its optimiser is of an older format"),
    ],
)
def test_the_state_of_another_optimiser_is_refused(kept, message):
    if kept is None:
        state = torch.optim.AdamW(Weights().parameters()).state_dict()
    else:
        state = create_optimizer(OptimizerConfig(name=kept[0]), Weights(), create_objective(kept[1]), {}).state_dict()
    optimizer = create_optimizer(OptimizerConfig(), Weights(), create_objective("fastclip_v3"), {})
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
            assert group["trust"] == all(p.ndim > 1 for p in group["params"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_a_layer_decay_the_state_is_laid_out_as_without_the_setting(name):
    optimizer = create_optimizer(OptimizerConfig(name=name), Weights(), create_objective("clip"), {})
    groups = optimizer.weights.param_groups
    assert [[p.ndim for p in group["params"]] for group in groups] == [[4, 2], [1, 1, 1, 1], [0]]
    assert not any("lr_scale" in group for group in groups)


def test_lamb_takes_the_papers_step_from_the_first_on():
    """FastCLIP procedure 4, with corrected means; without weight decay, the step of Adam."""
    generator = torch.Generator().manual_seed(0)
    matrix, vector = (
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 30), (40,))
    )  # of norm 35
    config = OptimizerConfig(name="lamb", lr=1e-2, weight_decay=0.3, betas=(0.5, 0.9), eps=1e-6)
    optimizer = create_optimizer(config, nn.ParameterList([matrix, vector]), create_objective("isogclr"), {})
    copied = nn.Parameter(vector.detach().clone())
    adam = torch.optim.Adam([copied], lr=1e-2, betas=(0.5, 0.9), eps=1e-6)
    m = v = torch.zeros_like(matrix)
    for step in range(1, 6):
        some_gradients([matrix, vector], step)
        copied.grad, before = vector.grad.clone(), matrix.detach().clone()
        m, v = 0.5 * m + 0.5 * matrix.grad, 0.9 * v + 0.1 * matrix.grad**2
        optimizer.step()
        adam.step()
        ratio = m / (1 - 0.5**step) / ((v / (1 - 0.9**step)).sqrt() + 1e-6) + 0.3 * before
        torch.testing.assert_close(matrix.detach(), before - 1e-2 * before.norm() / ratio.norm() * ratio)
        torch.testing.assert_close(vector, copied)


def test_lamb_moves_a_scalar_that_starts_at_zero():
    objective = create_objective("auc_cl", "unimodal")
    optimizer = create_optimizer(OptimizerConfig(name="lamb", lr=1e-3), Weights(), objective, {})
    for _ in range(20):
        objective.b.grad = torch.ones_like(objective.b)
        optimizer.step()
    assert objective.b.item() == pytest.approx(-0.02, rel=1e-4)


# A global temperature


def taus(objective, starts, gradients, name="adamw", scale="plain", **settings):
    """The temperature after each of the gradients in its parameter, all begun with its own start."""
    seen = []
    for start in starts:
        learner = create_objective(objective, tau=start, tau_scale=scale, **settings)
        optimizer = create_optimizer(OptimizerConfig(name=name, lr=0.5), nn.Linear(1, 1), learner, {})
        (parameter,) = learner.parameters()
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient, dtype=torch.float64)
            optimizer.set_learning_rate(0.5)  # the weights'
            optimizer.step()
        seen.append(parameter.item() if scale == "plain" else parameter.exp().item())
    return seen


def adamw(start, gradients, rate):
    """AdamW without decay, written out; rate: of tau."""
    tau, m, v = start, 0.0, 0.0
    for k, gradient in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        tau -= rate(tau) * m / (1 - 0.9**k) / (math.sqrt(v / (1 - 0.999**k)) + 1e-8)
    return tau


GRADIENTS = [0.3, -0.2, 0.5, 0.4, -0.9, -0.8]


def test_v3s_temperature_learns_at_a_third_of_its_rate_while_it_is_below_003():
    starts = [0.02, 0.0299, 0.0301, 0.05]

    def rate(tau):
        return 1e-3 / 3 if tau < 0.03 else 1e-3

    expected = [adamw(start, GRADIENTS, rate) for start in starts]
    assert taus("fastclip_v3", starts, GRADIENTS, eta=1e-3) == pytest.approx(expected, rel=1e-9)
    in_logs = [math.exp(adamw(math.log(start), GRADIENTS, lambda log: rate(math.exp(log)))) for start in starts]
    assert taus("fastclip_v3", starts, GRADIENTS, scale="log", eta=1e-3) == pytest.approx(in_logs, rel=1e-9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_v3s_temperature_follows_the_runs_optimiser_at_its_own_rate_and_a_third_of_it(name):
    low, high = taus("fastclip_v3", [0.02, 0.05], [1.0], name, eta=3e-3)
    assert (0.02 - low, 0.05 - high) == (pytest.approx(1e-3, rel=1e-4), pytest.approx(3e-3, rel=1e-4))
    small, large = (0.05 - taus("fastclip_v3", [0.05], [of], name, eta=1e-3)[0] for of in (0.5, 2.0))
    assert large / small == pytest.approx(4 if name in ("sgd", "lars") else 1, rel=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_v0s_temperature_learns_at_the_weights_rate_unless_it_has_its_own(name):
    (without,) = taus("fastclip_v0", [0.9], [1.0], name, scale="log", tau_max=2.0)
    (with_its_own,) = taus("fastclip_v0", [0.02], [1.0], name, scale="log", eta=1e-3)
    assert without == pytest.approx(0.9 * math.exp(-0.5), rel=1e-4)
    assert with_its_own == pytest.approx(0.02 * math.exp(-1e-3), rel=1e-4)


def test_on_the_scale_of_the_code_v3_needs_as_many_steps_from_007_to_003_as_the_code():
    """Steps of AdamW at a steady gradient: log(7 / 3) / 2e-4 = 4,237; of tau itself, 200."""
    needed = {
        scale: next(
            n for n in (199, 200, 201, 4_236, 4_237) if taus("fastclip_v3", [0.07], [1.0] * n, scale=scale)[0] < 0.03
        )
        for scale in ("log", "plain")
    }
    assert needed == {"log": 4_237, "plain": 201}


def test_the_temperature_is_clipped_with_nothing():
    objective = create_objective("fastclip_v3")
    optimizer = create_optimizer(OptimizerConfig(), Weights(), objective, {})
    objective.log_tau.grad = torch.full_like(objective.log_tau, 1e3)
    assert optimizer.clip_gradients(1.0) == 0
    assert objective.log_tau.grad == 1e3


def test_zero_grad_clears_the_temperature_too():
    objective = create_objective("fastclip_v3")
    optimizer = create_optimizer(OptimizerConfig(), Weights(), objective, {})
    objective.log_tau.grad = torch.ones_like(objective.log_tau)
    optimizer.zero_grad()
    assert objective.log_tau.grad is None


@pytest.mark.parametrize("objective", [("isogclr", {}), ("clip", {"learn_scale": False})])
def test_an_objective_that_learns_nothing_makes_no_empty_group(objective):
    name, settings = objective
    optimizer = create_optimizer(OptimizerConfig(), nn.Linear(2, 2), create_objective(name, **settings), {})
    assert len(optimizer.weights.param_groups) == 2
    assert all(group["params"] for group in optimizer.weights.param_groups)
