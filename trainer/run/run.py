"""A run's parts and records, for any training loop: `Trainer` has ours, and a user's loop works the same way."""

import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from ...pipeline.batch import Batch
from ...pipeline.order.mixed_order import MixedOrder
from ...pipeline.order.order import Served
from ...state_store.errors import DamagedChunkError, SnapshotNotFoundError
from ...state_store.ranks import agreement
from ...state_store.store import StateStore
from ...storage.arrays import Int64s
from ...storage.gpu_copies import CudaDevice, Pace
from ...storage.place import AnyPlace, Lock, Places, place_of
from ...storage.selection import Selection
from ..checkpoints.checkpoint_files import Loaded, checkpoints_in, latest_checkpoint, remove_checkpoints
from ..checkpoints.tensors import take_apart
from ..config import TrainConfig, data_at
from ..config.layers import Layers
from ..encoders import Encoders
from ..encoders.initial_weights import load_initial_weights
from ..errors import ConfigError, NotFiniteError, RanksLostError, RunError, TrainingError, refusing
from ..metrics.metrics_log import MetricsLog, Scalar
from ..metrics.step_clock import StepClock
from ..metrics.trackers import Trackers, makers_of
from ..plugins import is_directory
from ..precision import compiler_fault, fast_kernels
from ..run_directory import RunDirectory
from ..world import ALONE, World, refuse_separate_directories
from . import build
from .checkpoint_writer import Checkpointer
from .own_dataset import keep_facts, write_own_files
from .restoring import find_start, newest, restore, state_to_grow, take_lock, warn_of_changes
from .row_store import SampleRows
from .selection_files import selects
from .starting import Request, start

