"""Taking metrics.jsonl back to a step: the later lines go, and nothing else is lost, whatever became of the file."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..files import open_own, open_regular, refuse_link, written_aside
from ..sealed_json import DamagedJSONError, verify

MAX_LINE_BYTES = 1 << 20
"""No line of ours is as long."""

_STEP = re.compile(rb'\{"step": ([0-9]{1,18}), ')
"""How a line begins. Ten million lines are read so in about a minute; parsed as JSON, in about four."""

_log = logging.getLogger(__name__)


def cut_back(path: Path, keep_steps: int) -> bytes:
    """Take out the lines of steps after `keep_steps`, and return the last line left, without its end; empty for none.

    Lines that cannot be read move to metrics.damaged.jsonl, with a warning. In memory there is one line at a time; the
    file is cut short or replaced as a whole, so a kill loses nothing. Raises OSError, also for a link.
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
    else:  # as nearly always, also after a kill: all that is to go stands at the end
        with os.fdopen(open_own(path, os.O_WRONLY), "wb") as file:
            file.truncate(end)
    if damaged:
        _log.warning(
            "%s: %s cannot be read and moved to %s; all others are as they were",
            path, "a line" if damaged == 1 else f"{damaged:,} lines", _aside(path),
        )  # fmt: skip
    return last


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int | None]]:
    """Each line without its end, and its step, None where it cannot be read; a very long line comes in pieces."""
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
    """Append the lines that cannot be read to the file for them."""
    with (
        open_regular(path) as file,
        os.fdopen(open_own(_aside(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as aside,
    ):
        aside.writelines(line + b"\n" for line, step in _lines(file) if step is None)
        aside.flush()
        os.fsync(aside.fileno())


def _rewrite(path: Path, keep_steps: int) -> None:
    """Put a file that has the lines to keep alone in the place of this one."""
    with open_regular(path) as file, written_aside(path) as kept:
        kept.writelines(line + b"\n" for line, step in _lines(file) if step is not None and step <= keep_steps)


def _aside(path: Path) -> Path:
    return path.with_name("metrics.damaged.jsonl")
