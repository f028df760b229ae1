"""What the processes of one run tell each other when they write a snapshot together."""

from typing import TYPE_CHECKING, Any, Protocol

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
