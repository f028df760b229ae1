"""A step of the trainer at growing batch sizes, until the memory is full: time, memory, and the objective's share."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from thermopile.pipeline.batch import Batch
from thermopile.tools.bench.step import is_out_of_memory, open_trainer, synthetic_dataset
from thermopile.trainer.config.layers import merge
from thermopile.trainer.loop import Trainer
from thermopile.trainer.metrics.step_clock import Mark, Seconds, StepClock

from .findings import Findings
from .timing import begin_peak, gigabytes, seconds_of

IMAGE, TEXT = {"name": "hf:resnet-50"}, {"name": "hf:distilbert"}
VIT = {"name": "hf:vit-b", "config": {"patch_size": 32}}
SMALL_IMAGE = {"name": "hf:resnet-18", "config": {"hidden_sizes": [8, 8, 8, 8], "embedding_size": 8}}
SMALL_TEXT = {"name": "hf:distilbert", "config": {"dim": 24, "n_layers": 1, "hidden_dim": 24}}
SMALL_VIT = {"name": "hf:vit-b", "config": {"patch_size": 8, "hidden_size": 24, "num_hidden_layers": 1,
                                           "num_attention_heads": 2, "intermediate_size": 24}}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "compiled": {"precision": "bf16", "compile": True},
    "checkpointed": {"precision": "bf16", "model": {"activation_checkpointing": True}},
    "pieces": {"precision": "bf16", "micro_batch": 8},
    "vit": {"precision": "bf16"},
    "deterministic": {"precision": "bf16", "deterministic": True},
}
ASKED_AT = 1024
"""The batch size at which the objective's share is asked for."""
LARGEST = 32_768
MAX_SHARE = 0.03


def settings(device: str, small: bool, name: str = "") -> dict[str, Any]:
    """Return settings of a training of ResNet-50, or ViT-B/32, and DistilBERT on random pairs of 224 pixels.

    name: one of CONFIGURATIONS.
    """
    vit = name == "vit"
    image, text = (SMALL_VIT if vit else SMALL_IMAGE, SMALL_TEXT) if small else (VIT if vit else IMAGE, TEXT)
    asked = {
        "device": device, "batch_size": 16, "log_every": 1_000_000,
        "checkpoint": {"every_minutes": 0}, "data": {"loader": "synthetic", "image_size": 32 if small else 224},
        "model": {"dim": 8 if small else 512, "image": image, "text": text},
    }  # fmt: skip
    merge(asked, CONFIGURATIONS.get(name, {}))
    if small:
        asked["compile"] = False  # a compiler takes longer than all else
    return asked


@contextmanager
def trainer_of(asked: dict[str, Any], folder: Path) -> Iterator[Trainer]:
    """Open a trainer whose steps the caller makes, of any batch size; its files are gone afterwards."""
    with TemporaryDirectory(dir=folder) as temporary:
        dataset = synthetic_dataset(Path(temporary, "dataset"), 4 * LARGEST)
        with open_trainer(dataset, asked, 1000, Path(temporary)) as trainer:
            yield trainer


class Steps:
    """Steps of one batch size on the same random batch, each with the ids of other samples than the one before.

    With `micro_batch` set, the batch is that of the settings.
    """

    def __init__(self, trainer: Trainer, batch_size: int) -> None:
        self._trainer, self._size, self._made = trainer, batch_size, 0
        device, side, tokenizer = (
            trainer.run.device,
            trainer.run.config.data.image_size,
            trainer.run.dataset.index.tokenizer,
        )
        assert tokenizer is not None
        self._tokens = torch.randint(tokenizer.vocab_size, (batch_size, tokenizer.context_length), device=device).int()
        self._tokens[:, -1] = tokenizer.end_id
        self._pixels = torch.randn(batch_size, 3, side, side, device=device)

    def __call__(self) -> None:
        """Make a step. The rows of the next one are gathered meanwhile."""
        self._trainer.run.store.prefetch(self._ids(self._made + 1))
        pieces = self._trainer.run.pieces
        parts = (each.chunk(pieces) for each in (self._ids(self._made), self._pixels, self._tokens))
        self._trainer.step(Batch(ids, (pixels,), tokens) for ids, pixels, tokens in zip(*parts, strict=True))
        self._made += 1

    def _ids(self, step: int) -> torch.Tensor:
        first = step * self._size % self._trainer.run.dataset.n
        return (first + torch.arange(self._size)) % self._trainer.run.dataset.n