FIRST_IDS = 8
"""Number of samples of a bad batch to name."""
_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything with a state dict: a module, an optimiser, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Run(SampleRows):
    """A run, new or resumed: dataset, order, encoders, objective, samples' state, metrics and checkpoints.

    In a user's loop, each step takes a batch from `batches()` and its state from `take`, passes the new state to `put`
    before backprop, and ends with `end_step`, which writes the log and due checkpoints. `attach` makes optimisers and
    the like part of the checkpoints. So `inspect`, `status`, `eval` and `export` work on the run. `Trainer` uses what
    `batches` and `end_step` are made of.

    Random numbers (dropout) depend on the step, so a resumed run neither repeats nor omits any. With several ranks,
    each has a run, and all make the same calls.

    `start` is the checkpoint that it is resumed from, until the first step; `directory` the run's files.

    `steps_done` counts completed steps, so during a step it excludes that step. The step that raises it to n is step n
    in metrics.jsonl, in the state and in the names of checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        directory: RunDirectory,
        *,
        resume: bool = False,
        world: World = ALONE,
        parts: build.Parts | None = None,
    ) -> None:
        """Make the parts of a run with complete settings (`resolve`), or of one to resume from its latest checkpoint.

        parts: as far as `resolve` made them. Writes nothing; `begin` does, once the ranks are known to agree and the
        loop's own parts are made, too. Called by all ranks. Raises ConfigError, RunError, DatasetError, OSError.
        """
        self.config, self.directory, self.world, self.mode = config, directory, world, config.objective.mode
        self.resumes = resume
        opened = parts.dataset if parts else None
        self.dataset, self.start = find_start(config, directory, world, opened, resume=resume)
        self.device = build.device_named(config.device)
        _, objective, self.order = parts or build.parts_of(config, self.dataset, world)
        self.objective = objective.to(self.device)
        with agreement(world.slow_group, ConfigError):  # published weights may be fetched
            if objective.settings.compile is True and (fault := compiler_fault(self.device)):
                cure = "set this to false, on resume with --allow-change objective.compile"
                raise ConfigError(f"objective.compile: {fault}; install what it lacks, or {cure}")
            torch.manual_seed(config.seed)
            self.encoders = self._created_encoders(pretrained=self.start is None)
        if config.data.local_views:
            self.encoders.image.backbone.check_side(config.data.local_size)
        self.selection = Selection(directory.selection) if selects(config.data) else None
        if isinstance(self.order, MixedOrder):
            self.selection = self.order.rows
        # The same order as ids of the dataset, for the loader and for messages; the state uses `order`'s numbers.
        self.served = Served(self.order, self.selection, self.dataset.n)
        self.total_steps = config.total_steps(self.order.steps_per_epoch)
        self.steps_done = self._refused_rows = self._refused_before = 0
        self.pieces = build.pieces_per_step(config.batch_size, config.micro_batch, world)
        self.clock = StepClock(self.device, fetches=self.dataset.fetches)
        self._pace = Pace(CudaDevice(self.device)) if self.device.type == "cuda" else None
        self.objective.communicating = partial(self.clock.computing, "communication")
        self._parts: dict[str, Stateful] = {"encoders": self.encoders, "objective": self.objective}
        self._has_begun = self._has_stepped = False
        with ExitStack() as resources:
            timed = self.device.type == "cuda" and not config.data.without
            resources.enter_context(fast_kernels(config.precision, timed=timed, deterministic=config.deterministic))
            served = replace(self.served, pieces=self.pieces)
            loader = build.open_loader(config.data, self.dataset, served, self.mode, self.device, world)
            self.loader = resources.enter_context(loader)
            with agreement(world.control, RunError):
                if self.start is None and config.init.run:
                    load_initial_weights(self.encoders, config.init.run, config.init.sides)
                self._makers = makers_of(config.trackers) if world.is_first else {}
            self._resources = resources.pop_all()

    def _created_encoders(self, *, pretrained: bool) -> Encoders:
        model, data, text = self.config.model, self.config.data, self.config.model.text
        reads_text = self.mode == "bimodal" and data.loader != "synthetic"
        if pretrained and reads_text and is_directory(text.name) and text.config.get("pretrained", True):
            from ..encoders.hf_directory import folder_of, refuse_other_tokenizer

            refuse_other_tokenizer(folder_of(text.name), self.dataset.tokenizer_path)
        given = model, self.mode, data.image_size, self.dataset.index.tokenizer
        return Encoders.create(*given, pretrained=pretrained, unit_norm=self.objective.unit_norm).to(self.device)

    def begin(self, *, record: bool = False) -> None:
        """Take the lock, open the state, the log and the checkpoint writer, and restore the parts. Called by all ranks.

        record: write a resumed run's settings, some of which may have changed.
        Raises RunExistsError, RunError, ConfigError, StateStoreError, OSError; the run is closed then.
        """
        with self._resources.pop_all() as opened:
            self._open_records(opened)
            if self.world.is_first and self.start:  # only now, when nothing can be refused any more
                warn_of_changes(self.config, self.start, self.order.steps_per_epoch)
            if self.world.is_first and self.resumes and record:
                self.locked_directory.record(self.config)  # the dataset's new path and other allowed changes
            self._resources = opened.pop_all()

    def _open_records(self, opened: ExitStack) -> None:
        config, run, world, resume = self.config, self.directory, self.world, self.resumes
        if not resume:
            refuse_separate_directories(world, run.path)
        lock, start = take_lock(config, run, self.start, world, resume=resume, until=opened)
        self.locked_directory = run = run.under(lock)
        with agreement(world.slow_group, RunError):  # to copy and check a selection takes a while
            if not resume and world.is_first:
                run.create(config, self._write_own_files)
        self.store, start = self._open_store(start, lock)
        opened.enter_context(self.store)
        with agreement(world.slow_group, RunError):
            if resume and world.is_first:
                keep_facts(run, self.dataset)  # one may be missing or damaged
        if start is not None:
            self._refused_rows = self._refused_before = restore(start, self.store, self._parts)
            self.steps_done = start.info.step
        self.start, self._has_begun = start, True
        with agreement(world.slow_group, ConfigError):
            if resume and world.is_first and self.selection is not None:
                self.refuse_thin_steps(self.selection.without)
        self.expect_coming_rows()
        windows = build.windows_from(self.steps_done, self.order, config.epochs, world)
        opened.enter_context(build.reading_ahead(config.data, self.dataset, self.served, windows, world))
        self.log = self._opened_log(run, opened)
        self.checkpointer = Checkpointer(config, run, self.store, self.log, world, self.dataset.index.fingerprint)
        opened.callback(self.checkpointer.close)

    def _open_store(self, start: Loaded | None, lock: Lock | None) -> tuple[StateStore, Loaded | None]:
        """Open the state at a checkpoint's snapshot; if damaged, at an earlier checkpoint's, which is returned with it.

        Without a checkpoint the state is created, or returned to its initial values if a run was killed before one.
        """
        config, run, world = self.config, self.locked_directory, self.world
        settings = self.store_settings() | {"lock": lock}
        if start is None:
            if world.control.broadcast(world.is_first and run.has_state):
                return StateStore.open(run.state, at="step-0", **settings), None
            carried = None
            if config.init.state:
                with agreement(world.control, RunError):
                    carried = state_to_grow(config, self.dataset, self.objective)
            return StateStore.create(run.state, block_rows=self.order.block_rows, carried=carried, **settings), None
        while True:
            try:
                store = StateStore.open(run.state, at=start.info.snapshot, **settings)
            except Exception as error:  # any failure on one rank makes all ranks fail
                is_damaged = world.any_rank(isinstance(error, DamagedChunkError | SnapshotNotFoundError))
                if not is_damaged or (earlier := newest(config, run, world, before=start.path)) is None:
                    raise
                if world.is_first:
                    damage = "the state of %s is damaged (%s). Resuming from %s"
                    _log.warning(damage, start.path, error, earlier.path.name)
                start = earlier
            else:
                if world.is_first:  # later checkpoints have lost their state
                    kept = {step for step in checkpoints_in(run.checkpoints) if step <= start.info.step}
                    remove_checkpoints(run.checkpoints, keep=kept)
                return store, start

    def _opened_log(self, run: RunDirectory, opened: ExitStack) -> MetricsLog:
        """Open the log, cut back to the step at which the run begins."""
        with agreement(self.world.slow_group, RunError):  # reading a long log takes a while
            if not self.world.is_first:  # one rank writes the log: its metrics cover the whole batch
                return opened.enter_context(MetricsLog(None, None, keep_steps=self.steps_done))
            run.remove_leftovers()
            run.metrics.begin(resuming=self.resumes, exactly=True)
            run.warnings.begin(resuming=self.resumes)
            trackers = None
            if self._makers and self.steps_done < self.total_steps:
                trackers = Trackers(run, self._makers, self.config, self.dataset, keep_steps=self.steps_done)
                opened.push(trackers.close)
            log = opened.enter_context(MetricsLog(run.metrics_file, trackers, keep_steps=self.steps_done))
            run.metrics.settle()
            return log

    @classmethod
    def from_settings(
        cls,
        path: AnyPlace,
        data: Places,
        settings: Mapping[str, Any] | None = None,
        *,
        preset: str | None = None,
        allow_change: Collection[str] = (),
        world: World = ALONE,
        begin: bool = True,
    ) -> Self:
        """Start the run in the directory or at the address `path`, or resume it there.

        A resumed run keeps the settings that `settings` leaves out.
        data: the dataset, a path or an address; or a list of paths, to mix their datasets. settings: a tree as in a
        TOML file, over the preset's. allow_change: settings, or tables of settings, that may differ from the run's,
        such as `epochs`. world: from `joined_world` under torchrun; all ranks call this. begin: False for a loop that
        makes its own parts before anything is written, and then calls `begin`.
        Raises ConfigError, also for other changes, RunError, DatasetError, StateStoreError, OSError.
        """
        given, directory = Layers(), RunDirectory(place_of(path))
        with agreement(world.control, ConfigError):
            if preset is not None:
                given.add_preset(preset)
            given.add(settings or {}, "settings")
            given.add({"data": data_at(data)}, "data")
        plan = start(given, Request(directory, given.origins.values(), allowed=allow_change), world)
        config = plan.config
        if begin and (config.model.ema or build.pieces_per_step(config.batch_size, config.micro_batch, world) > 1):
            raise ConfigError("micro_batch and model.ema are for thermopile's own loop, Trainer.train; leave them out")
        run = cls(config, directory, resume=plan.resume, world=world, parts=plan.parts)
        if begin:
            run.begin(record=True)
        return run

    def _write_own_files(self) -> None:
        write_own_files(self.config, self.locked_directory, self.dataset, self.selection)
        if self.selection is not None:
            self.refuse_thin_steps(self.selection.without)

    def refuse_thin_steps(self, holes: Int64s | None) -> None:
        """Raise ConfigError if a coming step would keep too few samples. holes: positions to leave out, ascending."""
        if holes is not None:
            with refusing("data.without", ValueError):
                pieces = self.pieces * self.world.size
                self.order.refuse_thin_steps(holes, self.steps_done, self.total_steps, pieces)

    def attach(self, **parts: Stateful) -> None:
        """Make optimisers and the like part of every checkpoint, and restore them if the run was resumed.

        Raises RunError if the checkpoint does not fit them, or after the first step; TypeError for a part whose
        `state_dict` holds anything but tensors, numbers, text, lists and dicts.
        """
        if self._has_stepped:
            raise RunError(f"{', '.join(parts)}: attach parts of a run before its first step")
        take_apart({name: part.state_dict() for name, part in parts.items()})
        self._parts |= parts
        if self.start is not None and self._has_begun:
            restore(self.start, self.store, parts)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of all coming steps, on the run's device; ids stay on the CPU.

        Raises RuntimeError unless `end_step` was called once for each batch.
        """
        self.clock.end_step()  # earlier time belongs to no step
        for pieces in self.steps():
            (batch,), before = pieces, self.steps_done
            self.seed_random_numbers()
            yield batch.to(self.device)
            if self.steps_done != before + 1:
                raise RuntimeError(f"{self.steps_done - before} steps were ended for a batch; call end_step once each")

    def computing(self, part: Literal["forward_backward", "optimizer"]) -> AbstractContextManager[None]:
        """Return a context whose time counts as this part of the step, in the log and in `thermopile status`."""
        return self.clock.computing(part)

    def end_step(self, *, loss: Tensor, **scalars: Scalar) -> None:
        """Count the step, log its scalars, and write a checkpoint if one is due or the step is the last.

        Every `log_every` steps this waits for the device. Raises TrainingError if a loss is not finite, and
        SnapshotError or OSError if the last checkpoint cannot be written.
        """
        self.count_step({"loss": loss, **scalars})
        _, checkpoint_is_due = self.agree(False)
        is_last = self.steps_done == self.total_steps
        if is_last or checkpoint_is_due or self.steps_done % self.config.log_every == 0:
            self.flush_log()
        if is_last or checkpoint_is_due:
            self.save(is_last=is_last)

    def steps(self) -> Iterator[Iterator[Batch]]:
        """Yield the batches of all coming steps, each as its pieces: one, unless `micro_batch` is set."""
        while self.steps_done < self.total_steps:
            epoch, step = divmod(self.steps_done, self.order.steps_per_epoch)
            pieces = self._awaited(self.loader.epoch(epoch, step * self.pieces))
            for first in pieces:
                place = divmod(self.steps_done, self.order.steps_per_epoch)
                self.objective.shares = self.served.shares(*place, self.world.size)
                yield chain([first], islice(pieces, self.pieces - 1))

    def _awaited(self, pieces: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            fetched_before = self.dataset.files.seconds_waited()
            with self.clock.waiting("data_wait"):
                piece = next(pieces, None)
            if self.dataset.fetches:
                self.clock.reassign("data_wait", "fetch_wait", self.dataset.files.seconds_waited() - fetched_before)
            if piece is None:
                return
            yield piece

    def seed_random_numbers(self, piece: int = 0) -> None:
        """Seed random numbers, e.g. for dropout, from the step, so that nothing needs saving; ranks differ.

        piece: 1 or more for the numbers of one piece of the batch.
        """
        key = f"{self.config.seed}/{self.steps_done}/{self.world.rank}{f'/{piece}' if piece else ''}"
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)

    def count_step(self, scalars: Mapping[str, Scalar]) -> None:
        """Count the step, and add its scalars to the log, with its epoch and times."""
        scalars = {"epoch": self.steps_done // self.order.steps_per_epoch, **scalars}
        self.start, self._has_stepped = None, True  # no part may be restored from that checkpoint any more
        self.steps_done += 1
        self.dataset.files.finished(self.steps_done)
        if self._pace is not None:
            self._pace.end_step()
            self.checkpointer.reserve(self.training_state)
        backlog = {"write_backlog_seconds": self.store.write_backlog}
        times = self.clock.end_step()
        self.log.add({"step": self.steps_done, **scalars, "refused_rows": self._refused_rows} | times | backlog)

    def agree(self, stop: bool) -> tuple[bool, bool]:
        """Agree at the end of a step whether any rank is to stop, and whether a checkpoint is due."""
        own = [stop, self.store.refused_rows, self.checkpointer.is_due(self.steps_done), self.checkpointer.write_state]
        stops, refused, dues, write_states = map(list, zip(*self.world.control.all_gather(own), strict=True))
        self._refused_rows = self._refused_before + sum(refused)
        self.checkpointer.settle(write_states)
        return any(stops), bool(dues[0])

    def save(self, *, is_last: bool) -> None:
        """Write a checkpoint; only the last one must succeed. Raises SnapshotError, OSError."""
        epoch = self.steps_done // self.order.steps_per_epoch
        self.checkpointer.save(self.steps_done, epoch, self.training_state, is_last=is_last)

    def training_state(self) -> dict[str, Any]:
        """Return the model's part of a checkpoint: tensors on the device, not copied."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        return states | {"refused_rows": self._refused_rows}

    def flush_log(self) -> list[dict[str, Any]]:
        """Write the log's waiting lines and return them. Raises TrainingError if a loss is not finite."""
        try:
            return self.log.flush()
        except NotFiniteError as error:
            raise self.not_finite(error.step - 1, str(error)) from error

    def not_finite(self, steps_done: int, why: str) -> TrainingError:
        """Return the error for values of the step after `steps_done` that are not finite."""
        self.world.end_by_itself()
        self.checkpointer.wait()  # on this rank only, since the others may not know yet
        last = latest_checkpoint(self.directory.checkpoints)
        left = f"The last checkpoint, {last}, is from" if last else "There is no checkpoint"
        return TrainingError(
            f"{why}. {self.samples_after(steps_done)}: check whether they are damaged. {left} before that step. "
            "If they are not, start a new run with a lower learning rate"
        )

    def samples_after(self, steps_done: int) -> str:
        """Describe the samples of the step after `steps_done`."""
        ids = self.served.batch_ids(*divmod(steps_done, self.served.steps_per_epoch)).tolist()
        return f"The ids of its {len(ids)} samples begin with {', '.join(map(str, ids[:FIRST_IDS]))}"

    def ranks_lost(self, lost: str) -> RanksLostError:
        """Return the error for a step with missing ranks, described by `lost`; names the last checkpoint."""
        last = latest_checkpoint(self.directory.checkpoints)
        left = f"--resume continues from the last checkpoint, {last}" if last else "There is no checkpoint yet"
        return RanksLostError(f"lost {lost} at step {self.steps_done + 1:,}; see its messages. {left}")

    def close(self) -> None:
        """End the threads and release the run. Steps after the last checkpoint are lost."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        # If ranks are gone, threads may wait for them for an hour.
        if kind is None or not issubclass(kind, RanksLostError):
            if kind is not None:
                self.world.end_by_itself()
            self._resources.__exit__(kind, *error)
