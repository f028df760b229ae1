"""The sample order for loaders that others have written: torch's samplers, and a position in the order."""

from collections.abc import Iterator

from torch.utils.data import Sampler

from .order import Order


class Position:
    """A step of an order from which an iteration goes on. `len` is the number of steps of a whole epoch.

    `steps_done` counts the steps before it, over all epochs.
    """

    steps_done = 0

    def __init__(self, order: Order) -> None:
        self.order = order

    def __len__(self) -> int:
        return self.order.steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of this epoch, unless the position is within it."""
        if self.steps_done // len(self) != epoch:
            self.steps_done = epoch * len(self)


class OrderSampler(Position, Sampler[list[int]]):
    """The ids of one rank's batches, for torch's DataLoader over a dataset of your own, as its `batch_sampler`.

    Each iteration yields the rest of an epoch, from `steps_done` on, and the next one begins with the next epoch. A
    DataLoader asks for ids long before they are trained on, so what is trained cannot be seen here: save the number of
    steps with your weights, and set `steps_done` to it when you resume, on any number of ranks that divides the order's
    canonical shards. `set_epoch` then keeps the position.
    """

    def __init__(self, order: Order, rank: int = 0, world: int = 1) -> None:
        """Raises ValueError for a world that does not divide the canonical shards."""
        super().__init__(order)
        order.rank_ids(rank, world)
        self._rank, self._world = rank, world

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first_step = divmod(self.steps_done, len(self))
        for step in range(first_step, len(self)):
            yield self.order.batch_ids(epoch, step, self._rank, self._world).tolist()
        self.steps_done = (epoch + 1) * len(self)
