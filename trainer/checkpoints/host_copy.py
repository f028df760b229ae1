"""A host copy of a checkpoint's content. With pinned memory, making it does not wait for the GPU."""

from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...storage.gpu_copies import wait_for
from .tensors import join, take_apart

_ALIGNED = 16
"""Bytes: a multiple of every dtype's size."""


def bytes_on_gpu(tree: Any) -> int:
    """Return the size of the pinned memory for a copy of a tree: 0 without tensors on a GPU."""
    return sum(_padded(tensor) for tensor in take_apart(tree)[0].values() if tensor.device.type == "cuda")


class PinnedMemory:
    """Memory of exactly this size for asynchronous copies from a GPU; torch would round the size up."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: in bytes; a few gigabytes take a second. Raises RuntimeError if the driver refuses."""
        self.bytes, self._device = torch.empty(size, dtype=torch.uint8), device
        self._call("cudaHostRegister", size, 0)

    def close(self) -> None:
        """Unlock the memory; copies to it must be complete."""
        with suppress(RuntimeError):  # after a GPU error, which the caller must see instead
            self._call("cudaHostUnregister")

    def _call(self, name: str, *arguments: int) -> None:
        with torch.cuda.device(self._device):  # a thread begins on the process's first GPU
            driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(getattr(driver, name)(self.bytes.data_ptr(), *arguments))


class CopyOnHost:
    """A copy of the tensors in nested dicts and lists at construction."""

    def __init__(self, tree: Mapping[str, Any], pinned: Tensor | None = None) -> None:
        """pinned: uint8, at least bytes_on_gpu(tree), in use until `result` returns; None: wait for the copies."""
        tensors, self._rest = take_apart(tree)
        later = {} if pinned is None else {name: each for name, each in tensors.items() if each.device.type == "cuda"}
        self._copies = {name: each.to("cpu", copy=True) for name, each in tensors.items() if name not in later}
        self._copied: torch.cuda.Event | None = None
        if pinned is not None and later:
            starts = accumulate(map(_padded, later.values()), initial=0)
            copies = [placed(pinned, start, each) for start, each in zip(starts, later.values(), strict=False)]
            # At once: after each copy of its own, another thread of Python might keep this one waiting for 5 ms.
            torch._foreach_copy_(copies, [*later.values()], non_blocking=True)
            # blocking: the waiting thread sleeps; by default it would spin on a core that the loader needs.
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()  # in the current stream, which orders the copies before the next change
            self._copies |= dict(zip(later, copies, strict=True))

    def result(self) -> dict[str, Any]:
        """Return the copy once it is complete. Thread-safe."""
        if self._copied is not None:
            wait_for(self._copied)
        tree: dict[str, Any] = join(self._copies, self._rest)
        return tree


def placed(memory: Tensor, at: int, like: Tensor) -> Tensor:
    """Return a tensor of `like`'s shape, dtype and memory format in uint8 memory, from byte `at`."""
    values = memory[at : at + like.numel() * like.element_size()].view(like.dtype)
    return values.as_strided(like.shape, torch.empty_like(like, device="meta").stride())


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
