"""The moving average of the trained weights (EMA), which evaluation and export use instead."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from . import Encoders


class AveragedEncoders(Encoders):
    """Encoders with the moving averages of the trained weights, in evaluation mode; no predictor, no momentum network.

    Batch norms average the trained statistics: the newest statistics belong to weights that the average reaches only
    1 / (1 - decay) steps later. Other buffers are copied.
    """

    def __init__(self, trained: Encoders, decay: float) -> None:
        """trained: on their device, with their first weights. decay: weight of the old values, in (0, 1)."""
        super().__init__(copy.deepcopy(trained.image), copy.deepcopy(trained.text))
        self.requires_grad_(False).eval()
        self._decay = decay
        own, newest = _values(self), _values(trained)
        # A counter cannot be averaged, nor can a mask with -inf.
        statistics = [name for name in own if name.rpartition(".")[2] in ("running_mean", "running_var")]
        averaged = {*statistics, *dict(self.named_parameters())}
        self._averaged = [own[name] for name in averaged], [newest[name] for name in averaged]
        self._copied = [(own[name], newest[name]) for name in own.keys() - averaged]

    @torch.no_grad()
    def follow(self, steps_done: int) -> None:
        """Move towards the trained encoders after a step. Does not read from the device.

        The weight of the old values is at most (1 + n) / (10 + n) after n steps, as in TensorFlow's
        ExponentialMovingAverage, so that short runs forget their first weights.
        """
        average = get_ema_multi_avg_fn(min(self._decay, (1 + steps_done) / (10 + steps_done)))  # type: ignore[no-untyped-call]
        average(*self._averaged, None)
        for own, newest in self._copied:
            own.copy_(newest)


def _values(encoders: nn.Module) -> dict[str, torch.Tensor]:
    return dict(encoders.named_parameters()) | dict(encoders.named_buffers())
