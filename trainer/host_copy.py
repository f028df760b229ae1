"""A copy of a run's tensors in the memory of the host, taken at one moment while the device goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class CopyOnHost:
    """Tensors of nested dicts and lists as they are when it is made; it does not wait for a GPU to copy them."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._copied: torch.cuda.Event | None = None
        self._tree: dict[str, Any] = self._copy(tree)

    def result(self) -> dict[str, Any]:
        """The copy, once it is there; may be called in another thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tree

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._clone(value) if value.device.type == "cuda" else value.detach().clone()
        if isinstance(value, Mapping):
            return {name: self._copy(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(each) for each in value)
        return value

    def _clone(self, value: Tensor) -> Tensor:
        # Into pinned memory, or the copy would wait; on the stream that will change the weights, so it comes before.
        copy = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value.detach(), non_blocking=True)
        self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        return copy
