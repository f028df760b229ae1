"""Overhead of a step of moco_v3 over the sum of its parts.

\b
step      encoders, keys, objective, backward and the moving average, as a run makes them
encoders  forward and backward of both views by the trained network alone
keys      forward of both views by the momentum network, and its moving average
products  of queries and keys, and of their weights and keys, in both directions
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import normalize

from thermopile.pipeline.batch import Batch
from thermopile.trainer.config import EncoderConfig, ModelConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.objectives import Progress, create_objective

from .harness import Figure, Measured, Part, script, take_turns, timed


@dataclass(frozen=True)
class Sizes:
    """A batch, and encoders for it."""

    batch: int = 256
    image_size: int = 32
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
    encoders = Encoders.create(config, "unimodal", sizes.image_size, None)
    online = Encoders(encoders.image, None, encoders.predictor)
    views = tuple(torch.randn(sizes.batch, 3, sizes.image_size, sizes.image_size) for _ in range(2))
    batch = Batch(torch.arange(sizes.batch), views)
    objective, progress = create_objective("moco_v3", "unimodal"), Progress(0, 1)
    queries, keys = (normalize(torch.randn(2, sizes.batch, sizes.dim), dim=2) for _ in range(2))

    def step() -> None:
        features = encoders(batch)
        objective(features.first, features.second, {}, progress, features.keys).loss.backward()
        encoders.move_momentum(0.99)

    def of_encoders() -> None:
        features = online(batch)
        torch.autograd.backward([features.first, features.second], list(queries))

    @torch.no_grad()
    def of_keys() -> None:
        assert encoders.momentum is not None
        normalize(encoders.momentum(torch.cat(views)), dim=1)
        encoders.move_momentum(0.99)

    @torch.no_grad()
    def products() -> None:
        for direction in (0, 1):
            (queries[direction] @ keys[1 - direction].T) @ keys[1 - direction]

    calls = {"step": step, "encoders": of_encoders, "keys": of_keys, "products": products}
    took = take_turns("rounds", {name: lambda _, call=call: timed(call) for name, call in calls.items()}, sizes.rounds)
    parts = [sum(of_round) for of_round in zip(*(took[name] for name in calls if name != "step"), strict=True)]
    over = [whole / sum_ for whole, sum_ in zip(took["step"], parts, strict=True)]
    return Measured(
        f"a step of moco_v3, batch {sizes.batch}, {sizes.image_size} px, conv of width {sizes.width} with a head of "
        f"{sizes.head_width} units, {torch.get_num_threads()} threads; medians of {sizes.rounds} rounds",
        "its parts, each alone",
        [
            Figure(
                "step_ms", "step, beside the sum of its parts", "ms", 1e3 * median(took["step"]), 1e3 * median(parts)
            ),
            Figure("over", "step over its parts", "×", median(over), at_most=1.05),
            *(Figure(f"{name}_ms", name, "ms", 1e3 * median(took[name])) for name in calls if name != "step"),
        ],
    )


PARTS = {"step": Part(measure, Sizes(), Sizes(batch=8, dim=8, width=2, head_width=8, rounds=3))}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch")()