def measure(found: Findings, name: str) -> None:
    """Double the batch until the memory is full; time the first, 1,024, and the largest that fits."""
    began = time.monotonic()
    sizes = [16, 32] if found.small else [2**power for power in range(7, LARGEST.bit_length())]
    with trainer_of(settings(found.device, found.small, name), found.folder) as trainer:
        if name == "compiled":  # compiling for each size would take minutes
            largest = found.kept("step-bf16", "largest", 256)
            sizes = [size for size in sizes if size <= largest][-2:][::-1]
            any(_row(found, trainer, size) for size in sizes)
            found.note(f"The trainer was made, compiled and timed in {time.monotonic() - began:.0f} s.")
            return
        largest = 0
        for size in sizes:
            if not _fits(trainer, size):
                found.note(f"A batch of {size:,} does not fit into the memory.")
                break
            if not largest:
                found.note(f"The trainer was made, and two steps, in {time.monotonic() - began:.1f} s.")
            largest = size
            found.keep("largest", largest)
            # At once: the memory may take longer to fill than there is time.
            if size in (sizes[0], ASKED_AT):
                _row(found, trainer, size, judged=name == "bf16")
        if largest not in (0, sizes[0], ASKED_AT):
            _row(found, trainer, largest)


def _fits(trainer: Trainer, size: int) -> bool:
    try:
        step = Steps(trainer, size)
        for _ in range(2):
            step()
        trainer.run.log.flush()  # waits for the device; and the log would keep each step's loss with what it refers to
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        trainer.optimizer.zero_grad()
        begin_peak(trainer.run.device.type)  # gives back what torch has cached for another size
    return True


def _row(found: Findings, trainer: Trainer, size: int, *, judged: bool = False) -> bool:
    """Time a batch size; return whether it fits. The peak is that of the whole process.

    judged: whether the objective's share is asked for.
    """
    begin_peak(found.device)
    try:
        step = Steps(trainer, size)
        with _timed_objective(trainer) as objective_seconds:
            seconds = seconds_of(step, 5, found.device)
            share = objective_seconds() / seconds
        trainer.run.log.flush()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        trainer.optimizer.zero_grad()
        gc.collect()
        found.note(f"A batch of {size:,} ran out of memory after a few steps.")
        return False
    config = trainer.run.config
    encoders = f"{config.model.image.name} and {config.model.text.name}"
    about = f"{encoders}, {config.data.image_size} pixels, {config.precision}"
    found.row(f"{about}{', compiled' if config.compile else ''}", {
        "batch": f"{size:,}", "step": f"{1e3 * seconds:,.1f} ms", "samples a second": f"{size / seconds:,.0f}",
        "peak memory": gigabytes(found.device), "objective": f"{share:.1%}",
    })  # fmt: skip
    if size == ASKED_AT and judged:
        found.check(f"objective's share of a step at b = {ASKED_AT:,}: {about}", f"≤ {MAX_SHARE:.0%}", f"{share:.1%}",
                    share <= MAX_SHARE)  # fmt: skip
    return True


@contextmanager
def _timed_objective(trainer: Trainer) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the median seconds of the objective, by the device's own clock."""
    clock, began, seconds = StepClock(trainer.run.device), list[Mark](), list[Seconds]()

    def begin(*_: object) -> None:
        began.append(clock.mark())

    def end(*_: object) -> None:
        clock.computed("forward_backward", began[-1])
        seconds.append(clock.end_step()["forward_backward_seconds"])

    handles = (trainer.run.objective.register_forward_pre_hook(begin), trainer.run.objective.register_forward_hook(end))
    try:
        yield lambda: median(each() if callable(each) else each for each in seconds)
    finally:
        for handle in handles:
            handle.remove()
