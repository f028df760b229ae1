"""Optimisers and their learning rate, which is a pure function of the step."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .config import OPTIMIZERS, OptimizerConfig, TrainConfig
from .objectives import Objective
from .objectives.base import TemperatureRate

Groups = list[dict[str, Any]]

_MEMORIES = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
"""Per-weight optimiser state of the same size as the weight; some optimisers also keep scalars."""
_LR_SCALE = "lr_scale"
"""Key of a group's learning rate factor, if it is not 1."""


def learning_rate(config: OptimizerConfig, step: int, steps_per_epoch: int, total_steps: int) -> float:
    """Return the rate: a linear rise to config.lr over the warm-up, then a cosine to config.lr_min at total_steps.

    With config.cooldown, the rate stays at config.lr after the warm-up, and falls linearly to config.lr_min in this
    last share of total_steps. Until then it does not depend on total_steps, so that a run can be forked there with any
    number of further steps, without a jump. Source: Hägele et al., Scaling Laws and Compute-Optimal Training Beyond
    Fixed Training Durations, NeurIPS 2024. step counts from 0, over all epochs.
    """
    warmup = warmup_steps(config, steps_per_epoch)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.cooldown:
        falling = max(1, min(config.cooldown * total_steps, total_steps - warmup))
        return config.lr_min + (config.lr - config.lr_min) * min(1.0, (total_steps - step) / falling)
    share = (step - warmup) / max(1, total_steps - warmup)
    return config.lr_min + (config.lr - config.lr_min) * 0.5 * (1 + math.cos(math.pi * share))


def rate_jump(before: TrainConfig, after: TrainConfig, step: int, steps_per_epoch: int) -> list[str]:
    """Return a line that says so if the next step, after `step`, has another learning rate than it was to have."""
    total = after.total_steps(steps_per_epoch)
    old = learning_rate(before.optimizer, step, steps_per_epoch, before.total_steps(steps_per_epoch))
    new = learning_rate(after.optimizer, step, steps_per_epoch, total)
    return [f"the learning rate of the next step is {new:.4g}, not {old:.4g}"] if old != new and step < total else []


def warmup_steps(config: OptimizerConfig, steps_per_epoch: int) -> int:
    """Return the length of the warm-up, in steps."""
    steps, epochs = config.warmup_parts
    return steps + epochs * steps_per_epoch


def momentum_at(start: float, step: int, total_steps: int) -> float:
    """Return the momentum network's weight of its old values: a cosine from `start` at step 0 to 1 at total_steps.

    Source: the code of MoCo v3 (Chen et al., ICCV 2021).
    """
    return 1.0 - (1.0 - start) * 0.5 * (1 + math.cos(math.pi * step / total_steps))


