"""Progress on stderr: a bar in a terminal, occasional lines elsewhere; durations and sizes for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from rich import filesize
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.text import Text

QUICK = 1.0
"""Seconds."""
RECENT = 600.0
"""Seconds by whose speed the remaining time is estimated."""
FIRST_LINE, LONGEST_GAP = 10.0, 600.0
"""Seconds. Each line comes after twice the time of the one before, so a log of minutes and one of a week stay short."""


class ProgressBar:
    """Shows how much of `total` is done, with a short text."""

    def __init__(self, bar: _BarAboveWords, title: str, total: int) -> None:
        self._bar, self._title, self._total = bar, title, total
        self._task = bar.add_task(title, total=total)
        self._begun = time.monotonic()
        self._next_line = self._begun + FIRST_LINE

    def update(self, done: int, words: str = "") -> None:
        """Show `done` of the total. Without a terminal: after 10, 20, 40, … s, every 10 min, and at the end."""
        now, self._bar.words = time.monotonic(), words
        self._bar.update(self._task, completed=done)
        if self._bar.disable and (now >= self._next_line or done == self._total):
            left = _left(self._bar.tasks[0])
            self._next_line = now + min(max(FIRST_LINE, now - self._begun), LONGEST_GAP)
            self.note(f"{self._title}: {done:,}/{self._total:,}{left and f', {left}'} {words}")

    def note(self, text: str) -> None:
        """Print a separate line that stays."""
        with suppress(OSError):  # stderr may be a file on a full disk, which must not stop the work
            self._bar.console.print(text, markup=False, highlight=False)


class _BarAboveWords(Progress):
    """Shows the words on their own line: beside the bar they would push its numbers out of a narrow terminal."""

    words = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.words:
            yield Text(self.words, no_wrap=True, overflow="ellipsis")


class _Left(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_left(task))


def _left(task: Task) -> str:
    return f"{duration(task.time_remaining)} left" if task.time_remaining else ""


@contextmanager
def progress_bar(title: str, total: int, *, hidden: bool = False) -> Iterator[ProgressBar]:
    """Show a bar on stderr while the block runs, unless hidden; without a terminal, lines."""
    console = Console(stderr=True, soft_wrap=True, quiet=hidden)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()
    speed: dict[str, Any] = {"speed_estimate_period": RECENT, "get_time": time.monotonic}
    with _BarAboveWords(*columns, _Left(), console=console, disable=not console.is_terminal, **speed) as bar:
        yield ProgressBar(bar, title, total)


@contextmanager
def task_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function of (task, done, total) that shows a bar on stderr for the current task.

    Only once it takes longer than QUICK, or at once if nothing is done at the first call: what follows may take long.
    """
    with ExitStack() as open_bar:
        current, begun = "", 0.0
        bar: ProgressBar | None = None

        def show(what: str, done: int, total: int) -> None:
            nonlocal current, begun, bar
            now = time.monotonic()
            if what != current:
                open_bar.close()
                current, begun, bar = what, now, None
            if bar is None and (done == 0 or now > begun + QUICK):
                bar = open_bar.enter_context(progress_bar(what, total))
            if bar:
                bar.update(done)

        yield show


def working(words: str) -> Status:
    """Show a spinner and a short text on stderr while a block runs, for work of unknown length; only in a terminal."""
    return Console(stderr=True, force_jupyter=False, force_terminal=sys.stderr.isatty()).status(words)


def duration(seconds: float) -> str:
    """Return the two largest units of days, hours and minutes; seconds below a minute."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


in_units = filesize.decimal
"""Format a number of bytes."""
