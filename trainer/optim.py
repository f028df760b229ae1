"""Optimisers and their learning rate, which is a pure function of the step."""

import math
from collections.abc import Mapping
from types import MappingProxyType
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


class TemperatureAdamW(torch.optim.AdamW):
    """AdamW for a global temperature, independent of the weights' optimiser; no decay.

    Its learning rate has no warm-up and no cosine: FastCLIP (appendix B) has these for the model's parameters, and
    a third "of its original value" for the temperature's rate. That third applies in every step that starts with tau
    below `slow_below`, and ends when tau rises above it again: the paper says only "when tau becomes smaller than", and
    its code checks the value in each step. So there is no further state to save.
    """

    def __init__(self, parameters: list[nn.Parameter], rate: TemperatureRate) -> None:
        super().__init__(parameters, lr=rate.lr, betas=rate.betas, eps=1e-8, weight_decay=0.0)
        self._tau, self._rate = parameters[0], rate

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._rate.slow_below is None:
            super().step()
            return
        before = self._tau.clone()
        super().step()
        # Without weight decay the step is proportional to the rate, so a third of the rate is a third of the step.
        # Computed on the device: testing tau here would synchronise with it.
        share = torch.ones_like(before).masked_fill_(before < self._rate.slow_below, 1 / 3)
        self._tau.copy_(before.lerp(self._tau, share))


class Optimizer:
    """The optimisers of the weights and, if the objective has a `temperature_rate`, of the temperature."""

    def __init__(self, name: str, weights: torch.optim.Optimizer, temperature: TemperatureAdamW | None) -> None:
        """name: the settings' name for `weights`."""
        self.name, self.weights, self.temperature = name, weights, temperature

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        return [self.weights] if self.temperature is None else [self.weights, self.temperature]

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of everything except the temperature, times a layer's factor if it has one."""
        for group in self.weights.param_groups:
            group["lr"] = rate * group.get(_LR_SCALE, 1.0)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of everything except the temperature, together, down to a norm of at most `max_norm`.

        Returns the norm before clipping, a scalar on the device, without reading it.
        """
        parameters = [parameter for group in self.weights.param_groups for parameter in group["params"]]
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        """Update every parameter by its gradient, which LARS overwrites. Does not read from the device."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        temperature = None if self.temperature is None else self.temperature.state_dict()
        return {"name": self.name, "weights": self.weights.state_dict(), "temperature": temperature}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, with tensors on the CPU.

        The step count of a temperature's AdamW stays there: on the device, every step would synchronise to read it.
        Raises ValueError if the state belongs to other optimisers or weights.
        """
        stored, own = _kind(state), _kind(self.state_dict())
        if stored != own:
            raise ValueError(f"its optimiser is {stored}, but the settings have {own}")
        self.weights.load_state_dict(state["weights"])
        if self.temperature is not None:
            self.temperature.load_state_dict(state["temperature"])
        # Give the state its weights' strides: fused steps traverse raw memory, ignoring shape and strides.
        for weight, memory in (pair for part in self.parts for pair in part.state.items()):
            for name in memory.keys() & _MEMORIES:
                value, shape = memory[name], list(weight.shape)
                if list(value.shape) != shape:
                    raise ValueError(f"its {name} has shape {list(value.shape)}, but the weight has {shape}")
                memory[name] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _kind(state: dict[str, Any]) -> str:
    return f"{state.get('name', 'of an older format')} {'with' if state.get('temperature') else 'without'} one for tau"


def create_optimizer(
    config: OptimizerConfig,
    encoders: nn.Module,
    objective: Objective,
    factors: Mapping[nn.Parameter, float] = MappingProxyType({}),
) -> Optimizer:
    """Create a run's optimisers. Weight decay applies to matrices and kernels, not to biases, norms or temperatures.

    Except for those with a `temperature_rate`, the objective's own parameters (CLIP's logit scale, AUC-CL's b) are
    treated as biases. LARS updates scalars and vectors by plain SGD with momentum, without its trust ratio.
    factors: weight → its share of the learning rate, 1 if left out; as `Encoders.learning_rate_factors`. Groups of
    weights with small factors come first.
    """
    rate = objective.temperature_rate
    own = list(objective.parameters())
    temperature = None if rate is None else TemperatureAdamW(own, rate)
    weights = [parameter for parameter in encoders.parameters() if parameter.requires_grad]
    decayed: Groups = []
    spared: Groups = []
    for factor in sorted({factors.get(p, 1.0) for p in weights}):
        of_factor = [p for p in weights if factors.get(p, 1.0) == factor]
        scale = {} if factor == 1.0 else {_LR_SCALE: factor}
        decayed.append({"params": [p for p in of_factor if p.ndim >= 2], "weight_decay": config.weight_decay, **scale})
        spared.append({"params": [p for p in of_factor if p.ndim < 2], "weight_decay": 0.0, **scale})
    spared.append({"params": own if rate is None else [], "weight_decay": 0.0})
    settings = {"lr": config.lr} | {name: getattr(config, name) for name in OPTIMIZERS[config.name]}
    decayed, spared = ([group for group in groups if group["params"]] for groups in (decayed, spared))
    return Optimizer(config.name, _of_library(config.name, decayed, spared, settings), temperature)


def _of_library(name: str, decayed: Groups, spared: Groups, settings: dict[str, Any]) -> torch.optim.Optimizer:
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
        return _lamb(decayed, spared, settings)
    import pytorch_optimizer  # deferred: the import takes seconds

    library: dict[str, Any] = {"lars": pytorch_optimizer.LARS, "lion": pytorch_optimizer.Lion}
    optimizer: torch.optim.Optimizer = library[name](groups, **settings)
    return optimizer


def _lamb(decayed: Groups, spared: Groups, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """LAMB as in FastCLIP (procedure 4, appendix B, and code), which differs from the library's defaults.

    Weight decay is part of the step that the trust ratio scales. The weights' norm is not clipped at 10, which the
    larger kernels of a ResNet exceed. Parameters without weight decay have no trust ratio, because a scalar that starts
    at 0 would hardly move. The rate is not divided by 1 - beta_1^t, which would make the first steps ten times as long.
    The library does not correct the means' bias: the trust ratio cancels the bias, but parameters without a ratio make
    steps up to 7 times as long in the first hundreds of steps, which a warm-up covers.
    """
    from pytorch_optimizer import Lamb

    for group in spared:
        group["adam"] = True  # trust ratio 1
    lamb = Lamb(decayed + spared, weight_decouple=False, adam_debias=True, **settings)
    lamb.clamp = math.inf
    return lamb
