"""RUN/tensorboard/: the content of metrics.jsonl in TensorBoard's format."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ..files import own_directory
from .errors import ConfigError
from .metrics_tail import numbers_in

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 30
QUEUE = 10_000
"""Maximum number of queued scalars; a step has about a dozen and never waits."""

_log = logging.getLogger(__name__)


class TensorBoardLog:
    """Writes each number of a line as a scalar at the line's step; those of an evaluation as evaluation/….

    If the disk is full the log ends with a warning, but the run continues: metrics.jsonl has the same numbers.
    """

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """Open the log in the directory `path`; existing steps after keep_steps are hidden.

        Raises ConfigError if the package tensorboard is missing, NotRegularFileError if `path` is a link.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard = true, but the package is missing ({error}): "
                "pip install 'thermopile[tensorboard]', or set tensorboard = false"
            ) from None
        self._path = path
        self._writer: SummaryWriter | None = SummaryWriter(
            str(own_directory(path)), purge_step=keep_steps + 1, max_queue=QUEUE, flush_secs=FLUSH_SECONDS
        )

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Write lines in the format of metrics.jsonl; each has a `step`. Null values are omitted."""
        if self._writer is None:
            return
        try:
            for line in lines:
                for name, value in numbers_in({name: value for name, value in line.items() if name != "step"}):
                    self._writer.add_scalar(name, value, line["step"])
        except OSError as error:
            _log.warning("%s cannot be written: %s. Logging continues in metrics.jsonl only", self._path, error)
            writer, self._writer = self._writer, None
            with suppress(OSError):
                writer.close()

    def close(self) -> None:
        """Write queued scalars and end the thread."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except OSError as error:
            _log.warning("%s is incomplete: %s. metrics.jsonl has all values", self._path, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
