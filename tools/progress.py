"""Progress on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Shows how much of `total` is done, and a few words about it."""

    def __init__(self, console: Console, title: str, total: int, bar: Progress | None) -> None:
        self._console, self._title, self._total, self._bar = console, title, total, bar
        self._task = bar.add_task(title, total=total, words="") if bar else None
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def update(self, done: int, words: str = "") -> None:
        """Show `done` of the total. Without a terminal: a line at most every ten seconds, and one at the end."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, words=words)
        elif time.monotonic() >= self._next_line or done == self._total:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            self.note(f"{self._title}: {done:,}/{self._total:,} {words}")

    def note(self, text: str) -> None:
        """A line of its own, which stays."""
        with suppress(OSError):  # stderr may be a file on a full disk, which must not end what is under way
            self._console.print(text, markup=False, highlight=False)


@contextmanager
def progress_bar(title: str, total: int, *, hidden: bool = False) -> Iterator[ProgressBar]:
    """A bar on stderr while the block runs; hidden: none."""
    console = Console(stderr=True, soft_wrap=True, quiet=hidden)
    if not console.is_terminal:
        yield ProgressBar(console, title, total, None)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[words]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        yield ProgressBar(console, title, total, bar)
