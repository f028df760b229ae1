"""The rows of state of each step's samples, by ids: for `Run`, and with the objective for another library's loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...pipeline.loading import Closing
from ...pipeline.opening import Dataset
from ...pipeline.order.mixed_order import MixedOrder
from ...pipeline.order.order import Order
from ...state_store.durable import list_snapshots
from ...state_store.ranks import ONE_PROCESS, agreement
from ...state_store.store import StateStore
from ...storage.arrays import Int64s
from ...storage.place import AnyPlace, place_of
from ...storage.selection import Selection
from ..config import TrainConfig
from ..errors import ConfigError, RunError
from ..metrics.step_clock import StepClock
from ..objectives import Objective, Outcome, Progress
from ..objectives.base import WEIGHT
from ..run_directory import RunDirectory
from ..uncompiled import uncompiled
from ..world import World, refuse_separate_directories
from .build import windows_from
from .loader import ENDLESS, Loader
from .own_dataset import write_own_files
from .resume_settings import differences, impossible


class SampleRows:
    """Takes and puts the rows of a step's samples, and gathers those of coming steps."""

    config: TrainConfig
    world: World
    dataset: Dataset
    objective: Objective
    order: Order
    selection: Selection | None
    device: torch.device
    clock: StepClock
    store: StateStore
    steps_done: int
    total_steps: int

    @property
    def progress(self) -> Progress:
        """The training's progress, for schedules."""
        return Progress(self.steps_done, self.order.steps_per_epoch, self.config.epochs)

    def store_settings(self) -> dict[str, Any]:
        """Return what `StateStore.create` and `open` need, but for the lock."""
        order, world = self.order, self.world
        return {
            "samples": order.rows.about.kept if isinstance(order, MixedOrder) else order.samples,
            "fields": self.objective.fields,
            "dataset_fingerprint": self.dataset.index.fingerprint,
            "selection": self.selection,
            "device": self.device,
            "memory_budget": self.config.state.memory_budget,
            "ranks": world.snapshots,
            "owned": order.rank_ids(world.rank, world.size),
        }

    def expect_coming_rows(self) -> None:
        """Announce the rows of all coming steps to the store that was just opened."""
        epochs = -(-self.total_steps // self.order.steps_per_epoch)
        self.store.expect(windows_from(self.steps_done, self.order, epochs, self.world))
        self._prefetched = self.steps_done + 1  # number of steps whose rows need no prefetch

    def take(self, sample_ids: Tensor) -> dict[str, Tensor]:
        """Return the state of these samples, each field [b] on the device, and prefetch coming samples' state.

        sample_ids: of the step's batch, int64 [b]. With sample weights, the state includes them as `weight`.
        """
        rows = self._rows_of(sample_ids)
        with self.clock.waiting("store_wait"):
            state = self.store.take(rows)
        if self.selection is not None and self.selection.weights is not None:
            weights = torch.from_numpy(self.selection.weights[rows])
            if self.device.type == "cuda":  # a copy from other memory would wait for all queued work of the GPU
                weights = weights.pin_memory()
            state[WEIGHT] = weights.to(self.device, non_blocking=True)
        end = min(self.steps_done + 1 + self.config.state.prefetch_steps, self.total_steps)
        for steps_done in range(self._prefetched, end):
            coming = self._positions(steps_done)
            with self.clock.waiting("store_wait"):  # exclude the time to compute the order
                self.store.prefetch(coming)
        self._prefetched = end
        return state

    def put(self, sample_ids: Tensor, state: Mapping[str, Tensor]) -> None:
        """Store the new state of these samples; it is written while the step continues.

        Call it before backprop: the new state depends on the forward pass alone.
        """
        rows = self._rows_of(sample_ids)
        with self.clock.waiting("store_wait"):
            self.store.put(rows, state, step=self.steps_done + 1)  # asynchronous: written during backprop

    def _rows_of(self, sample_ids: Tensor) -> Int64s | Tensor:
        """Return the samples' ids in the store: their positions if the run selects samples."""
        if self.selection is None:
            return sample_ids
        return self.selection.positions(sample_ids.numpy(), expected=self._positions(self.steps_done))

    def _positions(self, steps_done: int) -> Int64s:
        """Return the positions, or ids if all samples are selected, of this rank's samples in a step."""
        place = divmod(steps_done, self.order.steps_per_epoch)
        places = self.order.batch_ids(*place, self.world.rank, self.world.size)
        return places if self.selection is None else places[self.selection.are_present(places)]


class RowStore(Closing, SampleRows):
    """The rows of a loader's samples, and the objective of its settings: what `Run` has beside a model.

    A step calls `loss`, or `take`, the objective and `put`. Checkpoints of the model hold `state_dict`, which commits
    the rows of the same step; `load_state_dict` returns them to that step, whatever was written since. `thermopile
    inspect` reads the directory like a run's.

    `objective` may have parameters of its own, which your optimiser must train; they are part of `state_dict`.
    `steps_done` counts the steps.

        >>> with thermopile.Loader("data/mine") as loader, thermopile.RowStore("runs/rows", loader) as rows:
        ...     for batch in loader:
        ...         loss = rows.loss(torch.eye(16), torch.eye(16), batch.sample_ids)  # features of your model
        ...     print(rows.steps_done)
        4
    """

    total_steps = ENDLESS

    def __init__(self, path: AnyPlace, loader: Loader) -> None:
        """Make the directory, or open one that was made with the same settings. Called by all ranks.

        path: a directory or an address, of its own. loader: has the dataset, the settings and the ranks. It need not be
        iterated: on one rank, ids may come in any order. Rows that are there from a step after the first wait for
        `load_state_dict`. Raises ConfigError for other settings, RunError, StateStoreError, OSError.
        """
        self.config, self.world, self.dataset = loader.config, loader.world, loader.dataset
        self.order, self.selection, self.device = loader.order, loader.selection, loader.device
        self.objective, self.clock, self.steps_done = loader.objective.to(loader.device), StepClock(loader.device), 0
        self._served, self._run = loader.served, (run := RunDirectory(place_of(path)))
        self._store: StateStore | None = None
        if self.world.size > 1 and self.world.snapshots is ONE_PROCESS:
            raise ConfigError("rows on several ranks need torch.distributed; open the loader after it was initialised")
        refuse_separate_directories(self.world, run.path)
        with agreement(self.world.slow_group, RunError):
            if self.world.is_first:
                run.refuse_unusable()
                if not run.exists():
                    run.create(self.config, lambda: write_own_files(self.config, run, self.dataset, self.selection))
                recorded = run.config()
                if refused := impossible(differences(recorded, self.config), recorded):
                    raise ConfigError(f"{run.path} holds rows made otherwise: {'; '.join(refused.values())}")
            self._written_at = max((each.step for each in list_snapshots(run.state)), default=0) if run.has_state else 0
        if self._written_at == 0:
            self._open("step-0")

    def _open(self, at: str) -> None:
        """Open the store at a snapshot, which removes later ones; at `step-0` also a new one."""
        self.close()
        state, settings = self._run.state, self.store_settings()
        if self.world.control.broadcast(self._run.has_state):
            store = StateStore.open(state, at=at, **settings)
        else:
            store = StateStore.create(state, block_rows=self.order.block_rows, **settings)
        self._store, self.steps_done = store, store.last_snapshot.step
        self.expect_coming_rows()

    @property
    def store(self) -> StateStore:  # type: ignore[override]
        """The store of the rows. Raises RunError while it waits for `load_state_dict`, or after `close`."""
        if self._store is None:
            raise RunError(
                f"{self._run.path} holds rows of step {self._written_at:,}, but no checkpoint was loaded or it is "
                "closed. Pass your checkpoint's part to load_state_dict before the first step; to begin again, choose "
                'another path, or load {"snapshot": "step-0"}'
            )
        return self._store

    @uncompiled
    def loss(self, first: Tensor, second: Tensor, sample_ids: Tensor) -> Tensor:
        """Return the loss of a step, and put the samples' new state. Count the step.

        first, second: unit-norm features [b, d] of the pictures and captions, or of two views, on the device; of this
        rank's share of the batch. sample_ids: int64 [b], on the CPU. Under DistributedDataParallel, gradients are those
        of the global batch. Raises as `Objective.forward` and `StateStore.put`.
        """
        state = self.take(sample_ids)
        place = divmod(self.steps_done, self.order.steps_per_epoch)
        self.objective.shares = self._served.shares(*place, self.world.size)
        outcome: Outcome = self.objective(first, second, state, self.progress)
        self.put(sample_ids, outcome.state)
        return outcome.loss

    def put(self, sample_ids: Tensor, state: Mapping[str, Tensor]) -> None:
        """As `Run.put`, and count the step."""
        super().put(sample_ids, state)
        self.steps_done += 1

    def checkpoint(self) -> None:
        """Commit the rows of the last step, if they are not yet. Called by all ranks. Raises SnapshotError."""
        if self.store.last_snapshot.step < self.steps_done:
            epoch = self.steps_done // self.order.steps_per_epoch
            self.store.snapshot(self.steps_done, epoch=epoch).result()

    def state_dict(self) -> dict[str, Any]:
        """Return the part of a checkpoint, after `checkpoint`: the snapshot's id, and the objective's parameters.

        Called by all ranks, unless they have just called `checkpoint`.
        """
        self.checkpoint()
        return {"snapshot": self.store.last_snapshot.id, "objective": self.objective.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Return the rows to those of a checkpoint, and drop those of later steps. Called by all ranks.

        Raises SnapshotNotFoundError if the rows there are older than the checkpoint, or another run's.
        """
        self._open(state["snapshot"])
        if "objective" in state:
            self.objective.load_state_dict(state["objective"])

    def close(self) -> None:
        """Release the store. Steps after the last checkpoint are lost."""
        if self._store is not None:
            self._store.close()
            self._store = None
