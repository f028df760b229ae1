"""metrics.jsonl: a line for every step, though the device is asked only once in a while, and for every evaluation."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..files import open_own, open_regular
from .errors import NotFiniteError

Scalar = Tensor | float | Callable[[], float] | None
"""A value, on any device; or what gives one once the device is done."""

_log = logging.getLogger(__name__)


class MetricsLog:
    """Collects the steps' scalars where they are and writes them out when told to.

    `flush` reads values back from the device, and so waits for it; a step does not.
    """

    def __init__(self, path: Path | None, *, keep_steps: int) -> None:
        """Open the log; lines of steps after keep_steps, and a line cut off by a crash, are dropped. None: no file."""
        self.has_evaluation = False
        """Whether the step that the log was opened at has its evaluation."""
        self._file = None
        if path is not None:
            self._file = os.fdopen(open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab", buffering=0)
            length, last = _up_to(path, keep_steps)
            self._file.truncate(length)
            self.has_evaluation = last.get("step") == keep_steps and "evaluation" in last
        self._unwritten = b""  # lines that the disk had no room for
        self._failure: OSError | None = None
        self._waiting: list[dict[str, Scalar]] = []

    def add(self, scalars: Mapping[str, Scalar]) -> None:
        """Keep one step's scalars; `step` and `loss` are among them. A loss of None is that of a step skipped."""
        self._waiting.append(dict(scalars))

    def flush(self) -> list[dict[str, Any]]:
        """Write the steps added since the last flush and return them.

        Lines that cannot be written, as on a full disk, are kept for the next flush, with a warning.
        Raises NotFiniteError where a loss is not finite; the steps before it are written.
        """
        steps, self._waiting = self._waiting, []
        tensors = [value.detach().double() for step in steps for value in step.values() if isinstance(value, Tensor)]
        numbers = iter(torch.stack(tensors).tolist() if tensors else ())
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
            self._unwritten += json.dumps(finite).encode() + b"\n"
        self._write_or_keep()
        if len(good) < len(lines):
            bad = lines[len(good)]
            raise NotFiniteError(int(bad["step"]), bad["loss"])
        return lines

    def add_evaluation(self, step: int, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Write the scores after a step, whose own line is flushed, and return their line; on a full disk as `flush`.

        scores: tables of finite numbers or None.
        """
        assert not self._waiting
        line = {"step": step, "evaluation": scores}
        self._unwritten += json.dumps(line, allow_nan=False).encode() + b"\n"
        self._write_or_keep()
        return line

    def sync(self) -> None:
        """Make the lines flushed so far durable; may be called in another thread. Raises OSError where that fails."""
        if self._file is None:
            return
        if self._failure is not None:
            raise self._failure
        os.fsync(self._file.fileno())

    def _write_or_keep(self) -> None:
        try:
            self._failure = None
            self._write()
        except OSError as error:
            self._failure = error
            _log.warning("metrics.jsonl cannot be written: %s. Its lines are kept and written later", error)

    def _write(self) -> None:
        if self._file is None:
            self._unwritten = b""
            return
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _ready(value: Any) -> Any:
    """A number, or one that the device, which `flush` has waited for, has by now."""
    return value() if callable(value) else value


def _up_to(path: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Length of the whole lines up to and including those of `step`, and the last of them; empty where none is."""
    length, last = 0, {}
    with open_regular(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                is_kept = line.endswith(b"\n") and (read := json.loads(line))["step"] <= step
            except (ValueError, LookupError, TypeError):
                _log.warning("%s: line %d cannot be read; it is dropped, and what follows it", path, number)
                is_kept = False
            if not is_kept:
                break
            length, last = length + len(line), read
    return length, last
