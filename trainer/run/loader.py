"""The batches of a run for another library's training loop."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

from ...pipeline.batch import Batch
from ...pipeline.loading import Closing
from ...pipeline.opening import Dataset, open_dataset
from ...pipeline.order.mixed_order import MixedOrder
from ...pipeline.order.order import ORDER_VERSION, Served
from ...pipeline.order.sampler import Position
from ...state_store.ranks import agreement
from ...storage.local import LocalPath
from ...storage.place import Places
from ...storage.selection import Selection
from ..config import data_at, flat, load_config, to_tree
from ..config.layers import Layers
from ..errors import ConfigError, refusing
from ..world import World, current_world
from .build import device_named, open_loader, reading_ahead, resolve, windows_from
from .restoring import MAY_DIFFER, facts, refuse_differences
from .resume_settings import within
from .selection_files import selects, write_selection

ENDLESS = 1 << 40
"""Epochs that are announced to what reads ahead."""
OF_BATCHES = ("seed", "batch_size", "order", "data", "objective.mode")
"""Settings, and tables of settings, on which batches depend."""
ONE_PROCESS = "thermopile.Loader cannot be copied to another process; use it in place of torch's DataLoader"
NOT_OF_BATCHES = {*MAY_DIFFER, "data.cache", "data.ahead", "data.weights"}


class Loader(Closing, Position):
    """One rank's batches of a dataset, as `thermopile train` makes them, in place of torch's DataLoader.

    Each iteration yields the rest of an epoch as `Batch`, and the next one begins with the next epoch. `state_dict`
    holds the position after the last batch that was yielded. A loader that loads it yields the same ids, views and
    tokens as one that was never stopped, on any number of ranks that divides `order.canonical_shards`.

    It decodes in threads and reads ahead by itself, so it cannot be copied to another process.

        >>> with thermopile.Loader("data/mine", {"batch_size": 32}) as loader:
        ...     print([len(batch.sample_ids) for batch in loader])
        [32, 32]
    """

    def __init__(self, data: Places, settings: Mapping[str, Any] | None = None, *, world: World | None = None) -> None:
        """Open a dataset, a path or an address; or a list of paths, to mix their datasets.

        settings: a tree as for `Run.from_settings`. `batch_size` counts the samples of all ranks. Settings of encoders,
        optimiser, checkpoints and evaluation have no effect. world: None for the ranks of torch.distributed, if another
        library has begun it. Called by all ranks. Raises ConfigError, DatasetError, OSError.
        """
        self.world = world = current_world() if world is None else world
        self._process = os.getpid()
        with ExitStack() as opened:
            with agreement(world.slow_group, ConfigError):
                given = Layers()
                # The encoders are the caller's; without names, large views would be refused for the built-in ones.
                given.add({"model": {"image": {"name": "conv"}, "text": {"name": "mean_embedding"}}}, "loader")
                given.add(settings or {}, "settings")
                given.add({"data": data_at(data)}, "data")
                asked = load_config(given.tree)
                dataset = open_dataset(asked.data.places, asked.data.tars)
                self.config, (_, self.objective, order) = resolve(asked, dataset, world)
                super().__init__(order)
                self.selection: Selection | None = order.rows if isinstance(order, MixedOrder) else None
                if selects(self.config.data):
                    folder = LocalPath(opened.enter_context(TemporaryDirectory(prefix="thermopile-"))) / "selection"
                    write_selection(self.config.data, dataset, folder)
                    self.selection, steps = Selection(folder), self.config.total_steps(len(self))
                    if (holes := self.selection.without) is not None:
                        with refusing("data.without", ValueError):
                            order.refuse_thin_steps(holes, 0, steps, world.size)
                self.served = Served(order, self.selection, dataset.n)
                self.device = device_named(self.config.device)
                self._opened, self._announced = opened.enter_context(ExitStack()), -1
                self._open(dataset)
            refuse_differences(world, facts(self.config, dataset))
            self._resources = opened.pop_all()

    def _open(self, dataset: Dataset) -> None:
        self._opened.close()
        self.dataset, config = dataset, self.config
        of_order = self.served, config.objective.mode, self.device, self.world
        self._loader = self._opened.enter_context(open_loader(config.data, dataset, *of_order))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch: views and tokens on the settings' device, ids on the CPU."""
        if os.getpid() != self._process:
            raise RuntimeError(ONE_PROCESS)
        if self.dataset.fetches and self.steps_done != self._announced:
            if self._announced >= 0:  # what was read cannot be planned again
                self._open(open_dataset(self.config.data.places, self.config.data.tars))
            windows = windows_from(self.steps_done, self.order, ENDLESS, self.world)
            self._opened.enter_context(reading_ahead(self.config.data, self.dataset, self.served, windows, self.world))
        epoch, first_step = divmod(self.steps_done, len(self))
        for step, batch in enumerate(self._loader.epoch(epoch, first_step), first_step):
            self.steps_done = self._announced = epoch * len(self) + step + 1
            yield batch.to(self.device)
            self.dataset.files.finished(epoch * len(self) + step + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the coming batches depend on: numbers and texts."""
        of_batches = {"dataset": self.dataset.index.fingerprint, "order_version": ORDER_VERSION}
        for key, value in flat(to_tree(self.config)).items():
            if within(key, OF_BATCHES) and key not in NOT_OF_BATCHES:
                of_batches[key] = value
        return {"steps_done": self.steps_done, "of_batches": of_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`. Raises ConfigError if its batches are not those of this loader."""
        own, other = self.state_dict()["of_batches"], state["of_batches"]
        changes = [
            f"{key}: {other.get(key)!r} → {own.get(key)!r}"
            for key in sorted(own.keys() | other.keys())
            if own.get(key) != other.get(key)
        ]
        if changes:
            raise ConfigError(f"the checkpoint's loader served other batches than this one would: {'; '.join(changes)}")
        self.steps_done = int(state["steps_done"])

    def close(self) -> None:
        """End the threads and delete temporary files."""
        self._resources.close()

    def __reduce__(self) -> Any:
        raise TypeError(ONE_PROCESS)
