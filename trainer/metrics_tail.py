"""The end of metrics.jsonl, and a glance at the rest: bounded in time and memory, however long the file is.

The file may grow while it is read, and a run that is resumed may cut it short. What is no whole line, or does not match
its checksum, is passed over.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..files import open_regular
from ..sealed_json import verify

BLOCK_BYTES = 1 << 20
MAX_BYTES = 32 << 20
"""So far back from its end a file is searched: some 50,000 steps."""
GLANCE_BYTES = 1 << 13
"""Read for one point of the curve where the file is too long to read whole."""

_EVALUATION, _CLOSING = b'"evaluation"', b'"}'
"""The latter closes a line that is written to its end, for it ends in its checksum."""


class Tail(NamedTuple):
    """The last lines, oldest first: numbers are finite floats, or None; `step` is an int; `evaluation` is flat."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    damaged: int
    """Lines met on the way that cannot be read; one that is being written is none of them."""


def last_lines(path: Path, steps: int, evaluations: int) -> Tail:
    """The last `steps` lines of steps and the last `evaluations` lines of evaluations.

    Fewer where there are fewer in the last MAX_BYTES. Raises OSError.
    """
    of_steps: list[dict[str, Any]] = []
    of_evaluations: list[dict[str, Any]] = []
    damaged = 0
    with open_regular(path) as file:
        for place, text in enumerate(_lines_from_the_end(file)):
            if len(of_steps) == steps and _EVALUATION not in text:
                continue  # most lines of a long run
            line = _parsed(text)
            if not line:
                damaged += place > 0 or _CLOSING in text  # what stands behind the last end is being written
            elif "evaluation" in line:
                of_evaluations.append(line)
            elif len(of_steps) < steps:
                of_steps.append(line)
            if len(of_steps) == steps and len(of_evaluations) == evaluations:
                break
    return Tail(of_steps[::-1], of_evaluations[::-1], damaged)


def loss_curve(path: Path, points: int) -> list[float]:
    """At most `points` means of the loss from the first step to the last, each of neighbouring steps.

    Of a long file each mean is of the few lines at one place. Raises OSError.
    """
    with open_regular(path) as file:
        size = _size(file)
        if size <= points * GLANCE_BYTES:
            losses = _losses(_read(file, 0, size))
            ends = [len(losses) * point // points for point in range(points + 1)]
            groups = [losses[start:end] for start, end in pairwise(ends)]
        else:
            places = [(size - GLANCE_BYTES) * point // (points - 1) for point in range(points)]
            groups = [_losses(_read(file, place, GLANCE_BYTES)) for place in places]
    return [math.fsum(group) / len(group) for group in groups if group]


def numbers_in(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line, or of an evaluation, as (name, value); those of a table within it as table/name."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def _lines_from_the_end(file: BinaryIO) -> Iterator[bytes]:
    """The lines of the last MAX_BYTES, last one first; it may be half a line."""
    end = _size(file)
    stop, carried = max(0, end - MAX_BYTES), b""  # a line whose beginning lies further ahead
    while end > stop:
        start = max(stop, end - BLOCK_BYTES)
        first, *whole = (_read(file, start, end - start) + carried).split(b"\n")
        yield from reversed(whole)
        end, carried = start, first[:BLOCK_BYTES]  # no line of ours is as long
    if stop == 0:
        yield carried


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    return os.pread(file.fileno(), length, start)


def _losses(text: bytes) -> list[float]:
    losses = (_parsed(line).get("loss") for line in text.split(b"\n"))
    return [loss for loss in losses if isinstance(loss, float)]


def _parsed(text: bytes) -> dict[str, Any]:
    """A line's object, its numbers finite floats or None, but for the step; empty where it is damaged or cut."""
    try:
        checksum = verify(text)
        line = json.loads(text, parse_int=_finite, parse_float=_finite, parse_constant=_finite)
        if "evaluation" in line:
            line["evaluation"] = dict(numbers_in(line["evaluation"]))
        del line[checksum]
        return {**line, "step": int(line["step"])}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _finite(number: str) -> float | None:
    value = float(number)  # an int too, which may be too large to reckon with
    return value if math.isfinite(value) else None
