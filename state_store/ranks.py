"""Communication between the ranks of a run when they write a snapshot together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import StateStoreError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class Ranks:
    """The processes that share one store; all make the same calls in the same order. This class: a run of one process.

    Values are small and picklable.
    """

    rank, world = 0, 1

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank; other values are ignored."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on rank 0; an empty list elsewhere."""
        return [value]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite contiguous tensors on the CPU by rank 0's, of the same shapes and dtypes."""

    def all_gather(self, own: Sequence[int]) -> list[list[int]]:
        """Return every rank's integers or flags, equally many from each, in rank order. Never waits for a GPU."""
        return [list(own)]


ONE_PROCESS = Ranks()


class TorchRanks(Ranks):
    """The ranks of a torch.distributed CPU process group (gloo) used for nothing else.

    Snapshots are written in a thread; in a group shared with the training loop, their messages would mix.
    """

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed  # here: readers work without torch

        self._group, self._torch, self._dist = group, torch, torch.distributed
        self.rank = group.rank()
        self.world = group.size()

    def broadcast(self, value: Any) -> Any:
        values = [value if self.rank == 0 else None]
        self._dist.broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world if self.rank == 0 else []
        self._dist.gather_object(value, values if self.rank == 0 else None, group=self._group, group_dst=0)
        return values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.contiguous()
            self._dist.broadcast(whole.view(-1).view(self._torch.uint8), group=self._group, group_src=0)
            tensor.copy_(whole)

    def all_gather(self, own: Sequence[int]) -> list[list[int]]:
        sent = self._torch.tensor(own, dtype=self._torch.int64)
        received = sent.new_empty((self.world, len(own)))
        self._dist.all_gather(list(received), sent, group=self._group)
        numbers: list[list[int]] = received.tolist()
        return numbers


@contextmanager
def agreement(ranks: Ranks, failure_elsewhere: type[Exception] = StateStoreError) -> Iterator[None]:
    """Run the block on all ranks; if it fails on any, raise on all: a rank that continued alone would wait forever.

    failure_elsewhere: exception type for the ranks that did not fail, with the first failure's text.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 (raised again, once the other ranks know)
        failure = error
    failures = [text for text in ranks.gather(failure and f"rank {ranks.rank}: {failure}") if text]
    first_failure = ranks.broadcast(failures[0] if failures else None)
    if failure is not None:
        raise failure
    if first_failure is not None:
        raise failure_elsewhere(first_failure)
