"""Memory and time of a batch that is encoded in pieces.

\b
built_in  the small encoders on glyphs of 32 px, batches of 8,192 in pieces of 256
resnet    a ResNet-18 on the same pictures at 96 px; the whole batch would need some 80 GB, so time is compared at 1,024
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource

from .harness import Figure, Measured, Part, counted, isolated, peak_memory, script


@dataclass(frozen=True)
class Sizes:
    """A large batch, its pieces, and the encoder."""

    image: str
    image_size: int
    batch: int = 8192
    piece: int = 256
    timed_batch: int = 8192
    """The batch at which time is compared: one that fits into memory at once."""
    steps: int = 3
    rounds: int = 3
    dim: int = 64


@dataclass(frozen=True)
class Took:
    """A run of a few steps."""

    peak_bytes: int
    seconds: float
    """Median time of a step, without the first one."""


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Peaks of a batch as large as a piece and of the large one in pieces; times of one batch whole and in pieces."""
    convert(GlyphSource(0), directory / "glyphs", ConvertSettings())
    asked = {
        "small": (sizes.piece, 0),
        "pieces": (sizes.batch, sizes.piece),
        "timed whole": (sizes.timed_batch, 0),
        "timed pieces": (sizes.timed_batch, sizes.piece),
    }
    took: dict[str, list[Took]] = {name: [] for name in asked}
    for number in counted("rounds", sizes.rounds):
        for name, (batch, piece) in asked.items():
            if name.startswith("timed") or number == 0:
                run = directory / f"{name} {number}"
                took[name].append(isolated(_train, directory / "glyphs", run, sizes, batch, piece))
    small, pieces = took["small"][0].peak_bytes, took["pieces"][0].peak_bytes
    pixels, features = sizes.batch * 3 * sizes.image_size**2 * 4, 2 * 2 * sizes.batch * sizes.dim * 4
    bound = small + pixels + features + 2**28
    whole, cut = (median(each.seconds for each in took[f"timed {name}"]) for name in ("whole", "pieces"))
    over = [one.seconds / other.seconds for one, other in zip(took["timed pieces"], took["timed whole"], strict=True)]
    return Measured(
        f"{sizes.image}, {sizes.image_size} px, pairs, clip: {sizes.batch:,} in pieces of {sizes.piece}, on one thread",
        "what is allowed: the peak of a batch as large as a piece, pixels and features of the large one, 256 MiB",
        [
            Figure("peak_mb", "peak memory", "MB", pieces / 1e6, bound / 1e6, at_most=bound / 1e6),
            Figure("small_mb", f"peak memory of batches of {sizes.piece}", "MB", small / 1e6),
            Figure("step_s", f"a step of {sizes.timed_batch:,} in pieces, beside it at once", "s", cut, whole),
            Figure("over", "time in pieces over time at once", "×", median(over), at_most=1.5),
            Figure("whole_mb", f"peak memory of {sizes.timed_batch:,} at once", "MB",
                   max(each.peak_bytes for each in took["timed whole"]) / 1e6),
        ],
    )  # fmt: skip


def _train(data: Path, out: Path, sizes: Sizes, batch: int, piece: int) -> Took:
    import torch

    from thermopile.trainer.build import resolve
    from thermopile.trainer.config import load_config
    from thermopile.trainer.loop import Trainer
    from thermopile.trainer.run_directory import RunDirectory

    torch.set_num_threads(1)
    dataset = Dataset(data)
    tree: dict[str, Any] = {
        "epochs": -(-sizes.steps * batch // dataset.n) + 1, "batch_size": batch, "micro_batch": piece,
        "device": "cpu", "canonical_shards": 1, "checkpoint": {"every_minutes": 0},
        "data": {"path": str(data), "image_size": sizes.image_size, "workers": 1},
        "objective": {"name": "clip"},
        "model": {"dim": sizes.dim, "image": {"name": sizes.image}},
    }  # fmt: skip
    run = RunDirectory(out)
    with Trainer.open(resolve(load_config(tree), dataset), run) as trainer:
        trainer.run(should_stop=lambda: trainer.steps_done >= sizes.steps)
    seconds = [json.loads(line)["step_seconds"] for line in run.metrics_file.read_text().splitlines()]
    return Took(peak_memory(), median(seconds[1:]))


PARTS = {
    "built_in": Part(measure, Sizes("conv", 32), Sizes("conv", 32, 64, 16, 64, steps=2, rounds=1)),
    "resnet": Part(
        measure,
        Sizes("hf:resnet-18", 96, timed_batch=1024, steps=2, rounds=2),
        Sizes("hf:resnet-18", 32, 64, 16, 64, steps=2, rounds=1),
    ),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch")()
