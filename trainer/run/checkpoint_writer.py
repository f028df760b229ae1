"""Schedule and write checkpoints in the background; all ranks agree on the outcome."""

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from ...pipeline.order.order import ORDER_VERSION
from ...state_store.durable import list_snapshots
from ...state_store.errors import SnapshotError, StateStoreError, StoreLockedError
from ...state_store.history import Snapshot, retained_steps
from ...state_store.store import StateStore
from ..checkpoints import checkpoint_files
from ..checkpoints.host_copy import CopyOnHost, PinnedMemory, bytes_on_gpu
from ..config import TrainConfig, to_toml, to_tree
from ..metrics.metrics_log import MetricsLog
from ..run_directory import RunDirectory
from ..world import World

KEEP_EARLY = 3
"""Early snapshots of the state that stay for each tenfold of steps, without checkpoints: they show which samples the
model has since learnt by heart."""
RETRY_SECONDS = 60.0
"""Delay before a failed checkpoint is retried."""

LAST_ATTEMPTS, LAST_ATTEMPTS_IN_BUCKET = 11, 4
"""Attempts at the last checkpoint of a run: a disk may be full, or a bucket unreachable, for ten minutes. In a bucket
each attempt takes minutes itself."""

_NOT_REMOVED = "old checkpoints could not be removed: %s. The next checkpoint tries again"

_log = logging.getLogger(__name__)


class WriteState(IntEnum):
    """State of the last checkpoint begun, exchanged between ranks."""

    NONE = 0
    WRITING = 1
    WRITTEN = 2
    FAILED = 3


