"""Batches of rows between the host's records and the caller's tensors: field-major, so that a field is contiguous."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .errors import FieldError
from .schema import VISITS, Schema


@dataclass(frozen=True)
class StagedRows:
    """Rows of one batch in host memory, pinned where the store's device is a GPU."""

    values: torch.Tensor  # float32 [fields, b]
    visits: torch.Tensor  # int32 [b]


class Staging:
    """Copies batches to and from one device; without waiting, where pinned memory allows it."""

    def __init__(self, schema: Schema, device: str | torch.device) -> None:
        self._schema = schema
        # Through a tensor: `cuda` alone becomes the current GPU, `cuda:0`, as the caller's tensors name it.
        self.device = torch.empty(0, device=device).device
        self._pinned = self.device.type == "cuda"

    def values(self, length: int) -> torch.Tensor:
        """Return an empty host tensor, float32 [fields, length]."""
        return torch.empty((len(self._schema.names), length), dtype=torch.float32, pin_memory=self._pinned)

    def rows(self, length: int) -> StagedRows:
        return StagedRows(self.values(length), torch.empty(length, dtype=torch.int32, pin_memory=self._pinned))

    def to_device(self, staged: StagedRows) -> dict[str, torch.Tensor]:
        """Return every field, float32 [b], and visits, int32 [b], on the device."""
        values = staged.values.to(self.device, non_blocking=self._pinned)
        visits = staged.visits.to(self.device, non_blocking=self._pinned)
        return {**dict(zip(self._schema.names, values.unbind(0), strict=True)), VISITS: visits}

    def from_state(
        self, state: Mapping[str, torch.Tensor], length: int
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start copying the fields of `state` into one host tensor [fields, length].

        The event, if any, tells when it is there. Raises FieldError unless `state` is every field, float32 [length].
        """
        self._schema.check_names(state)
        values = self.values(length)
        for row, name in zip(values, self._schema.names, strict=True):
            field = state[name]
            if field.dtype != torch.float32 or field.shape != (length,):
                raise FieldError(
                    f"field {name!r} of the put is {field.dtype} of shape {tuple(field.shape)}; "
                    f"pass torch.float32 of shape ({length},), one value for each sample id"
                )
            row.copy_(field.detach(), non_blocking=self._pinned and field.device == self.device)
        return values, torch.cuda.current_stream(self.device).record_event() if self._pinned else None
