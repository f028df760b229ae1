"""Copies between the host and a GPU beside the work that the caller queues there.

The caller computes on torch's current stream; copies have a stream of their own. Two rules keep that right:

- What one stream writes, another reads only after an event.
- Memory is reused in the order of the stream that allocated it: at once for the next allocation there. A tensor that
  another stream reads is therefore recorded there, or freed memory is overwritten while it is still being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Copies:
    """Copies to and from one device on a stream of their own."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.stream = device, device.new_stream()

    def upload(self, host: Sequence[Tensor]) -> Arriving:
        """Start copying pinned tensors to the device."""
        copies = [self.device.empty(each.shape, each.dtype, self.stream) for each in host]
        for copy, each in zip(copies, host, strict=True):
            self.device.copy(copy, each, self.stream)
        return self.arriving(copies)

    def arriving(self, tensors: Sequence[Tensor]) -> Arriving:
        """Hand over tensors allocated on the copies' stream and filled by what it has been given so far."""
        return Arriving(self.device, tensors, self.device.record(self.stream))

    def download(self, fields: Sequence[Tensor], host: Tensor) -> Any:
        """Start copying tensors [b] of the caller's into the rows of a pinned one [fields, b].

        Returns the event of the copy's end. The caller may change or free its tensors at once.
        """
        device, current = self.device, self.device.current_stream()
        # In the caller's stream first, which orders it before the caller's later changes.
        together = device.empty(host.shape, host.dtype, current)
        for row, field in zip(together, fields, strict=True):
            device.copy(row, field, current)
        device.wait(self.stream, device.record(current))
        device.copy(host, together, self.stream)
        device.keep(together, self.stream)
        return device.record(self.stream)


class Arriving:
    """Tensors that the copies' stream is filling."""

    def __init__(self, device: CudaDevice, tensors: Sequence[Tensor], filled: Any) -> None:
        self._device, self._tensors, self._filled = device, tensors, filled

    def here(self) -> Sequence[Tensor]:
        """Return the tensors for use on the current stream, which waits for them; the caller does not."""
        current = self._device.current_stream()
        self._device.wait(current, self._filled)
        for each in self._tensors:
            self._device.keep(each, current)
        return self._tensors

    def wait(self) -> None:
        """Let the calling thread wait until the tensors are filled."""
        self._filled.synchronize()


def wait_for(event: torch.cuda.Event) -> None:
    """Let a thread sleep until an event of any GPU.

    A thread begins on the first GPU, whichever its process uses. Waiting there would give that GPU half a gigabyte of
    context for each of the others' processes.
    """
    with torch.cuda.device(event.device):
        event.synchronize()


class Pace:
    """Keeps the host at most two steps ahead of a device.

    The device never waits for it. Without it the host may queue many steps, each with a batch of its own in pinned and
    in device memory: what another stream reads is not reused before that stream has read it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._ends = device, deque[Any]()

    def end_step(self) -> None:
        """Record the end of a step on the current stream, and wait for the end of the step before the last."""
        self._ends.append(self._device.record(self._device.current_stream()))
        if len(self._ends) > 2:
            self._ends.popleft().synchronize()


class CudaDevice:
    """A CUDA device, through torch. Nothing here waits for it; the tests have one of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: torch.cuda.Stream) -> Tensor:
        """Allocate on the device, in the order of a stream."""
        with self._streaming(stream):
            return torch.empty(*shape, dtype=dtype, device=self._device)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a copy. The host's side is pinned, and torch reuses its memory only once the copy is done."""
        with self._streaming(stream):
            target.copy_(source, non_blocking=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that marks what the stream has been given so far."""
        # blocking: a host that waits for it sleeps; by default it would spin on a core that the loader needs.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let what the stream is given from now on wait for an event."""
        stream.wait_event(event)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep a tensor's memory, once freed, until the stream is done with what it has been given by then."""
        tensor.record_stream(stream)

    @contextmanager
    def _streaming(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # The stream's own context would leave a thread on the GPU that it began on, with a context there: see wait_for.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield
