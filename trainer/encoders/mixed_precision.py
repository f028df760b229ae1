"""Encoders in half precision; weights, feature norms, objective and state stay in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from ..optim import Optimizer

DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision:
    """torch's autocast and, for fp16, whose gradients would underflow, loss scaling.

    A step whose scaled gradients overflow changes no weight and halves the scale for the next ones. To detect that,
    fp16 synchronises with the device in every step.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        self._device_type, self._dtype = device.type, DTYPES[precision]
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast(self) -> torch.autocast:
        """Return the context for the encoders' forward pass."""
        return torch.autocast(self._device_type, self._dtype or torch.bfloat16, enabled=self._dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights by their unscaled gradients."""
        for each in optimizer.parts:
            self.scaler.step(each)
        self.scaler.update()
