"""Writing metrics.jsonl: one line per step and per evaluation, although the device is read only now and then.

Each line ends with its own checksum.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from ..files import open_own, open_regular, refuse_link, written_aside
from ..sealed_json import DamagedJSONError, seal_line, verify
from .errors import NotFiniteError

Scalar = Tensor | float | Callable[[], float] | None
"""A value on any device, or a function that returns one once the device is done."""

_log = logging.getLogger(__name__)


class MetricsLog:
    """Collects the scalars of each step on their devices, and writes them when flushed.

    `flush` reads values back and so synchronises with the device; a step does not.
    """

    def __init__(self, path: Path | None, *, keep_steps: int) -> None:
        """Open the log after dropping lines of steps after keep_steps, as `cut_back` does. None: no file.

        Raises OSError if it cannot be written, or is a link.
        """
        self.has_evaluation = False
        """Whether the step at which the log was opened has been evaluated."""
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
            self._unwritten += seal_line(finite) + b"\n"
        self._write_or_keep()
        if len(good) < len(lines):
            bad = lines[len(good)]
            raise NotFiniteError(int(bad["step"]), bad["loss"])
        return lines

    def add_evaluation(self, step: int, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Write the scores after a flushed step, and return their line. On a full disk, as `flush`.

        scores: tables of finite numbers or None.
        """
        assert not self._waiting
        line = {"step": step, "evaluation": scores}
        self._unwritten += seal_line(line) + b"\n"
        self._write_or_keep()
        return line

    def sync(self) -> None:
        """Make the flushed lines durable. Thread-safe. Raises OSError on failure."""
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
    """Return a number; a lazy one is available because `flush` has synchronised."""
    return value() if callable(value) else value


MAX_LINE_BYTES = 1 << 20
"""Upper bound for the length of a valid line."""

_STEP = re.compile(rb'\{"step": ([0-9]{1,18}), ')
"""The start of a line. Ten million lines take about a minute this way, and about four when parsed as JSON."""

_log = logging.getLogger(__name__)


def cut_back(path: Path, keep_steps: int) -> bytes:
    """Remove the lines of steps after `keep_steps`; return the last remaining line without its newline, or b"".

    Unreadable lines move to metrics.damaged.jsonl, with a warning. Holds one line in memory at a time. The file is
    truncated or replaced atomically, so a kill loses nothing. Raises OSError, also for a link.
    """
    refuse_link(path)
    last, kept_bytes, end, damaged = b"", 0, 0, 0
    with open_regular(path) as file:
        for line, step in _lines(file):
            if step is None:
                damaged += 1
            elif step <= keep_steps:
                last, kept_bytes, end = line, kept_bytes + len(line) + 1, file.tell()
    if damaged:
        _set_aside(path)
    if kept_bytes != end:
        _rewrite(path, keep_steps)
    else:  # the usual case, also after a kill: all lines to remove are at the end
        with os.fdopen(open_own(path, os.O_WRONLY), "wb") as file:
            file.truncate(end)
    if damaged:
        _log.warning(
            "%s: %s cannot be read and moved to %s; all other lines are unchanged",
            path, "a line" if damaged == 1 else f"{damaged:,} lines", _aside(path),
        )  # fmt: skip
    return last


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int | None]]:
    """Yield each line without its newline, and its step, None if unreadable; a very long line comes in pieces."""
    begins = True
    while piece := file.readline(MAX_LINE_BYTES):
        line = piece.removesuffix(b"\n")
        yield line, _step_of(line) if begins else None
        begins = len(line) < len(piece)


def _step_of(line: bytes) -> int | None:
    try:
        verify(line)
    except DamagedJSONError:
        return None
    step = _STEP.match(line)
    return int(step[1]) if step else None


def _set_aside(path: Path) -> None:
    """Append the unreadable lines to their own file."""
    with (
        open_regular(path) as file,
        os.fdopen(open_own(_aside(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as aside,
    ):
        aside.writelines(line + b"\n" for line, step in _lines(file) if step is None)
        aside.flush()
        os.fsync(aside.fileno())


def _rewrite(path: Path, keep_steps: int) -> None:
    """Replace the file by one with only the lines to keep."""
    with open_regular(path) as file, written_aside(path) as kept:
        kept.writelines(line + b"\n" for line, step in _lines(file) if step is not None and step <= keep_steps)


def _aside(path: Path) -> Path:
    return path.with_name("metrics.damaged.jsonl")
