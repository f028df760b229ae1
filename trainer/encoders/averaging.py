"""The moving average of the trained weights (EMA), which is evaluated and exported in their place."""

import copy
from typing import Literal

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..config import ModelConfig
from ..errors import ConfigError
from . import Encoders

Weights = Literal["averaged", "raw"]


class AveragedEncoders(Encoders):
    """Encoders with the moving averages of those that are trained, in evaluation mode; no predictor, no momentum.

    Batch norms have averages of the trained ones' statistics: the newest ones belong to weights that the average
    reaches only 1 / (1 - decay) steps later. Other buffers are copied.
    """

    def __init__(self, trained: Encoders, decay: float) -> None:
        """trained: on their device, with their first weights. decay: weight of the old values, in (0, 1)."""
        super().__init__(copy.deepcopy(trained.image), copy.deepcopy(trained.text))
        self.requires_grad_(False).eval()
        self._decay = decay

    @torch.no_grad()
    def follow(self, trained: Encoders, steps_done: int) -> None:
        """Move towards the weights after a step. Does not read from the device.

        The weight of the old values is at most (1 + n) / (10 + n) after n steps, as in TensorFlow's
        ExponentialMovingAverage, so that short runs forget their first weights.
        """
        average = get_ema_multi_avg_fn(min(self._decay, (1 + steps_done) / (10 + steps_done)))  # type: ignore[no-untyped-call]
        averaged, newest = _averaged(self), _averaged(trained)
        average(list(averaged.values()), [newest[name] for name in averaged], None)
        buffers = dict(trained.named_buffers())
        for name, buffer in self.named_buffers():
            if name not in averaged:  # a counter, or a mask, whose -inf has no average
                buffer.copy_(buffers[name])


def _averaged(encoders: nn.Module) -> dict[str, torch.Tensor]:
    statistics = ("running_mean", "running_var")
    buffers = {name: each for name, each in encoders.named_buffers() if name.rpartition(".")[2] in statistics}
    return dict(encoders.named_parameters()) | buffers


def chosen_weights(config: ModelConfig, asked: Weights | None) -> Weights:
    """Return the weights to use: those asked for, or by default averaged ones where the run has them.

    Raises ConfigError if the run has no averaged weights.
    """
    if asked == "averaged" and not config.ema:
        raise ConfigError("the run has no averaged weights (model.ema is 0); leave out --weights averaged")
    return asked or ("averaged" if config.ema else "raw")
