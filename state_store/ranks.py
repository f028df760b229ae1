"""What the processes of one run tell each other when they write a snapshot together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from .errors import StateStoreError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks(Protocol):
    """The processes that hold the rows of one store; all of them make the same calls in the same order.

    Values are small and can be pickled.
    """

    rank: int
    """This process's place, 0 … world − 1."""
    world: int

    def broadcast(self, value: Any) -> Any:
        """Return on every rank the value that rank 0 gives; the others' is ignored."""

    def gather(self, value: Any) -> list[Any]:
        """Return on rank 0 every rank's value, in the order of the ranks; elsewhere an empty list."""


class Alone:
    """A run of one process."""

    rank = 0
    world = 1

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


class TorchRanks:
    """The ranks of a torch.distributed process group on the CPU (gloo) that serves nothing else.

    Snapshots are written in a thread: in a group that the training loop uses too, their messages would mix.
    """

    def __init__(self, group: "ProcessGroup") -> None:
        self._group = group
        self.rank = group.rank()
        self.world = group.size()

    def broadcast(self, value: Any) -> Any:
        from torch.distributed import broadcast_object_list  # here: Alone and the readers do without torch

        values = [value if self.rank == 0 else None]
        broadcast_object_list(values, group=self._group, group_src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        from torch.distributed import gather_object

        values: list[Any] = [None] * self.world if self.rank == 0 else []
        gather_object(value, values if self.rank == 0 else None, group=self._group, group_dst=0)
        return values

    def all_gather(self, own: Sequence[int]) -> list[list[int]]:
        """Return every rank's whole numbers or flags, as many as this one's, in the order of the ranks."""
        import torch
        from torch.distributed import all_gather

        received = torch.empty((self.world, len(own)), dtype=torch.int64)
        all_gather(list(received), torch.tensor(own, dtype=torch.int64), group=self._group)
        numbers: list[list[int]] = received.tolist()
        return numbers


@contextmanager
def agreement(ranks: Ranks, failure_elsewhere: type[Exception] = StateStoreError) -> Iterator[None]:
    """Let all ranks do the body; if it fails on one, raise on all: a rank that went on alone would wait for ever.

    failure_elsewhere: what is raised, with the first failure's text, on the ranks that did not fail themselves.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 (raised again, once the others know)
        failure = error
    failures = [text for text in ranks.gather(failure and f"rank {ranks.rank}: {failure}") if text]
    first_failure = ranks.broadcast(failures[0] if failures else None)
    if failure is not None:
        raise failure
    if first_failure is not None:
        raise failure_elsewhere(first_failure)
