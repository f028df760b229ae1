"""A loss with given gradients instead of autograd's."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *inputs_then_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs_then_gradients[len(inputs_then_gradients) // 2 :])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # No cast before the product: a loss scale must lift small gradients before float16 flushes them to zero.
        # Autograd casts the result to the input's dtype.
        scaled = [
            gradient * grad_output if needed else None
            for gradient, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=False)
        ]
        return (None, *scaled, *(None for _ in scaled))


def attach_gradients(value: Tensor, inputs: list[Tensor], gradients: list[Tensor]) -> Tensor:
    """Return a scalar equal to `value` whose `backward()` gives each input its entry in `gradients`.

    Each gradient has its input's shape; it arrives in the input's dtype, multiplied by the incoming gradient.
    """
    loss: Tensor = _ClosedForm.apply(value, *inputs, *gradients)  # type: ignore[no-untyped-call]
    return loss
