"""Turn a dataset into batches of views in the sample order: `ffcv_loader` and `dali_loader`.

`synthetic_loader` replaces them to measure speed alone.
"""

from collections.abc import Iterator
from typing import Self

from ..batch import Batch
from ..errors import DatasetError
from ..opening import Dataset
from ..order.order import AnyOrder


class Closing:
    """Has threads, which end with `close`, with a `with` block, or when the object is garbage-collected."""

    def close(self) -> None:
        """Stop the threads after their current batch."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Loader(Closing):
    """Serves one rank's batches."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from `first_step` on; one epoch at a time.

        Raises DatasetError at the batch of a sample whose stored bytes have changed.
        """
        raise NotImplementedError


def refuse_other_samples(order: AnyOrder, dataset: Dataset) -> None:
    """Raise DatasetError if the order was made for another number of samples."""
    if order.samples != dataset.n:
        raise DatasetError(f"the order is for {order.samples:,} samples, but {dataset.place} holds {dataset.n:,}")
