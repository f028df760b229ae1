"""When a run's checkpoints are due, and their writing beside training; all ranks agree on how it went."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import IntEnum

from ..state_store import SnapshotError, StateStoreError
from .config import CheckpointConfig
from .world import World

RETRY_SECONDS = 60.0
"""Time from a checkpoint that could not be written to the next attempt."""

_log = logging.getLogger(__name__)


class Progress(IntEnum):
    """Of the checkpoint last begun, as one rank tells the others."""

    NONE = 0
    WRITING = 1
    WRITTEN = 2
    FAILED = 3


class Checkpointer:
    """Writes one checkpoint at a time in a thread. A further one that comes due meanwhile waits for it."""

    def __init__(self, config: CheckpointConfig, world: World) -> None:
        self._config, self._world = config, world
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thermopile-checkpoint")
        self._begun_at = time.monotonic()
        self._retry_at: float | None = None  # set where the last one could not be written
        self._step = 0
        self._writing: Future[None] | None = None

    def is_due(self, step: int) -> bool:
        """Whether one is to be made after this step; on more ranks the first one's answer counts."""
        if self._retry_at is not None:
            return time.monotonic() >= self._retry_at
        if self._config.every_steps and step % self._config.every_steps == 0:
            return True
        return bool(self._config.every_minutes) and time.monotonic() - self._begun_at >= 60 * self._config.every_minutes

    @property
    def progress(self) -> Progress:
        if self._writing is None:
            return Progress.NONE
        if not self._writing.done():
            return Progress.WRITING
        return Progress.FAILED if self._writing.exception() else Progress.WRITTEN

    def begin(self, step: int, write: Callable[[], None]) -> None:
        """Let `write` make the checkpoint of `step` in the background; the one before is settled."""
        assert self._writing is None
        self._step, self._begun_at, self._retry_at = step, time.monotonic(), None
        self._writing = self._thread.submit(write)

    def wait(self) -> bool:
        """Wait until the checkpoint under way is written or has failed; False where there is none. For all ranks."""
        if self._writing is None:
            return False
        wait([self._writing])
        return True

    def settle(self, of_ranks: list[int], *, must_succeed: bool = False) -> bool:
        """Forget the checkpoint that every rank is done with, and say whether it was written.

        of_ranks: `progress` of each rank. One that failed is warned of and due again a minute later; or, where it
        must succeed, its error is raised: SnapshotError or OSError.
        """
        if self._writing is None or Progress.WRITING in of_ranks:
            return False
        error, self._writing = self._writing.exception(), None
        if error is None and Progress.FAILED in of_ranks:
            rank = of_ranks.index(Progress.FAILED)
            error = SnapshotError(f"rank {rank} could not write its part; its own messages say why")
        if error is None:
            return True
        if must_succeed or not isinstance(error, SnapshotError | StateStoreError | OSError):
            raise error
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self._world.is_first:
            _log.warning(
                "the checkpoint of step %d was not written: %s. Training goes on; next attempt in %.0f seconds",
                self._step, error, RETRY_SECONDS,
            )  # fmt: skip
        return False

    def close(self) -> None:
        """Finish what is being written and end the thread."""
        self._thread.shutdown(wait=True)
