"""What ranks exchange, by a group of one: NCCL takes no second rank on the same GPU."""

from __future__ import annotations

import copy
import os
import socket
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from thermopile.pipeline.batch import Batch
from thermopile.state_store.ranks import TorchRanks
from thermopile.trainer.config import load_config
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.encoders.data_parallel import encoders_of_a_step
from thermopile.trainer.heartbeats import Heartbeats
from thermopile.trainer.step_clock import StepClock
from thermopile.trainer.world import World

from on_gpu.findings import Findings
from on_gpu.steps import IMAGE, SMALL_IMAGE

BEATS = 3.0
"""Seconds of heartbeats."""


def measure(found: Findings) -> None:
    """DDP with its hook, synchronised batch norms, gathered bytes and heartbeats."""
    device = torch.device(found.device, 0) if found.device == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if found.device == "cuda" else "gloo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # which heartbeats read
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    control = TorchRanks(dist.new_group(backend="gloo"))
    with Heartbeats(control).beating():
        until = time.monotonic() + BEATS
        _encoders(found, device, World(control=control))
        values = torch.randn(2, 8, 5, device=device)
        received = torch.empty(1, 2, 8, 20, dtype=torch.uint8, device=device)
        dist.all_gather(list(received), values.view(torch.uint8))  # as GlobalBatch.gather does
        equal = torch.equal(received.view(torch.float32)[0], values)
        found.check("gathered bytes are what was sent", "equal", "equal" if equal else "different", equal)
        time.sleep(max(0.0, until - time.monotonic()))
    dist.destroy_process_group()
    found.note(f"Heartbeats were exchanged for {BEATS:g} s or more, and no rank was lost.")


def _encoders(found: Findings, device: torch.device, world: World) -> None:
    """Gradients of one step with and without DDP: a group of one averages nothing."""
    side = 32 if found.small else 224
    model = {"dim": 16, "image": SMALL_IMAGE if found.small else IMAGE}
    config = load_config({"device": found.device, "model": model, "data": {"image_size": side},
                          "deterministic": True, "cudnn_benchmark": False, "channels_last": False})  # fmt: skip
    plain = Encoders.create(config.model, "unimodal", side, None).to(device)
    shared = copy.deepcopy(plain)
    # Two ranks, as far as the encoders are told; the group has one.
    parallel = encoders_of_a_step(shared, config, device, replace(world, size=2), StepClock(device))
    pixels = torch.randn(2, 8, 3, side, side, device=device)
    for encoders in (plain, parallel):
        features = encoders(Batch(torch.arange(8), tuple(pixels), None))
        (features.first * torch.linspace(0, 1, 16, device=device)).sum().backward()
    worst = max(float((one.grad - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-6))
                for one, other in zip(shared.parameters(), plain.parameters(), strict=True)
                if one.grad is not None and other.grad is not None)  # fmt: skip
    found.check("gradients with DDP and synchronised batch norms, from those without", "≤ 1 %", f"{worst:.2%}",
                worst <= 0.01)  # fmt: skip
