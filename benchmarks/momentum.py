"""Overhead of a step of moco_v3 over the sum of its parts, each alone: the trained network, its keys, the products."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import normalize

from thermopile.pipeline.batch import Batch
from thermopile.trainer.config import EncoderConfig, ModelConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.objectives import Progress, create_objective

from .harness import Figure, Measured, Part, script, take_turns, timed


@dataclass(frozen=True)
class Sizes:
    """A batch of pictures of 32 pixels, and encoders for it."""

    batch: int = 256
    dim: int = 256
    width: int = 64
    """Channels of the first convolution."""
    head_width: int = 1024
    rounds: int = 60


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Turns of the step and its parts."""
    torch.manual_seed(0)
    conv = EncoderConfig(name="conv", config={"width": sizes.width, "batch_norm": True})
    config = ModelConfig(
        dim=sizes.dim, head="moco_v3", head_width=sizes.head_width, momentum=0.99, predictor="moco_v3", image=conv
    )
    encoders = Encoders.create(config, "unimodal", 32, None)
    trained, momentum = Encoders(encoders.image, None, encoders.predictor), encoders.momentum
    assert momentum is not None
    views = (torch.randn(sizes.batch, 3, 32, 32), torch.randn(sizes.batch, 3, 32, 32))
    batch, objective = Batch(torch.arange(sizes.batch), views), create_objective("moco_v3", "unimodal")
    queries, keys = (normalize(torch.randn(2, sizes.batch, sizes.dim), dim=2) for _ in range(2))

    def step() -> None:
        features = encoders(batch)
        objective(features.first, features.second, {}, Progress(0, 1), features.keys).loss.backward()
        encoders.move_momentum(0.99)

    def parts() -> None:
        features = trained(batch)
        torch.autograd.backward([features.first, features.second], list(queries))
        with torch.no_grad():
            normalize(momentum(torch.cat(views)), dim=1)
            encoders.move_momentum(0.99)
            for direction in (0, 1):
                (queries[direction] @ keys[1 - direction].T) @ keys[1 - direction]

    turns = {"step": lambda _: 1e3 * timed(step), "parts": lambda _: 1e3 * timed(parts)}
    took = take_turns("rounds", turns, sizes.rounds)
    return Measured(
        f"a step of moco_v3, batch {sizes.batch}, 32 px, conv of width {sizes.width} with a head of "
        f"{sizes.head_width} units, {torch.get_num_threads()} threads; medians of {sizes.rounds} rounds",
        "its parts, each alone",
        [Figure.of_rounds("step_ms", "step", "ms", took["step"], took["parts"], ratio_at_least=1 / 1.05)],
    )


PARTS = {"step": Part(measure, Sizes(), Sizes(batch=8, dim=8, width=2, head_width=8, rounds=3))}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch")()
