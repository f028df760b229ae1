"""The rows of state of each step's samples, by the samples' ids; `Run` and `RowStore` are built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...pipeline.opening import Dataset
from ...pipeline.order.mixed_order import MixedOrder
from ...pipeline.order.order import Order
from ...state_store import StateStore
from ...storage.selection import Selection
from ..config import TrainConfig
from ..metrics.step_clock import StepClock
from ..objectives import Objective, Progress
from ..objectives.base import WEIGHT
from ..world import World
from .build import windows_from


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

    def _rows_of(self, sample_ids: Tensor) -> NDArray[np.int64] | Tensor:
        """Return the samples' ids in the store: their positions if the run selects samples."""
        if self.selection is None:
            return sample_ids
        return self.selection.positions(sample_ids.numpy(), expected=self._positions(self.steps_done))

    def _positions(self, steps_done: int) -> NDArray[np.int64]:
        """Return the positions, or ids if all samples are selected, of this rank's samples in a step."""
        place = divmod(steps_done, self.order.steps_per_epoch)
        places = self.order.batch_ids(*place, self.world.rank, self.world.size)
        return places if self.selection is None else places[self.selection.are_present(places)]
