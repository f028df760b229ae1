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
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.opening import Dataset
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


class Took(NamedTuple):
    """A run of a few steps."""

    peak_mb: float
    seconds: float
    """Median time of a step, without the first one."""


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Peaks of a batch as large as a piece and of the large one in pieces; times of one batch whole and in pieces."""
    convert(GlyphSource(0), directory / "glyphs", ConvertSettings())
    small = isolated(_train, directory, sizes, sizes.piece, 0)
    pieces = isolated(_train, directory, sizes, sizes.batch, sizes.piece)
    whole, cut = [], []
    for _ in counted("rounds", sizes.rounds):
        whole.append(isolated(_train, directory, sizes, sizes.timed_batch, 0))
        cut.append(isolated(_train, directory, sizes, sizes.timed_batch, sizes.piece))
    pixels, features = sizes.batch * 3 * sizes.image_size**2 * 4, 2 * 2 * sizes.batch * sizes.dim * 4
    bound = small.peak_mb + (pixels + features + 2**28) / 1e6
    over = median(one.seconds / other.seconds for one, other in zip(cut, whole, strict=True))
    return Measured(
        f"{sizes.image}, {sizes.image_size} px, pairs, clip: {sizes.batch:,} in pieces of {sizes.piece}, on one thread",
        "what is allowed: the peak of a batch as large as a piece, pixels and features of the large one, 256 MiB",
        [
            Figure("peak_mb", "peak memory", "MB", pieces.peak_mb, bound, at_most=bound),
            Figure("small_mb", f"peak memory of batches of {sizes.piece}", "MB", small.peak_mb),
            Figure("step_s", f"a step of {sizes.timed_batch:,} in pieces, beside it at once", "s",
                   median(each.seconds for each in cut), median(each.seconds for each in whole)),
            Figure("over", "time in pieces over time at once", "×", over, at_most=1.5),
            Figure("whole_mb", f"peak memory of {sizes.timed_batch:,} at once", "MB",
                   max(each.peak_mb for each in whole)),
        ],
    )  # fmt: skip


def _train(directory: Path, sizes: Sizes, batch: int, piece: int) -> Took:
    """Take the first steps on the glyphs, in a process of its own."""
    import torch

    from thermopile.tools.bench.step import open_trainer

    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "batch_size": batch, "micro_batch": piece, "device": "cpu", "order": {"canonical_shards": 1},
        "checkpoint": {"every_minutes": 0}, "data": {"image_size": sizes.image_size, "workers": 1},
        "objective": {"name": "clip"}, "model": {"dim": sizes.dim, "image": {"name": sizes.image}},
    }  # fmt: skip
    with (
        TemporaryDirectory(dir=directory) as run,
        open_trainer(Dataset(directory / "glyphs"), settings, sizes.steps, Path(run)) as trainer,
    ):
        trainer.train(should_stop=lambda: trainer.run.steps_done >= sizes.steps)
        lines = trainer.run.directory.metrics_file.read_text().splitlines()
    return Took(peak_memory() / 1e6, median(json.loads(line)["step_seconds"] for line in lines[1:]))


_SMALL = {"batch": 64, "piece": 16, "timed_batch": 64, "steps": 2, "rounds": 1}
PARTS = {
    "built_in": Part(measure, Sizes("conv", 32), Sizes("conv", 32, **_SMALL)),
    "resnet": Part(measure, Sizes("hf:resnet-18", 96, timed_batch=1024, steps=2, rounds=2),
                   Sizes("hf:resnet-18", 32, **_SMALL)),
}  # fmt: skip

if __name__ == "__main__":
    script(__doc__, PARTS, "torch")()