class Checkpointer:
    """Writes one checkpoint at a time in a thread. All ranks make the same calls, and agree on the outcome."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, store: StateStore, log: MetricsLog, world: World, fingerprint: str
    ) -> None:
        """log: made durable before each checkpoint, up to the checkpoint's step, and put with the run's warnings."""
        self._config, self._run, self._store, self._log, self._world = config, run, store, log, world
        self._keep, self._fingerprint = config.checkpoint, fingerprint
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thermopile-checkpoint")
        self._begun_at = time.monotonic()
        self._retry_at: float | None = None  # set if the last checkpoint could not be written
        self._step, self._has_warned = 0, False
        self._writing: Future[None] | None = None
        self._pinned: Future[PinnedMemory] | None = None

    def reserve(self, training_state: Callable[[], dict[str, Any]]) -> None:
        """Let the thread pin memory for copies from a GPU, once, when a step's optimiser state can be measured.

        This takes seconds in a large run. A checkpoint before its end, or a larger checkpoint, is copied without it.
        """
        if self._pinned is None and self._world.is_first:
            size = bytes_on_gpu(training_state())
            # Give the index: in another thread, "cuda" may be another GPU.
            device = torch.device("cuda", torch.cuda.current_device())
            self._pinned = self._thread.submit(PinnedMemory, size, device)
            alone = "no memory could be pinned, so that each checkpoint waits for its copy from the GPU: %s"
            self._pinned.add_done_callback(partial(_warn_of_failure, alone))

    def _copy(self, state: dict[str, Any]) -> CopyOnHost:
        pinned = self._pinned
        if pinned is None or not pinned.done() or pinned.exception():
            return CopyOnHost(state)
        if len(memory := pinned.result().bytes) < bytes_on_gpu(state):  # for example, the first step was skipped
            pinned.result().close()
            self._pinned = None
            return CopyOnHost(state)
        return CopyOnHost(state, memory)

    def is_due(self, step: int) -> bool:
        """Return whether to checkpoint after this step; with several ranks, rank 0's answer counts."""
        if self._retry_at is not None:
            return time.monotonic() >= self._retry_at
        if self._keep.every_steps and step % self._keep.every_steps == 0:
            return True
        return bool(self._keep.every_minutes) and time.monotonic() - self._begun_at >= 60 * self._keep.every_minutes

    @property
    def write_state(self) -> WriteState:
        if self._writing is None:
            return WriteState.NONE
        if not self._writing.done():
            return WriteState.WRITING
        return WriteState.FAILED if self._writing.exception() else WriteState.WRITTEN

    def save(self, step: int, epoch: int, training_state: Callable[[], dict[str, Any]], *, is_last: bool) -> None:
        """Cut the state and copy the model at this step boundary; both are written while training continues.

        Waits for a previous checkpoint. is_last: wait for this checkpoint too; it must succeed, or SnapshotError or
        OSError is raised after LAST_ATTEMPTS, or LAST_ATTEMPTS_IN_BUCKET.
        """
        self.finish()
        config_hash = hashlib.sha256(to_toml(self._config).encode()).hexdigest()
        attempts = LAST_ATTEMPTS_IN_BUCKET if self._run.path.is_remote else LAST_ATTEMPTS
        self._has_warned &= not is_last  # the run's end warns again that it waits
        for attempt in range(1, attempts + 1):
            # Before the snapshot's threads start: they would compete with the copy for the interpreter.
            training = self._copy(training_state()) if self._world.is_first else None
            try:
                if (committed := self._store.last_snapshot).step == step > 0:  # its checkpoint could not be written
                    snapshot: Future[Snapshot] = Future()
                    snapshot.set_result(committed)
                else:
                    snapshot = self._store.snapshot(step, epoch=epoch, config_hash=config_hash)
            except BaseException:
                if training is not None:
                    training.result()  # its memory is in use until then
                raise
            self.begin(step, snapshot, training)
            if not is_last:
                return
            self.finish(must_succeed=attempt == attempts)
            if self._retry_at is None:
                return
            time.sleep(RETRY_SECONDS)
            self._log.flush()  # writes the lines that the disk had no room for

    def begin(self, step: int, snapshot: Future[Snapshot], training: CopyOnHost | None) -> None:
        """Write the checkpoint of `step` in the background. The previous one must be settled.

        snapshot: of the same step boundary. training: the model's part, None if another rank writes it.
        """
        assert self._writing is None
        self._step, self._begun_at, self._retry_at = step, time.monotonic(), None
        self._writing = self._thread.submit(self._write, step, snapshot, training)

    def _write(self, step: int, snapshot: Future[Snapshot], training: CopyOnHost | None) -> None:
        state = None if training is None else training.result()  # first: an error must not free memory still in use
        committed = snapshot.result()
        if state is None:
            return
        self._log.sync()
        self._run.metrics.put()
        self._run.warnings.put()
        info = checkpoint_files.CheckpointInfo(
            step=step,
            snapshot=committed.id,
            order_version=ORDER_VERSION,
            dataset_fingerprint=self._fingerprint,
            settings=to_tree(self._config),
        )
        checkpoint_files.save_checkpoint(self._run.checkpoints, info, state)
        keep_last, keep_every = self._keep.keep_last, self._keep.keep_every
        try:  # before their snapshots; never this one, which `latest` names
            snapshots = (snapshot.step for snapshot in list_snapshots(self._run.state))
            kept = retained_steps(snapshots, keep_last, keep_every) | {step}
            if keep_every:  # includes steps with a damaged snapshot: the weights are intact
                made = checkpoint_files.checkpoints_in(self._run.checkpoints)
                kept |= {each for each in made if each % keep_every == 0}
            checkpoint_files.remove_checkpoints(self._run.checkpoints, keep=kept)
        except StoreLockedError:
            raise
        except (StateStoreError, OSError) as error:
            _log.warning(_NOT_REMOVED, error)

    def wait(self) -> bool:
        """Wait for the pending checkpoint, successful or not; return False without one."""
        if self._writing is None:
            return False
        wait([self._writing])
        return True

    def finish(self, *, must_succeed: bool = False) -> None:
        """Wait for the pending checkpoint, if any, and settle it."""
        if self.wait():
            self._world.slow_group.broadcast(None)  # the others wait here for rank 0's write, which takes longest
            write_states = [state for (state,) in self._world.control.all_gather([self.write_state])]
            self.settle(write_states, must_succeed=must_succeed)

    def settle(self, of_ranks: list[int], *, must_succeed: bool = False) -> None:
        """Clear the checkpoint once every rank has finished it, and drop the snapshots that it replaces.

        of_ranks: `write_state` of each rank. A failed checkpoint is due again after RETRY_SECONDS, and the first of
        several in a row is logged as a warning; with must_succeed its error is raised: SnapshotError or OSError.
        """
        if self._writing is None or WriteState.WRITING in of_ranks:
            return
        error, self._writing = self._writing.exception(), None
        if error is None and WriteState.FAILED in of_ranks:
            rank = of_ranks.index(WriteState.FAILED)
            error = SnapshotError(f"rank {rank} could not write its part; see its messages")
        if error is None:
            keep, self._has_warned = self._keep, False
            removed = self._store.retain(keep.keep_last, keep.keep_every, KEEP_EARLY)
            removed.add_done_callback(partial(_warn_of_failure, _NOT_REMOVED))
            return
        lost = isinstance(error, StoreLockedError)  # to another process: later attempts would fail too
        if must_succeed or lost or not isinstance(error, SnapshotError | StateStoreError | OSError):
            raise error
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self._world.is_first and not self._has_warned:
            self._has_warned = True
            failed = "the checkpoint of step %d was not written: %s. It is tried again every %.0f seconds"
            _log.warning(failed, self._step, error, RETRY_SECONDS)

    def close(self) -> None:
        """Finish pending writes and end the thread."""
        self._thread.shutdown(wait=True)
        if self._pinned is not None and not self._pinned.exception():
            self._pinned.result().close()


def _warn_of_failure(message: str, done: Future[Any]) -> None:
    if error := done.exception():
        _log.warning(message, error)
