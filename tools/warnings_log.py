"""warnings.log: a record of problems that did not end the run."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..storage.files import open_own

_PACKAGE = logging.getLogger(__name__.partition(".")[0])


class _LogFile(logging.Handler):
    """Opens the file for each warning, and ignores failures: the warning may be about that disk."""

    def __init__(self, path: Path, line: str) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S%z"))

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, TypeError, ValueError):  # the last two if a message does not fit its arguments
            line = " ".join(self.format(record).split()) + "\n"
            with os.fdopen(open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
                file.write(line.encode(errors="backslashreplace"))


@contextmanager
def warnings_log(path: Path, rank: int | None = None) -> Iterator[None]:
    """During the block, append each warning of thermopile's loggers to `path`, one line with its local time.

    rank: included in every line; omit it with one process. The file is created by the first warning. Warnings still go
    to their other destinations, and a file that cannot be written has no effect.
    """
    who = "" if rank is None else f"[rank {rank}] "
    handlers: list[logging.Handler] = [_LogFile(path, f"%(asctime)s {who}%(message)s")]
    if not _PACKAGE.hasHandlers() and logging.lastResort:
        handlers.append(logging.lastResort)  # logging uses stderr only if there is no handler at all
    for handler in handlers:
        _PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            _PACKAGE.removeHandler(handler)
