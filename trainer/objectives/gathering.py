"""Values of all ranks, gathered where training runs on more than one; nothing else crosses between ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """The processes that share a global batch: rank k holds rows k·n … (k + 1)·n - 1 of it."""

    rank: int
    world: int
    communicating: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around every exchange; to measure it."""

    @classmethod
    def of_this_process(cls, communicating: Callable[[], AbstractContextManager[None]] = nullcontext) -> "Ranks":
        """Those of torch.distributed's default group; alone where none was started."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size(), communicating)

    def own(self, rows: int) -> slice:
        """Where this rank's `rows` rows lie in the global batch."""
        return slice(self.rank * rows, (self.rank + 1) * rows)

    def gather(self, values: Tensor) -> Tensor:
        """[k, n, …] of this rank -> [k, world·n, …] of all, in the order of the ranks; no gradient passes."""
        if self.world == 1:
            return values
        # As bytes: gloo does not know every dtype.
        sent = values.detach().contiguous().view(torch.uint8)
        received = sent.new_empty((self.world, *sent.shape))
        with self.communicating():
            dist.all_gather(list(received), sent)
        return received.view(values.dtype).transpose(0, 1).flatten(1, 2)

    def check_alike(self, features: Tensor) -> None:
        """Raise ValueError where the ranks' features differ in shape or dtype, of which gathering knows nothing.

        Waits for the device, so it is for the first step of a run.
        """
        own = torch.tensor([*features.shape, features.element_size()], device=features.device)
        of_ranks = self.gather(own.unsqueeze(1)).T.tolist()
        if any(of_rank != of_ranks[0] for of_rank in of_ranks):
            held = ", ".join(f"{rows} × {width} numbers of {size} bytes" for rows, width, size in of_ranks)
            raise ValueError(
                f"features: the ranks hold {held}; all must hold the same: "
                "choose a global batch that the number of ranks divides, and one precision"
            )
