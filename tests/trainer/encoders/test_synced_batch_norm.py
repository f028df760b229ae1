"""Batch norms over all ranks: what one rank with all samples computes, without a wait."""

import copy
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from thermopile.trainer.encoders.synced_batch_norm import SyncedBatchNorm, _Normalised, synchronise_batch_norms

from support.synced_norms import network, of_a_rank, step
from support.waits import no_waits

RANKS = 2


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_two_ranks_with_different_shares_have_the_outputs_gradients_and_statistics_of_one(tmp_path, memory_format):
    pictures = torch.randn(12, 3, 8, 8, dtype=torch.float64)
    alone = network(torch.float64)
    outputs = step(alone, pictures.cuda())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(of_a_rank, (RANKS, port, memory_format, pictures, tmp_path), nprocs=RANKS)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS))
    together = torch.cat([first.pop("outputs"), second.pop("outputs")])
    torch.testing.assert_close(together, outputs.cpu())
    expected = {name: value.cpu() for name, value in alone.state_dict().items()}
    expected |= {f"gradient of {name}": weights.grad.cpu() for name, weights in alone.named_parameters()}
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)


@pytest.mark.gpu
def test_a_norm_does_not_wait_for_the_gpu():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        layers, pictures = network(torch.float32), torch.randn(4, 3, 8, 8, device="cuda")
        synchronise_batch_norms(layers)
        step(layers, pictures)  # the first one sets up the communication
        with no_waits():
            step(layers, pictures)
    finally:
        dist.destroy_process_group()


def test_a_norm_of_pixels_exchanges_nothing_in_the_backward_pass(monkeypatch):
    def reduce(gradient, inputs, mean, inverse_deviation, weight, of_inputs, of_weight, of_bias):
        assert (of_inputs, of_weight, of_bias) == (False, True, True)
        return None, None, torch.ones(3), torch.zeros(3)  # what torch's kernel for GPUs gives then

    monkeypatch.setattr(torch, "batch_norm_backward_reduce", reduce)
    monkeypatch.setattr(dist, "all_reduce", lambda values: pytest.fail("the ranks would wait for each other"))
    context = SimpleNamespace(saved_tensors=[torch.ones(3)] * 5, needs_input_grad=[False, True, True] + [False] * 4)
    of_pixels, of_weight, of_bias, *rest = _Normalised.backward(context, torch.ones(2, 3, 4, 4))
    assert of_pixels is None
    assert (of_weight.tolist(), of_bias.tolist()) == ([1, 1, 1], [0, 0, 0])
    assert rest == [None] * 4


def test_a_norm_without_weights_has_no_gradients_of_weights(monkeypatch):
    # What torch's kernel for GPUs gives then.
    given = torch.ones(3), torch.zeros(3), torch.empty(0), torch.empty(0)
    monkeypatch.setattr(torch, "batch_norm_backward_reduce", lambda *words: given)
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", lambda gradient, *words: gradient)
    monkeypatch.setattr(dist, "all_reduce", lambda values: None)
    saved = [torch.ones(3), None, *[torch.ones(3)] * 3]
    context = SimpleNamespace(saved_tensors=saved, needs_input_grad=[True] + [False] * 6)
    of_inputs, *rest = _Normalised.backward(context, torch.ones(2, 3, 4, 4))
    assert of_inputs.shape == (2, 3, 4, 4)
    assert rest == [None] * 6


def test_conversion_keeps_names_weights_and_what_a_norm_does_in_evaluation():
    norm = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    norm(torch.randn(5, 3))
    norm.eval()
    converted = copy.deepcopy(norm)
    synchronise_batch_norms(converted)
    assert type(converted[1]) is SyncedBatchNorm
    assert converted.state_dict().keys() == norm.state_dict().keys()
    inputs = torch.randn(5, 3)
    assert torch.equal(converted(inputs), norm(inputs))
