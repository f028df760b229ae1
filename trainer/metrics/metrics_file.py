"""The file metrics.jsonl: read its end and a sample of the rest in bounded memory, and cut it back to a step.

A reader skips partial lines, and lines that do not match their checksum: the file may grow or be truncated meanwhile.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...storage.files import open_own, open_regular, refuse_link, written_aside
from ...storage.place import Log, LogReader
from ...storage.sealed_json import DamagedJSONError, verify

BLOCK_BYTES = 1 << 20
MAX_BYTES = 32 << 20
"""Bytes of the end of the file that are searched: some 50,000 steps."""
GLANCE_BYTES = 1 << 13
"""Bytes read per point of the curve if the file is too long to read whole."""

_STEP = re.compile(rb'\{"step": ([0-9]{1,18}), ')
"""The start of a line. Ten million lines take about a minute this way, and about four when parsed as JSON."""

_log = logging.getLogger(__name__)

_EVALUATION, _CLOSING = b'"evaluation"', b'"}'
"""_CLOSING ends every complete line, because the last member is the checksum."""


class Tail(NamedTuple):
    """The last lines, oldest first: numbers are finite floats or None, `step` is an int, `evaluation` is flat."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    damaged: int
    """Unreadable lines encountered, not counting a line that is being written."""


def last_lines(log: Log, steps: int, evaluations: int, until: float = math.inf) -> Tail:
    """Return the last `steps` step lines and the last `evaluations` evaluation lines.

    log: the file, or its parts in a bucket. until: the last step to read. Searches the last MAX_BYTES. Raises OSError.
    """
    of_steps: list[dict[str, Any]] = []
    of_evaluations: list[dict[str, Any]] = []
    damaged = 0
    file = log.opened()
    # No valid line is shorter than 32 bytes: a file of empty lines is not read to its end.
    for place, text in enumerate(islice(_lines_from_the_end(file), MAX_BYTES // 32)):
        step = _STEP.match(text)
        if (len(of_steps) == steps and _EVALUATION not in text) or (step and int(step[1]) > until):
            continue  # skips most lines of a long run
        line = _parsed(text)
        if not line:
            damaged += place > 0 or _CLOSING in text  # text after the last newline is still being written
        elif "evaluation" in line:
            of_evaluations.append(line)
        elif len(of_steps) < steps:
            of_steps.append(line)
        if len(of_steps) == steps and len(of_evaluations) == evaluations:
            break
    return Tail(of_steps[::-1], of_evaluations[::-1], damaged)


def loss_curve(log: Log, points: int) -> list[float]:
    """Return at most `points` means of the loss over neighbouring steps, from the first step to the last.

    In a long file, each mean covers only the few lines at one place. Raises OSError.
    """
    file = log.opened()
    size = file.size
    if size <= points * GLANCE_BYTES:
        losses = _losses(file.read(0, size))
        ends = [len(losses) * point // points for point in range(points + 1)]
        groups = [losses[start:end] for start, end in pairwise(ends)]
    else:
        places = [(size - GLANCE_BYTES) * point // (points - 1) for point in range(points)]
        groups = [_losses(file.read(place, GLANCE_BYTES)) for place in places]
    return [math.fsum(group) / len(group) for group in groups if group]


def numbers_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a line, or of an evaluation, as (name, value); nested numbers are named table/name."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def _lines_from_the_end(file: LogReader) -> Iterator[bytes]:
    """Yield the lines in the last MAX_BYTES, last line first; the final one may be partial."""
    end = file.size
    stop, carried = max(0, end - MAX_BYTES), b""  # the end of a line that starts in the previous block
    while end > stop:
        start = max(stop, end - BLOCK_BYTES)
        first, *whole = (file.read(start, end - start) + carried).split(b"\n")
        yield from reversed(whole)
        end, carried = start, first[:BLOCK_BYTES]  # no valid line is longer
    if stop == 0:
        yield carried


def _losses(text: bytes) -> list[float]:
    losses = (_parsed(line).get("loss") for line in text.split(b"\n"))
    return [loss for loss in losses if isinstance(loss, float)]


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a line's object, with floats or None for numbers but `step`, a step's without text; empty if damaged."""
    if not text.endswith(_CLOSING):  # saves much time where a file is full of empty lines
        return {}
    try:
        checksum = verify(text)
        line = json.loads(text, parse_int=_finite, parse_float=_finite, parse_constant=_finite)
        if "evaluation" in line:
            line["evaluation"] = dict(numbers_in(line["evaluation"]))
        del line[checksum]
        of_types = {name: each for name, each in line.items() if each is None or isinstance(each, float | bool)}
        return ({**line} if "evaluation" in line else of_types) | {"step": int(line["step"])}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _finite(number: str) -> float | None:
    value = float(number)  # integers too, which may be too large to compute with
    return 0.0 if abs(value) < 1e-100 else value if abs(value) < 1e100 else None  # so sums and ratios are finite


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
    aside = path.with_name("metrics.damaged.jsonl")
    if damaged:
        with (
            open_regular(path) as file,
            os.fdopen(open_own(aside, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as unreadable,
        ):
            unreadable.writelines(line + b"\n" for line, step in _lines(file) if step is None)
            unreadable.flush()
            os.fsync(unreadable.fileno())
    if kept_bytes != end:
        _rewrite(path, keep_steps)
    else:  # the usual case, also after a kill: all lines to remove are at the end
        with os.fdopen(open_own(path, os.O_WRONLY), "wb") as file:
            file.truncate(end)
    if damaged:
        lines = "a line" if damaged == 1 else f"{damaged:,} lines"
        _log.warning("%s: %s cannot be read and moved to %s; all other lines are unchanged", path, lines, aside)
    return last


def copy_until(log: Log, to: Path, keep_steps: int) -> None:
    """Write the readable lines of steps up to `keep_steps` of a log, which may grow meanwhile, to a file.

    Raises FileNotFoundError if the log has none yet, OSError.
    """
    reader = log.opened()
    with written_aside(to) as file:
        for start in range(0, reader.size, BLOCK_BYTES):
            file.write(reader.read(start, BLOCK_BYTES))
    _rewrite(to, keep_steps)  # verifies each line of the copy


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int | None]]:
    """Yield each line without its newline, and its step, None if unreadable; a very long line comes in pieces."""
    begins = True
    while piece := file.readline(1 << 20):
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


def _rewrite(path: Path, keep_steps: int) -> None:
    with open_regular(path) as file, written_aside(path) as kept:
        kept.writelines(line + b"\n" for line, step in _lines(file) if step is not None and step <= keep_steps)
