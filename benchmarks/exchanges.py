"""The ranks of bytes_a_step.py: processes that take steps and count what they send one another, on gloo.

`python -m benchmarks.exchanges RANKS BATCH DIM WEIGHTS STEPS METHOD…` prints a JSON object: for each method the bytes
that a rank has to send in a step, by the collectives it called, and those that it did send, by the loopback's counter.
Only in a network namespace of its own is that counter not shared. METHOD: an objective, bimodal, LOCAL_LOSS or
GRADIENTS.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from thermopile.trainer.objectives import Progress, create_objective

LOCAL_LOSS, GRADIENTS = "local_loss", "gradients"
WARM_UP_STEPS = 2
"""Objectives compare the ranks' shapes in their first step; DDP settles in its second."""


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that this rank has to send for the collectives that are called, by autograd and DDP too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            self.bytes += _to_send(function.__name__.split(".")[0], args)
        return function(*args, **kwargs or {})


def _to_send(collective: str, args: tuple[Any, ...]) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if collective == "allgather_":
        return (ranks - 1) * _bytes(args[1])
    if collective == "scatter_":  # from its root alone
        return float(sum(_bytes(parts) - parts[rank].nbytes for parts in args[1] if parts))
    if collective == "allreduce_":  # in a ring: every part passes all other ranks to be summed, and again as a sum
        return 2 * (ranks - 1) / ranks * _bytes(args[0])
    raise NotImplementedError(f"{collective}: say here what a rank sends for it")


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def local_loss(image: Tensor, text: Tensor, scale: float) -> Tensor:
    """OpenCLIP's loss with --local-loss and --gather-with-grad: the cross-entropies of this rank's rows, [n, d].

    Source: ClipLoss in open_clip/loss.py, 3.3. Autograd sends the gradients of the gathered features back.
    """
    images, texts = (torch.cat(all_gather(features)) for features in (image, text))  # type: ignore[no-untyped-call]
    labels = torch.arange(len(image)) + len(image) * dist.get_rank()
    losses = cross_entropy(scale * image @ texts.T, labels) + cross_entropy(scale * text @ images.T, labels)
    return losses / 2


def _step(method: str, rows: int, dim: int, weights: int) -> Callable[[], None]:
    """A call that takes a step with this rank's `rows` samples."""
    if method == GRADIENTS:
        encoder = DistributedDataParallel(nn.Linear(1, weights, bias=False))
        return lambda: encoder(torch.ones(1, 1)).sum().backward()
    first, second = (normalize(torch.randn(rows, dim)).requires_grad_() for _ in range(2))
    if method == LOCAL_LOSS:
        return lambda: local_loss(first, second, 1 / 0.07).backward()  # type: ignore[no-untyped-call]
    objective = create_objective(method, "bimodal")
    state = {path: torch.full((rows,), initial) for path, initial in objective.fields.items()}
    state["visits"] = torch.zeros(rows, dtype=torch.int64)

    def step() -> None:
        objective(first, second, state, Progress(step=0, steps_per_epoch=1)).loss.backward()

    return step


def _count(step: Callable[[], None], steps: int) -> dict[str, float]:
    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    before = _carried()
    dist.barrier()  # nothing is sent before all have read
    with Sent() as sent:
        for _ in range(steps):
            step()
    dist.barrier()
    return {"payload": sent.bytes / steps, "wire": (_carried() - before) / steps / dist.get_world_size()}


def _carried() -> int:
    """Bytes that the loopback has carried."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[1])


def _run(rank: int, ranks: int, folder: str, sizes: Sequence[int], methods: Sequence[str]) -> None:
    torch.set_num_threads(1)
    batch, dim, weights, steps = sizes
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting_point", rank=rank, world_size=ranks)
    found = {method: _count(_step(method, batch // ranks, dim, weights), steps) for method in methods}
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def main(ranks: int, sizes: Sequence[int], methods: Sequence[str]) -> None:
    """Print what `ranks` processes send; sizes: batch, dim, weights, steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with TemporaryDirectory() as folder:
        spawn(_run, (ranks, folder, sizes, methods), ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:6]]
    main(numbers[0], numbers[1:], sys.argv[6:])
