"""Random batches instead of a dataset's: training speed if the loader cost nothing."""

from collections.abc import Iterator

import torch

from ..batch import Batch
from ..opening import Dataset
from ..order.order import AnyOrder
from . import Loader, refuse_other_samples

ADVICE = "data.loader = 'synthetic': the views and tokens are random, so this run measures speed and learns nothing"
_KEPT = 2
"""Number of batches on the device, about as many as a real loader's."""


class SyntheticLoader(Loader):
    """Repeats a few batches of noise, made once on the device, with the ids of the order. Reads no sample."""

    def __init__(
        self,
        dataset: Dataset,
        order: AnyOrder,
        *,
        image_size: int,
        views: int,
        device: torch.device,
        local_size: int = 96,
        local_views: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Make batches with the shapes and dtypes of the dataset's own.

        Arguments as for ViewMaker. Raises DatasetError if the order was made for another number of samples.
        """
        refuse_other_samples(order, dataset)
        self.order, self._rank, self._world = order, rank, world
        rows, tokenizer = order.batch_size // world, dataset.index.tokenizer
        random = torch.Generator(device).manual_seed(order.seed)
        self._kept = []
        for _ in range(_KEPT):
            pixels, local, tokens = (
                torch.randn((views, rows, 3, image_size, image_size), generator=random, device=device),
                torch.randn((local_views, rows, 3, local_size, local_size), generator=random, device=device),
                None,
            )
            if tokenizer is not None:
                words = (rows, tokenizer.context_length)
                tokens = torch.randint(tokenizer.vocab_size, words, generator=random, device=device, dtype=torch.int32)
                tokens[:, -1] = tokenizer.end_id
            self._kept.append((tuple(pixels), tokens, tuple(local)))

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from first_step on; the same few tensors again and again."""
        for step in range(first_step, self.order.steps_per_epoch):
            ids = self.order.batch_ids(epoch, step, self._rank, self._world)
            views, tokens, local = self._kept[step % _KEPT]
            views, local = (tuple(each[: len(ids)] for each in of) for of in (views, local))
            yield Batch(torch.from_numpy(ids), views, None if tokens is None else tokens[: len(ids)], local)

    def close(self) -> None:
        self._kept.clear()
