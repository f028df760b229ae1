"""warnings.log: what went wrong in a run without ending it, for whoever looks later."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..files import open_own

_PACKAGE = logging.getLogger(__name__.partition(".")[0])


class _LogFile(logging.Handler):
    """Opens the file for each of the few lines, and is silent where it cannot: that disk may be what a warning says."""

    def __init__(self, path: Path, line: str) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S%z"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, TypeError, ValueError):  # the last two from a message that does not fit its arguments
            line = " ".join(self.format(record).split()) + "\n"
            with os.fdopen(open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
                file.write(line.encode(errors="backslashreplace"))


@contextmanager
def warnings_log(path: Path, rank: int | None = None) -> Iterator[None]:
    """While the block runs, append each warning of thermopile's loggers to `path`, one line with its local time.

    rank: named in every line; leave it out where there is one process. The file is made by the first warning. Warnings
    go where they went before as well, and a file that cannot be written changes nothing.
    """
    who = "" if rank is None else f"[rank {rank}] "
    handlers: list[logging.Handler] = [_LogFile(path, f"%(asctime)s {who}%(message)s")]
    if not _PACKAGE.hasHandlers() and logging.lastResort:
        handlers.append(logging.lastResort)  # stderr, to which logging turns only where there is no handler at all
    for handler in handlers:
        _PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            _PACKAGE.removeHandler(handler)
