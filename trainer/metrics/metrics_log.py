"""Write metrics.jsonl and RUN/tensorboard/: every step and evaluation, with only occasional reads from the device.

Each line of metrics.jsonl ends with its own checksum.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ...storage.files import open_own, own_directory
from ...storage.sealed_json import seal_line
from ..errors import ConfigError, NotFiniteError
from .metrics_file import cut_back, numbers_in

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Scalar = Tensor | float | Callable[[], float] | None
"""A value on any device, or a function that returns a value once the device is done."""

FLUSH_SECONDS = 30
QUEUE = 10_000
"""Maximum number of queued scalars; a step has about a dozen and never waits."""

_log = logging.getLogger(__name__)


class MetricsLog:
    """Collects the scalars of each step on their devices, and writes them when flushed.

    `flush` reads values back and so synchronises with the device; a step does not.
    """

    def __init__(self, path: Path | None, tensorboard: Path | None = None, *, keep_steps: int) -> None:
        """Open the log, and drop lines of steps after keep_steps, as `cut_back` does. None: no file.

        tensorboard: a directory for the same numbers. Raises OSError if they cannot be written, or are links.
        """
        self.has_evaluation = False
        """Whether the step at which the log was opened has been evaluated."""
        self._board = None if tensorboard is None else TensorBoardLog(tensorboard, keep_steps=keep_steps)
        self._file: FileIO | None = None
        if path is not None:
            last = cut_back(path, keep_steps) if path.exists() else b""
            self.has_evaluation = last.startswith(b'{"step": %d, "evaluation": ' % keep_steps)
            self._file = FileIO(open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")
        self._unwritten = b""  # lines that did not fit on the disk
        self._failure: OSError | None = None
        self._waiting: list[dict[str, Scalar]] = []

    def add(self, scalars: Mapping[str, Scalar]) -> None:
        """Keep one step's scalars, including `step` and `loss`. A loss of None marks a skipped step."""
        self._waiting.append(dict(scalars))

    def flush(self) -> list[dict[str, Any]]:
        """Write the steps added since the last flush, and return them.

        Lines that cannot be written, for example on a full disk, are kept for the next flush, with a warning.
        Raises NotFiniteError if a loss is not finite, after writing the steps before it.
        """
        steps, self._waiting = self._waiting, []
        tensors = [value.detach().double() for step in steps for value in step.values() if isinstance(value, Tensor)]
        numbers = iter(_read_back(tensors))
        lines = [
            {name: next(numbers) if isinstance(value, Tensor) else _ready(value) for name, value in step.items()}
            for step in steps
        ]
        good = list(takewhile(lambda line: line["loss"] is None or math.isfinite(line["loss"]), lines))
        for line in good:
            # JSON has no infinity.
            finite = {
                name: value if value is not None and math.isfinite(value) else None for name, value in line.items()
            }
            self._unwritten += seal_line(finite) + b"\n"
        self._write_or_keep()
        if len(good) < len(lines):
            bad = lines[len(good)]
            raise NotFiniteError(int(bad["step"]), bad["loss"])
        if self._board:
            self._board.add(lines)
        return lines

    def add_evaluation(self, step: int, scores: Mapping[str, Any], *, averaged: bool = False) -> dict[str, Any]:
        """Write the scores after a flushed step, and return their line. On a full disk, as `flush`.

        scores: tables of finite numbers or None. averaged: whether they are the averaged weights' scores.
        """
        assert not self._waiting
        line = {"step": step, "evaluation": scores} | ({"weights": "averaged"} if averaged else {})
        self._unwritten += seal_line(line) + b"\n"
        self._write_or_keep()
        if self._board:
            self._board.add([line])
        return line

    def sync(self) -> None:
        """Make the flushed lines durable. Thread-safe. Raises OSError on failure."""
        if self._file is None:
            return
        if self._failure is not None:
            raise self._failure
        os.fsync(self._file.fileno())

    def _write_or_keep(self) -> None:
        if self._file is None:
            self._unwritten = b""
        self._failure = None
        try:
            while self._file is not None and self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self._failure = error
            _log.warning("metrics.jsonl cannot be written: %s. Its lines are kept and written later", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _read_back(scalars: list[Tensor]) -> list[float]:
    """Return the values of scalars, with one copy per device."""
    places: dict[torch.device, list[int]] = {}
    for place, scalar in enumerate(scalars):
        places.setdefault(scalar.device, []).append(place)
    found = [0.0] * len(scalars)
    for of_device in places.values():
        values = torch.stack([scalars[place] for place in of_device]).tolist()
        for place, value in zip(of_device, values, strict=True):
            found[place] = value
    return found


def _ready(value: Any) -> Any:
    """Return a number; a lazy value is available because `flush` has synchronised."""
    return value() if callable(value) else value


class TensorBoardLog:
    """Writes each number of a line as a scalar at the line's step, an evaluation's as evaluation/….

    If the disk is full the log ends with a warning, but the run continues: metrics.jsonl has the same numbers.
    """

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """Open the log in the directory `path`; existing steps after keep_steps are hidden.

        Raises ConfigError if the package tensorboard is missing, NotRegularFileError if `path` is a link.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard = true, but the package is missing ({error}): "
                "pip install 'thermopile[tensorboard]', or set tensorboard = false"
            ) from None
        self._path = path
        self._writer: SummaryWriter | None = SummaryWriter(
            str(own_directory(path)), purge_step=keep_steps + 1, max_queue=QUEUE, flush_secs=FLUSH_SECONDS
        )

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write lines in the format of metrics.jsonl; each has a `step`. Null values are omitted."""
        if self._writer is None:
            return
        try:
            for line in lines:
                for name, value in numbers_in({name: value for name, value in line.items() if name != "step"}):
                    self._writer.add_scalar(name, value, line["step"])
        except OSError as error:
            _log.warning("%s cannot be written: %s. Logging continues in metrics.jsonl only", self._path, error)
            writer, self._writer = self._writer, None
            with suppress(OSError):
                writer.close()

    def close(self) -> None:
        """Write queued scalars and end the thread."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except OSError as error:
            _log.warning("%s is incomplete: %s. metrics.jsonl has all values", self._path, error)
