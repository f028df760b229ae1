"""Batches of rows in transit between host records and the caller's tensors; field-major, so fields are contiguous.

On a GPU, copies use their own stream and pinned memory, and the caller's stream waits for an event; the caller does not
wait. torch's caching allocator provides the pinned memory: after the first steps it reuses the same buffers, each only
after its copy is done.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..storage.gpu_copies import Arriving, Copies, CudaDevice
from .errors import FieldError
from .schema import VISITS, Schema


@dataclass
class StagedRows:
    """One batch of rows in host memory, pinned if the store's device is a GPU, and its copy on the device."""

    values: torch.Tensor
    """float32 [fields, b]"""
    visits: torch.Tensor
    """int32 [b]"""
    on_device: Arriving | None = None
    """Both on a GPU."""


class Staging:
    """Copies batches to and from one device, asynchronously if it is a GPU."""

    def __init__(self, schema: Schema, device: str | torch.device) -> None:
        self._schema = schema
        # Through a tensor, which resolves `cuda` to the current GPU, such as `cuda:0`, as in the caller's tensors.
        self.device = torch.empty(0, device=device).device
        self._copies = Copies(CudaDevice(self.device)) if self.device.type == "cuda" else None

    def rows(self, length: int) -> StagedRows:
        """Return empty host tensors for `length` rows."""
        pinned = self._copies is not None
        values = torch.empty((len(self._schema.names), length), dtype=torch.float32, pin_memory=pinned)
        return StagedRows(values, torch.empty(length, dtype=torch.int32, pin_memory=pinned))

    def upload(self, staged: StagedRows) -> None:
        """Start copying rows to the device. Call it again after a change. Thread-safe."""
        if self._copies is not None:
            staged.on_device = self._copies.upload((staged.values, staged.visits))

    def as_state(self, staged: StagedRows) -> dict[str, torch.Tensor]:
        """Return every field, float32 [b], and visits, int32 [b], on the device, for the caller's current stream."""
        values, visits = (staged.values, staged.visits) if staged.on_device is None else staged.on_device.here()
        return {**dict(zip(self._schema.names, values.unbind(0), strict=True)), VISITS: visits}

    def download(self, state: Mapping[str, torch.Tensor], length: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start copying the fields of `state` into one host tensor [fields, length].

        Wait for the event, if any, before reading. Raises FieldError unless `state` has every field, float32 [length].
        """
        self._schema.check_names(state)
        for name in self._schema.names:
            if state[name].dtype != torch.float32 or state[name].shape != (length,):
                raise FieldError(
                    f"field {name!r} of the put is {state[name].dtype} of shape {tuple(state[name].shape)}; "
                    f"pass torch.float32 of shape ({length},), one value for each sample id"
                )
        fields = [state[name].detach() for name in self._schema.names]
        host = self.rows(length).values
        if self._copies is not None:
            return host, self._copies.download(fields, host)
        for row, field in zip(host.numpy(), fields, strict=True):
            row[:] = field.cpu().numpy()  # a tenth of the cost of a tensor's copy_, noticeable at 4,096 rows
        return host, None
