"""Encode a step's batch: in one piece, or in several pieces if its activations would not fit into memory.

Source of the second way: GradCache (Gao, Zhang, Han and Callan, RepL4NLP 2021).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...pipeline.batch import Batch
from ..metrics.step_clock import StepClock
from ..precision import MixedPrecision
from . import Encoders, Features
from .backbones import statistics_untouched


class OnePiece:
    """Encodes the batches of a run, one after the other; the loss's own backward pass reaches the weights."""

    def __init__(self, encode: nn.Module, precision: MixedPrecision, device: torch.device, clock: StepClock) -> None:
        """encode: the encoders, or the module that replaces them in a step."""
        self._encode, self._precision, self._device, self._clock = encode, precision, device, clock

    def encode(self, pieces: Iterable[Batch]) -> tuple[Tensor, Features]:
        """Return ids, int64 [b] on the CPU, and features of a rank's share of a batch, drawn piece by piece."""
        (batch,) = pieces
        with self._clock.computing("forward_backward"), self._precision.autocast():
            return batch.sample_ids, self._encode(batch.to(self._device))

    def finish_backward(self) -> None:
        """Backpropagate the features' gradients to the weights, once the loss's backward pass is done."""


class MicroBatches(OnePiece):
    """Encodes every piece twice: without a graph for the features, and with one for the weights' gradients.

    The objective sees the features of the whole batch and gives their gradients; the weights' gradients are sums over
    pieces. Memory holds one piece, the batch's features, and its pixels, which wait on the host.

    Both passes use the same pixels and random numbers (dropout). A batch norm normalises by the statistics of the
    piece, and its running means take in each piece once.
    """

    def __init__(
        self,
        encoders: Encoders,
        encode: nn.Module,
        precision: MixedPrecision,
        device: torch.device,
        clock: StepClock,
        seed: Callable[[int], None],
    ) -> None:
        """seed: restarts torch's random numbers: 1 or more for a piece, 0 for the rest of the step."""
        super().__init__(encode, precision, device, clock)
        self._encoders, self._seed = encoders, seed
        self._waiting: list[Batch] = []
        self._features: list[Tensor] = []

    def encode(self, pieces: Iterable[Batch]) -> tuple[Tensor, Features]:
        """Return ids and features, which collect gradients for `finish_backward`; keeps the pieces until then."""
        self._waiting, found = [], list[Features]()
        for number, piece in enumerate(pieces, 1):
            with self._clock.computing("forward_backward"), self._precision.autocast(), torch.no_grad():
                self._waiting.append(_with_pixels(piece, self._kept))
                self._seed(number)
                found.append(self._encoders(self._on_device(self._waiting[-1])))
        self._seed(0)
        joined = joined_features(found)
        self._features = [joined.first, joined.second, *joined.local]
        for features in self._features:
            features.requires_grad_()
        return torch.cat([piece.sample_ids for piece in self._waiting]), joined

    def finish_backward(self) -> None:
        """Encode the pieces again and backpropagate their features' gradients; the last piece averages over ranks.

        Releases the batch.
        """
        rows = [len(piece.sample_ids) for piece in self._waiting]
        # A loss may depend on some of the features only.
        found = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._features]
        gradients = [torch.split(gradient, rows) for gradient in found]
        self._waiting.reverse()
        for number, of_piece in enumerate(zip(*gradients, strict=True), 1):
            self._seed(number)
            piece = self._on_device(self._waiting.pop())
            averaging: AbstractContextManager[None] = nullcontext()
            if isinstance(self._encode, DistributedDataParallel) and self._waiting:
                averaging = self._encode.no_sync()
            with averaging, statistics_untouched(self._encoders):
                with self._precision.autocast():
                    features = self._encode(piece, keys=False)
                views = zip((features.first, features.second, *features.local), of_piece, strict=True)
                trained = [pair for pair in views if pair[0].requires_grad]  # not by a locked encoder
                torch.autograd.backward([view for view, _ in trained], [gradient for _, gradient in trained])
        self._features = []

    def _on_device(self, piece: Batch) -> Batch:
        """Return the piece for both passes: in float32, rounded to the encoders' precision."""
        return _with_pixels(
            piece.to(self._device), lambda view: view.to(torch.promote_types(view.dtype, torch.float32))
        )

    def _kept(self, view: Tensor) -> Tensor:
        """Return the pixels on the host, in the encoders' precision."""
        dtype = self._precision.dtype or view.dtype
        if self._device.type == "cpu":
            return view.to(dtype)
        # Pinned, so that copies from and to a GPU run in the order of its stream, and the host continues.
        return torch.empty(view.shape, dtype=dtype, pin_memory=True).copy_(view, non_blocking=True)


def _with_pixels(piece: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    return replace(piece, views=tuple(map(change, piece.views)), local=tuple(map(change, piece.local)))


def joined_features(pieces: list[Features]) -> Features:
    first, second, keys, local = zip(*pieces, strict=True)
    of_momentum = None
    if keys[0] is not None:
        of_first, of_second = zip(*keys, strict=True)
        of_momentum = torch.cat(of_first), torch.cat(of_second)
    return Features(torch.cat(first), torch.cat(second), of_momentum, tuple(map(torch.cat, zip(*local, strict=True))))