class Optimizer:
    """The optimiser of the weights and of the objective's own parameters.

    A temperature with a `temperature_rate` follows the same rule (FastCLIP procedures 4 and 5) in the last group, at
    its own rate, without warm-up and cosine: FastCLIP (appendix B) has these for the model's parameters, and a third
    "of its original value" for the temperature's rate. That third applies in every step that starts with it below
    `slow_below`, and ends when it rises above that again: the paper says only "when tau becomes smaller than", and its
    code checks the value in each step. So there is no further state to save.
    """

    def __init__(self, name: str, weights: torch.optim.Optimizer, rate: TemperatureRate | None) -> None:
        """name: the settings' name for `weights`; rate: of the last group, if it is a temperature's."""
        self.name, self.weights, self._rate = name, weights, rate

    @property
    def _groups(self) -> Groups:
        """Groups of all but a temperature with a rate of its own."""
        return self.weights.param_groups if self._rate is None else self.weights.param_groups[:-1]

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of everything, times a layer's factor if it has one; a temperature's is its own."""
        for group in self._groups:
            group["lr"] = rate * group.get(_LR_SCALE, 1.0)
        if self._rate is not None:
            self.weights.param_groups[-1]["lr"] = self._rate.lr

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of everything except the temperature, together, down to a norm of at most `max_norm`.

        Returns the norm before clipping, a scalar on the device, without reading it.
        """
        return nn.utils.clip_grad_norm_([weight for group in self._groups for weight in group["params"]], max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.weights.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, made: Callable[[torch.optim.Optimizer], object] = lambda weights: weights.step()) -> None:
        """Update every parameter by its gradient, which LARS overwrites. Does not read from the device.

        made: makes the step of torch's optimiser; a loss scaler's may leave it out.
        """
        if self._rate is None or self._rate.slow_below is None:
            made(self.weights)
            return
        (tau,) = self.weights.param_groups[-1]["params"]
        before = tau.clone()
        made(self.weights)
        # Without weight decay the step is proportional to the rate, so a third of the rate is a third of the step.
        # Computed on the device: testing tau here would synchronise with it.
        tau.copy_(before.lerp(tau, torch.ones_like(before).masked_fill_(before < self._rate.slow_below, 1 / 3)))

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "weights": self.weights.state_dict(), "temperature": self._rate is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, with tensors on the CPU.

        Raises ValueError if the state belongs to another optimiser or other weights.
        """
        stored, own = _kind(state), _kind(self.state_dict())
        if stored != own:
            raise ValueError(f"its optimiser is {stored}, but the settings have {own}")
        self.weights.load_state_dict(state["weights"])
        # Give the state its weights' strides: fused steps traverse raw memory, ignoring shape and strides.
        for weight, memory in self.weights.state.items():
            for name in memory.keys() & _MEMORIES:
                value, shape = memory[name], list(weight.shape)
                if list(value.shape) != shape:
                    raise ValueError(f"its {name} has shape {list(value.shape)}, but the weight has {shape}")
                memory[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _kind(state: dict[str, Any]) -> str:
    with_rate = "with" if state.get("temperature") else "without"
    return f"{state.get('name', 'of an older format')} {with_rate} a rate of tau's own"


class Lamb(torch.optim.Optimizer):
    """LAMB as in FastCLIP (procedure 4, appendix B, and code): a step of Adam, times a trust ratio for each tensor.

    Weight decay is part of the step that the trust ratio scales, and the weights' norm is not clipped. Groups whose
    `trust` is False, those without weight decay, have no trust ratio: a scalar that starts at 0 would hardly move. The
    means are corrected for their start, which pytorch_optimizer's Lamb leaves out: the trust ratio cancels it, but
    parameters without one would make steps up to 7 times as long in the first hundreds of steps.
    """

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            first, second = (1 - beta ** group["step"] for beta in group["betas"])
            for weight in (p for p in group["params"] if p.grad is not None):
                memory = self.state[weight]
                if not memory:
                    memory |= {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                mean = memory["exp_avg"].lerp_(weight.grad, 1 - group["betas"][0])
                square = memory["exp_avg_sq"].lerp_(weight.grad.square(), 1 - group["betas"][1])
                step = mean / first / ((square / second).sqrt() + group["eps"]) + group["weight_decay"] * weight
                if group["trust"]:
                    norm, length = weight.norm(), step.norm()
                    step *= torch.where((norm > 0) & (length > 0), norm / length, 1.0)
                weight.sub_(step, alpha=group["lr"])


def create_optimizer(
    config: OptimizerConfig, encoders: nn.Module, objective: Objective, factors: Mapping[nn.Parameter, float]
) -> Optimizer:
    """Create a run's optimisers. Weight decay applies to matrices and kernels, not to biases, norms or temperatures.

    The objective's own parameters (CLIP's logit scale, AUC-CL's b, a temperature) are treated as biases, but for their
    rate if they have a `temperature_rate`. LARS updates scalars and vectors by plain SGD with momentum, without its
    trust ratio.
    factors: weight → its share of the learning rate, 1 if left out; as `Encoders.learning_rate_factors`. Groups of
    weights with small factors come first.
    """
    own = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in encoders.parameters() if parameter.requires_grad]
    decayed, spared = Groups(), Groups()
    for factor in sorted({factors.get(p, 1.0) for p in weights}):
        of_factor = [p for p in weights if factors.get(p, 1.0) == factor]
        scale = {} if factor == 1.0 else {_LR_SCALE: factor}
        decayed.append({"params": [p for p in of_factor if p.ndim >= 2], "weight_decay": config.weight_decay, **scale})
        spared.append({"params": [p for p in of_factor if p.ndim < 2], "weight_decay": 0.0, **scale})
    spared.append({"params": own, "weight_decay": 0.0})
    settings = {"lr": config.lr} | {name: getattr(config, name) for name in OPTIMIZERS[config.name]}
    decayed, spared = ([group for group in groups if group["params"]] for groups in (decayed, spared))
    return Optimizer(config.name, _rule(config.name, decayed, spared, settings), objective.temperature_rate)


def _rule(name: str, decayed: Groups, spared: Groups, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """decayed, spared: groups with and without weight decay, none of them empty."""
    groups = decayed + spared
    if name == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=True)
    if name == "sgd":
        sgd = torch.optim.SGD(groups, **settings, fused=True)
        for parameter in (p for group in groups if settings["momentum"] for p in group["params"]):
            # torch would leave it uninitialised if fp16 skips the first step.
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    if name == "lamb":
        return Lamb([group | {"trust": of is decayed} for of in (decayed, spared) for group in of], **settings)
    import pytorch_optimizer  # deferred: the import takes seconds

    library: dict[str, Any] = {"lars": pytorch_optimizer.LARS, "lion": pytorch_optimizer.Lion}
    rule: torch.optim.Optimizer = library[name](groups, **settings)
    return rule
