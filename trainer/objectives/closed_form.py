"""A loss with given gradients instead of autograd's, and full precision for computing them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Disable autocast and compute float32 products in true float32; restores the caller's settings at the end.

    A similarity in bfloat16 errs by 4e-3, which at a temperature of 0.005 is 0.8 in the exponent; TF32's error is an
    eighth of that.
    """
    # Each backend's own switch: torch.get_float32_matmul_precision raises once the caller has used these.
    # torch's stubs do not know that the mkldnn module has `matmul`.
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


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
