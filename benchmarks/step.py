"""How long a checkpoint holds training up: the step that ends with one, beside those before it.

What a step itself costs, and what of it is not computation, `thermopile bench step` says.

\b
checkpoint   the embedded example's encoders, 10,000 samples
large_model  the parameters of a ResNet-50: 300 MB with AdamW
large_state  10⁷ samples: 320 MB of state
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from thermopile.pipeline.batch import Batch
from thermopile.pipeline.loading import Loader
from thermopile.tools.bench.step import open_trainer, synthetic_dataset
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint
from thermopile.trainer.config.layers import merge, read_preset
from thermopile.trainer.loop import Trainer

from .harness import Figure, Measured, Part, counted, script, timed


@dataclass(frozen=True)
class Sizes:
    """Checkpoints, each with steps before it that nothing disturbs and steps after it while it is written."""

    image: str = "conv"
    device: str = "cpu"
    batch: int = 256
    samples: int = 10_000
    checkpoints: int = 20
    quiet_steps: int = 10
    during_steps: int = 20
    warm_up_steps: int = 3

    @property
    def every_steps(self) -> int:
        """From one checkpoint to the next."""
        return self.during_steps + self.warm_up_steps + self.quiet_steps + 1

    @property
    def steps(self) -> int:
        """The first checkpoint warms up, and what follows the last one is part of it."""
        return (1 + self.checkpoints) * self.every_steps + self.during_steps


@dataclass(frozen=True)
class Seconds:
    """One checkpoint."""

    quiet: float
    """A step while nothing is written."""
    held_up: float
    """What the step that ends with the checkpoint takes more."""
    slowed: float
    """What it and the steps after it take more, which share the cores with the writer."""
    saved: float
    """torch.save of the same weights in the training thread, not synced."""


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Checkpoints of a run, and once each is written torch.save of the same."""
    dataset = synthetic_dataset(directory / "dataset", sizes.samples)
    settings = read_preset("glyphs")
    merge(settings, {
        "data": {"loader": "synthetic"}, "device": sizes.device, "batch_size": sizes.batch,
        "model": {"image": {"name": sizes.image}},
        "checkpoint": {"every_steps": sizes.every_steps, "every_minutes": 0, "keep_every": 0},
    })  # fmt: skip
    with open_trainer(dataset, settings, sizes.steps, directory) as trainer:
        progress, saved = counted("checkpoints", 1 + sizes.checkpoints), []

        def save_once_written(done: int) -> None:
            if done > sizes.every_steps and done % sizes.every_steps == sizes.during_steps:
                next(progress)
                _wait_until_written(trainer, done - sizes.during_steps)
                saved.append(_seconds_to_save(trainer, directory / "saved.pt"))

        seconds = run(trainer, sizes.steps, save_once_written)
        next(progress, None)
        parameters = sum(parameter.numel() for parameter in trainer.run.encoders.parameters())
    first, *found = (seconds_of(seconds, number, sizes, saved) for number in range(1, 2 + sizes.checkpoints))
    quiet, save = median(each.quiet for each in found), median(each.saved for each in found)
    held_up, in_steps = [each.held_up for each in found], [each.held_up / each.quiet for each in found]
    slowed = median(each.slowed for each in found)
    return Measured(
        f"{sizes.checkpoints} checkpoints, after one to warm up, of {parameters / 1e6:,.1f} million parameters with "
        f"AdamW, {(directory / 'saved.pt').stat().st_size / 1e6:,.0f} MB, and the state of {dataset.n:,} samples; "
        f"{sizes.image} on {sizes.device}, batch {sizes.batch}, {torch.get_num_threads()} threads of torch",
        "torch.save of the same weights and AdamW in the training thread, without the state, not synced",
        (
            Figure("held_up_ms", "held up", "ms", 1e3 * median(held_up), 1e3 * save),
            Figure("held_up_steps", "held up, in steps", "steps", median(in_steps), save / quiet, at_most=1),
            Figure("held_up_worst_steps", f"worst of {len(found)}", "steps", max(in_steps)),
            Figure("first_held_up_ms", "the first, held up", "ms", 1e3 * first.held_up),
            Figure("slowed_ms", "slowed, cores shared", "ms", 1e3 * slowed, 1e3 * save),
            Figure("step_ms", "step", "ms", 1e3 * quiet),
        ),
    )


def seconds_of(seconds: Sequence[float], number: int, sizes: Sizes, saved: Sequence[float]) -> Seconds:
    """What checkpoint `number`, from 1, cost.

    seconds: of each step. saved: seconds of torch.save after each checkpoint.
    """
    ends = number * sizes.every_steps - 1  # the step at whose end it is
    quiet = median(seconds[ends - sizes.quiet_steps : ends])
    during = seconds[ends + 1 : ends + 1 + sizes.during_steps]
    held_up = seconds[ends] - quiet  # by noise also below 0: cut off there, the medians would be too high
    return Seconds(quiet, held_up, held_up + sum(during) - len(during) * quiet, saved[number - 1])


def run(trainer: Trainer, steps: int, after_step: Callable[[int], None] = lambda done: None) -> list[float]:
    """Train, and return the seconds of each of the first `steps` steps.

    Calls after_step with the steps done while the trainer waits for its next batch; its time is not counted.
    """
    trainer.run.loader = timed_loader = Timed(trainer.run.loader, after_step)  # type: ignore[assignment]
    # The time of a step is known when the next batch is asked for, so one more step is made.
    trainer.train(should_stop=lambda: len(timed_loader.seconds) >= steps)
    return timed_loader.seconds[:steps]


class Timed:
    """Takes a loader's place: the same batches, and the seconds of each step."""

    def __init__(self, loader: Loader, after_step: Callable[[int], None]) -> None:
        self._loader, self._after_step = loader, after_step
        self.seconds: list[float] = []
        """From handing out a batch to the request for the next one."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the loader's batches."""
        for batch in self._loader.epoch(epoch, first_step):
            began = time.perf_counter()
            yield batch
            self.seconds.append(time.perf_counter() - began)
            self._after_step(len(self.seconds))


def _wait_until_written(trainer: Trainer, step: int) -> None:
    """Raise RuntimeError where the checkpoint is not there within two minutes."""
    deadline = time.monotonic() + 120
    while (latest := latest_checkpoint(trainer.run.directory.checkpoints)) is None or latest.name != f"step-{step}":
        if time.monotonic() > deadline:
            raise RuntimeError(f"the checkpoint of step {step} was not written in two minutes; choose another --dir")
        time.sleep(0.01)


def _seconds_to_save(trainer: Trainer, path: Path) -> float:
    state = {"encoders": trainer.run.encoders.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    seconds = timed(torch.save, state, path)
    os.sync()  # or the next checkpoint would wait for it
    return seconds


_SMALL = Sizes(batch=32, samples=128, checkpoints=1, quiet_steps=2, during_steps=2, warm_up_steps=1)
_RESNET = Sizes("hf:resnet-50", batch=32, checkpoints=10, quiet_steps=5, during_steps=10)
PARTS = {
    "checkpoint": Part(measure, Sizes(), _SMALL),
    "large_model": Part(measure, _RESNET, _SMALL),
    "large_state": Part(measure, Sizes(samples=10**7), _SMALL),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "torch", "zarr", "icechunk")()
