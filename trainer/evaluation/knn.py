"""Classes by the k nearest training samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .chunks import chunks


@torch.inference_mode()
def predict(
    train: Tensor, labels: Tensor, test: Tensor, ks: Sequence[int], on_progress: Callable[[int, int], None]
) -> dict[int, Tensor]:
    """For each k the class that most of a test sample's k nearest training samples have, int64 [m].

    train, test: float32 [n, d] and [m, d], rows of norm 1; nearest is the highest inner product. labels: int64 [n],
    from 0. ks: different, each 1 … n. Of classes with equally many votes the one with the nearest sample wins.
    """
    predicted: dict[int, list[Tensor]] = {k: [] for k in ks}
    for chunk in chunks(len(test), len(train)):
        nearest = (test[chunk] @ train.T).topk(max(ks)).indices
        for k in ks:
            predicted[k].append(_vote(labels[nearest[:, :k]]))
        on_progress(chunk.stop, len(test))
    return {k: torch.cat(parts) for k, parts in predicted.items()}


def _vote(neighbours: Tensor) -> Tensor:
    """The most frequent class of each row, int64 [rows]; neighbours int64 [rows, k] are classes, the nearest first."""
    votes = neighbours.new_zeros(len(neighbours), int(neighbours.max()) + 1)
    votes.scatter_add_(1, neighbours, torch.ones_like(neighbours))
    of_neighbour = votes.gather(1, neighbours)
    # argmax may return any of several maxima, so the first is marked by a number that falls with the place.
    falling = torch.arange(neighbours.shape[1], 0, -1, device=neighbours.device)
    winner = ((of_neighbour == of_neighbour.amax(1, keepdim=True)) * falling).argmax(1, keepdim=True)
    return neighbours.gather(1, winner).squeeze(1)
