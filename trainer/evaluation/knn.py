"""k-nearest-neighbour classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .chunks import chunks


@torch.inference_mode()
def predict(
    train: Tensor, labels: Tensor, test: Tensor, ks: Sequence[int], on_progress: Callable[[int, int], None]
) -> dict[int, Tensor]:
    """For each k, return the most frequent class among a test sample's k nearest training samples, int64 [m].

    train, test: float32 [n, d] and [m, d], rows of norm 1; nearest means the highest inner product. labels: int64 [n],
    from 0. ks: distinct, each 1 … n. A tie goes to the class with the nearest sample.
    """
    predicted: dict[int, list[Tensor]] = {k: [] for k in ks}
    for chunk in chunks(len(test), len(train)):
        nearest = (test[chunk] @ train.T).topk(max(ks)).indices
        for k in ks:
            predicted[k].append(_vote(labels[nearest[:, :k]]))
        on_progress(chunk.stop, len(test))
    return {k: torch.cat(parts) for k, parts in predicted.items()}


def _vote(neighbours: Tensor) -> Tensor:
    """Return the most frequent class per row, int64 [rows]; neighbours: classes, int64 [rows, k], nearest first."""
    votes = neighbours.new_zeros(len(neighbours), int(neighbours.max()) + 1)
    votes.scatter_add_(1, neighbours, torch.ones_like(neighbours))
    of_neighbour = votes.gather(1, neighbours)
    # argmax may return any of several maxima, so a weight that falls with the position marks the first.
    falling = torch.arange(neighbours.shape[1], 0, -1, device=neighbours.device)
    winner = ((of_neighbour == of_neighbour.amax(1, keepdim=True)) * falling).argmax(1, keepdim=True)
    return neighbours.gather(1, winner).squeeze(1)
