"""A network with batch norms, and what a process of its own does with it on a GPU: it imports this file."""

import torch
import torch.distributed as dist
from torch import nn

from thermopile.trainer.encoders.synced_batch_norm import SyncedBatchNorm, synchronise_batch_norms


def network(dtype):
    """Norms of pixels, of features and of a matrix without weights."""
    torch.manual_seed(0)
    # The first norm gets pixels, which need no gradient; the last a matrix, as in a projection head, without weights.
    layers = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6),
        nn.BatchNorm1d(6, affine=False),
    )  # fmt: skip
    layers(torch.ones(2, 3, 8, 8))
    return layers.to("cuda", dtype)


def step(layers, pictures):
    """Forward and backward pass; the loss is a sum, so that ranks' gradients add up."""
    outputs = layers(pictures)
    (outputs * torch.linspace(0, 1, 6, device="cuda", dtype=outputs.dtype)).pow(2).sum().backward()
    return outputs.detach()


def of_a_rank(rank, ranks, port, memory_format, pictures, folder):
    """One of several processes: its outputs, and all ranks' gradients and statistics, go into `folder`."""
    # gloo, which also serves two ranks on one GPU.
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    layers = network(torch.float64).to(memory_format=memory_format)
    synchronise_batch_norms(layers)
    assert type(layers[0]) is SyncedBatchNorm
    own = pictures.split([5, 7])[rank].cuda().contiguous(memory_format=memory_format)
    outputs = step(layers, own)
    for parameter in layers.parameters():
        dist.all_reduce(parameter.grad)
    state = {name: value.cpu() for name, value in layers.state_dict().items()}
    gradients = {f"gradient of {name}": weights.grad.cpu() for name, weights in layers.named_parameters()}
    torch.save({"outputs": outputs.cpu(), **state, **gradients}, folder / f"{rank}.pt")
    dist.destroy_process_group()
