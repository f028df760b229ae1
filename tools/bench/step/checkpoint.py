"""How long a checkpoint holds the training thread up: the step that ends with one, beside those before it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ....trainer.checkpoint import latest_checkpoint
from ....trainer.loop import Trainer
from ..figure import Figure
from ..measured import Measured
from ..progress import counted
from .sizes import CheckpointSizes
from .training import BatchesInMemory, open_trainer, run

_WRITTEN_WITHIN_SECONDS = 120.0


@dataclass(frozen=True)
class Seconds:
    """One checkpoint."""

    quiet: float
    """A step while nothing is written."""
    held_up: float
    """What the step that ends with the checkpoint takes more."""
    slowed: float
    """What it and the steps after it take more, which share the cores with the writing thread."""
    saved: float
    """torch.save of the same weights in the training thread, not synced."""


def measure(sizes: CheckpointSizes, directory: Path) -> Measured:
    """Checkpoints of a run, and once each is written torch.save of the same."""
    settings = {"checkpoint": {"every_steps": sizes.every_steps, "every_minutes": 0, "keep_every": 0}}
    with open_trainer(sizes, directory, settings) as trainer:
        checkpoints, saved = counted("checkpoints", 1 + sizes.checkpoints), []

        def save_once_written(done: int, batches: BatchesInMemory) -> None:
            if done > sizes.every_steps and done % sizes.every_steps == sizes.during_steps:
                next(checkpoints)
                _wait_until_written(trainer, done - sizes.during_steps)
                saved.append(_seconds_to_save(trainer, directory / "saved.pt"))

        seconds = run(trainer, sizes.steps, save_once_written)
        next(checkpoints, None)
        parameters = sum(parameter.numel() for parameter in trainer.encoders.parameters())
    megabytes = (directory / "saved.pt").stat().st_size / 1e6
    return Measured(
        f"{sizes.checkpoints} checkpoints, after one to warm up, of {parameters / 1e6:,.1f} million parameters with "
        f"AdamW, {megabytes:,.0f} MB, and the state of {sizes.samples:,} samples; {sizes.image}, batch {sizes.batch}, "
        f"{torch.get_num_threads()} threads of torch",
        "torch.save of the same weights and AdamW in the training thread, without the state, not synced",
        _figures([seconds_of(seconds, number, sizes, saved) for number in range(2, 2 + sizes.checkpoints)]),
    )


def seconds_of(seconds: Sequence[float], number: int, sizes: CheckpointSizes, saved: Sequence[float]) -> Seconds:
    """What a checkpoint cost.

    seconds: of each step. number: of the checkpoint, from 1. saved: seconds of torch.save after each checkpoint.
    """
    ends = number * sizes.every_steps - 1  # the step at whose end it is
    quiet = median(seconds[ends - sizes.quiet_steps : ends])
    during = seconds[ends + 1 : ends + 1 + sizes.during_steps]
    held_up = seconds[ends] - quiet  # by noise also below 0: cut off there, the medians would be too high
    return Seconds(quiet, held_up, held_up + sum(during) - len(during) * quiet, saved[number - 1])


def _figures(found: Sequence[Seconds]) -> tuple[Figure, ...]:
    quiet, saved = median(each.quiet for each in found), median(each.saved for each in found)
    held_up = [each.held_up for each in found]
    in_steps = [each.held_up / each.quiet for each in found]
    return (
        Figure("held_up_ms", "held up", "ms", 1e3 * median(held_up), 1e3 * saved),
        Figure("held_up_steps", "held up, in steps", "steps", median(in_steps), saved / quiet, at_most=1),
        Figure("held_up_worst_steps", f"worst of {len(found)}", "steps", max(in_steps)),
        Figure("slowed_ms", "slowed, cores shared", "ms", 1e3 * median(each.slowed for each in found), 1e3 * saved),
        Figure("step_ms", "step", "ms", 1e3 * quiet),
    )


def _wait_until_written(trainer: Trainer, step: int) -> None:
    """Raise RuntimeError where the checkpoint is not there within two minutes."""
    deadline = time.monotonic() + _WRITTEN_WITHIN_SECONDS
    while (latest := latest_checkpoint(trainer.run_directory.checkpoints)) is None or latest.name != f"step-{step}":
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the checkpoint of step {step} was not written within {_WRITTEN_WITHIN_SECONDS:.0f} s; "
                "choose a faster disk with --dir"
            )
        time.sleep(0.01)


def _seconds_to_save(trainer: Trainer, path: Path) -> float:
    began = time.perf_counter()
    torch.save({"encoders": trainer.encoders.state_dict(), "optimizer": trainer.optimizer.state_dict()}, path)
    took = time.perf_counter() - began
    os.sync()  # or the next checkpoint would wait for it
    return took
