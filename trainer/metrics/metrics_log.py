"""Write metrics.jsonl: every step and evaluation, with only occasional reads from the device.

Each line of metrics.jsonl ends with its own checksum.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...storage.files import open_own
from ...storage.sealed_json import finite, seal_line
from ..errors import NotFiniteError
from .metrics_file import cut_back

if TYPE_CHECKING:
    from .trackers import Trackers

Scalar = Tensor | float | Callable[[], float] | None
"""A value on any device, or a function that returns a value once the device is done."""

_log = logging.getLogger(__name__)


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Collects the scalars of each step on their devices, and writes them when flushed.

    `flush` reads values back and so synchronises with the device; a step does not.
    """

    def __init__(self, path: Path | None, trackers: Trackers | None = None, *, keep_steps: int) -> None:
        """Open the log, and drop lines of steps after keep_steps, as `cut_back` does. None: no file.

        trackers: get the same lines. Raises OSError if it cannot be written, or is a link.
        """
        self.has_evaluation = False
        """Whether the step at which the log was opened has been evaluated."""
        self._trackers = trackers
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

        Lines that cannot be written, for example on a full disk, are kept for the next flush, with one warning.
        Raises NotFiniteError if a loss is not finite, after writing the steps before it.
        """
        steps, self._waiting = self._waiting, []
        tensors = [value.detach().double() for step in steps for value in step.values() if isinstance(value, Tensor)]
        numbers = iter(_read_back(tensors))
        lines: list[dict[str, Any]] = [
            {
                # A lazy value is available because reading has synchronised.
                name: next(numbers) if isinstance(value, Tensor) else value() if callable(value) else value
                for name, value in step.items()
            }
            for step in steps
        ]
        good = list(takewhile(lambda line: line["loss"] is None or math.isfinite(line["loss"]), lines))
        self._write([{name: finite(value) for name, value in line.items()} for line in good])
        if len(good) < len(lines):
            bad = lines[len(good)]
            raise NotFiniteError(int(bad["step"]), bad["loss"])
        return lines

    def add_evaluation(self, step: int, scores: Mapping[str, Any], *, averaged: bool = False) -> dict[str, Any]:
        """Write the scores after a flushed step, and return their line. On a full disk, as `flush`.

        scores: tables of finite numbers or None. averaged: whether they are the averaged weights' scores.
        """
        assert not self._waiting
        line = {"step": step, "evaluation": scores} | ({"weights": "averaged"} if averaged else {})
        self._write([line])
        return line

    def sync(self) -> None:
        """Make the flushed lines durable. Thread-safe. Raises OSError on failure."""
        if self._file is None:
            return
        if self._failure is not None:
            raise self._failure
        os.fsync(self._file.fileno())

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Write lines to the file, or keep what does not fit, and pass them to the trackers."""
        self._unwritten += b"".join(seal_line(line) + b"\n" for line in lines)
        if self._file is None:
            self._unwritten = b""
        try:
            while self._file is not None and self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._failure = None
        except OSError as error:
            if self._failure is None:
                _log.warning("metrics.jsonl cannot be written: %s. Its lines are kept and written later", error)
            self._failure = error
        if self._trackers is not None:
            for line in lines:
                self._trackers.add(line)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _read_back(scalars: list[Tensor]) -> list[float]:
    """Return the values of scalars, those on the GPU by one copy."""
    on_gpu = [scalar for scalar in scalars if scalar.is_cuda]
    values = iter(torch.stack(on_gpu).tolist() if on_gpu else [])
    return [next(values) if scalar.is_cuda else scalar.item() for scalar in scalars]
