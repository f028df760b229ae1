"""A file that grows during training and is read meanwhile: on a disk, the file itself."""

from pathlib import Path
from typing import ClassVar

from .files import RegularFile


class FileLog:
    """Operations of a run's writer and its readers on a log, besides appending to its file on this machine.

    On a disk, readers see the file itself.
    """

    is_late: ClassVar[bool] = False
    """Whether readers see lines only once they are put, at a checkpoint."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self, *, resuming: bool, exactly: bool = False) -> None:
        """Make the file match what readers see; a local continuation of it is kept, unless `exactly`.

        resuming: if False, the log starts empty.
        """

    def settle(self) -> None:
        """Show readers no more than the file, which was cut since `begin`."""

    def put(self) -> None:
        """Publish the lines added since the last call. Raises OSError; the next call then publishes them."""

    def opened(self) -> RegularFile:
        """Open the published log. Raises OSError."""
        return RegularFile(self._file)

    def modified(self) -> float:
        """Return the time of the last addition, in seconds since 1970. Raises FileNotFoundError if there is none."""
        return self._file.stat().st_mtime
