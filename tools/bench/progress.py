"""How far a measurement is, on stderr, with the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from ..progress import progress_bar


def counted(title: str, total: int) -> Iterator[int]:
    """Yield 0 … total - 1 and show how far it is, and how long it will take."""
    began = time.monotonic()
    with progress_bar(title, total) as bar:
        for done in range(total):
            yield done
            left = (time.monotonic() - began) / (done + 1) * (total - done - 1)
            bar.update(done + 1, f"about {left:,.0f} s left" if left >= 1 else "")


def say(text: str) -> None:
    """One line on stderr, before something that takes its time."""
    print(text, file=sys.stderr, flush=True)
