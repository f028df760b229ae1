"""An error for what makes the host wait for the device: on a GPU by torch's own mode, else by a list of operations."""

import warnings
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
READS = {
    ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.masked_select.default, ATEN.equal.default,
    ATEN._unique2.default, ATEN.unique_dim.default, ATEN.unique_consecutive.default, ATEN.repeat_interleave.Tensor,
}  # fmt: skip
"""Operations whose result, or its shape, depends on values: on a GPU the host waits for these."""
INDEXED = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._unsafe_index.Tensor}


class WaitError(AssertionError):
    """An operation that waits for the device on a GPU."""


class _NoReads(TorchDispatchMode):
    def __init__(self, on_host):
        super().__init__()
        self.on_host = {id(tensor) for tensor in on_host}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        masks = operation in INDEXED and any(each is not None and each.dtype == torch.bool for each in args[1])
        if masks or (operation in READS and id(args[0]) not in self.on_host):
            raise WaitError(f"{operation} reads from the device")
        return operation(*args, **(kwargs or {}))


@contextmanager
def no_waits(on_host=()):
    """Let an operation in the block that waits for the device raise an error.

    on_host: tensors that are on the host also where there is a GPU.
    """
    if not torch.cuda.is_available():
        with _NoReads(on_host):
            yield
        return
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode("default")


def _set_mode(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once in a process that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
