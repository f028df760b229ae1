"""Full precision inside an objective, independent of the training step around it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Disable autocast and compute float32 products in true float32; restores the caller's settings at the end.

    A similarity in bfloat16 errs by 4e-3, which at a temperature of 0.005 is 0.8 in the exponent; TF32 by an eighth of
    it.
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
