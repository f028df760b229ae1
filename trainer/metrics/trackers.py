"""Trackers: other places for the lines of metrics.jsonl, such as W&B, fed by a thread that the run never waits for."""

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np

from ...pipeline.opening import Dataset
from ...state_store.reader import StateReader
from ...storage.files import own_directory
from ...storage.log import FileLog
from ..config import TrainConfig, flat
from ..errors import ConfigError
from ..plugins import load_plugin
from ..run_directory import RunDirectory, read_lineage
from .metrics_file import last_lines, numbers_in

QUEUE = 10_000
"""Lines, of about a kilobyte, that wait for a slow tracker."""
CLOSE_SECONDS, UPLOAD_SECONDS = 15.0, 10.0
"""The longest that a run's end waits for its trackers, and of this for W&B's last upload."""
FAILED_SECONDS = 2.0
"""The longest that an error waits for them."""

EDGES = np.geomspace(1e-3, 10, 257)
"""Edges of the bins of every histogram, 4 % apart. Values outside are counted in the first or the last bin."""
_KEPT = re.compile(rb"([0-9a-f]{16}) ([0-9]{1,18}) ([01])\n")
_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Made and called in one thread; whatever it raises ends this tracker alone."""

    def add(self, line: dict[str, Any]) -> None:
        """Take `step` and the finite numbers of a line by name, such as evaluation/knn/10/all.

        Once an epoch also the temperatures, as `summary` returns them.
        """

    def close(self) -> None: ...


Maker = Callable[[Path, dict[str, Any], str], Tracker]
"""A tracker's class. Its arguments: the run's folder on this machine, the settings by full key, and the run's id."""


class TensorBoard:
    """Writes RUN/tensorboard/; existing steps after keep_steps are hidden."""

    def __init__(self, directory: Path, settings: dict[str, Any], run_id: str, *, keep_steps: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = own_directory(directory / "tensorboard")
        self._writer = SummaryWriter(str(path), purge_step=keep_steps + 1)
        self._writer.add_text("settings", "\n".join(f"    {key} = {value!r}" for key, value in settings.items()))

    def add(self, line: dict[str, Any]) -> None:
        step, histograms = line.pop("step"), line.pop("histograms", {})
        for name, value in line.items():
            self._writer.add_scalar(name, value, step)
        for name, (counts, edges) in histograms.items():
            middles = (edges[1:] + edges[:-1]) / 2
            sums = counts.sum(), counts @ middles, counts @ middles**2
            self._writer.add_histogram_raw(name, edges[0], edges[-1], *sums, edges[1:].tolist(), counts.tolist(), step)
        self._writer.flush()  # takes no longer than leaving it to the writer's own thread

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Sends to W&B, as WANDB_MODE, WANDB_PROJECT and the like say; a resumed run continues its W&B run."""

    def __init__(self, directory: Path, settings: dict[str, Any], run_id: str) -> None:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):  # not below a progress bar
            raise RuntimeError("no API key; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        own = wandb.Settings(console="off", finish_timeout=UPLOAD_SECONDS)
        shown: dict[str, Any] = {"name": directory.name, "config": settings, "allow_val_change": True}
        self._run = wandb.init(id=run_id, resume="allow", settings=own, **shown)
        self._histogram = wandb.Histogram

    def add(self, line: dict[str, Any]) -> None:
        step, histograms = line.pop("step"), line.pop("histograms", {})
        self._run.log(line | {name: self._histogram(np_histogram=of) for name, of in histograms.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


def makers_of(names: Iterable[str]) -> dict[str, Maker]:
    """Return the trackers of these settings by name, imported. Raises ConfigError for a missing package or class."""
    built_in: dict[str, Maker] = {"tensorboard": TensorBoard, "wandb": Wandb}
    makers: dict[str, Maker] = {}
    for name in names:
        if name in built_in and find_spec(name) is None:
            raise ConfigError(f"tracker {name} needs its package: pip install 'thermopile[{name}]', or leave it out")
        makers[name] = built_in.get(name) or load_plugin(name, f"trackers: {name!r}")
    return makers


class Trackers:
    """The trackers of a run. No line is sent twice: steps that a resumed run makes again keep the values sent first,
    since few trackers take anything back. TensorBoard does, and gets them again."""

    def __init__(
        self, run: RunDirectory, makers: dict[str, Maker], config: TrainConfig, dataset: Dataset, *, keep_steps: int
    ) -> None:
        """Start the thread, before metrics.jsonl is cut back to keep_steps. Raises OSError."""
        run_id, self._sent = _identified(run)
        self._state, self._dataset, self._summed_up = run.state, dataset, keep_steps
        self._is_full = False
        self._queue = SimpleQueue[dict[str, Any] | None]()
        self._trackers: dict[str, Tracker] = {}
        if "tensorboard" in makers:
            makers = makers | {"tensorboard": partial(TensorBoard, keep_steps=keep_steps)}
        given = makers, run.local, flat(config.model_dump(mode="json")), run_id
        self._thread = Thread(target=self._send, args=given, name="thermopile-trackers", daemon=True)
        self._thread.start()

    def add(self, line: dict[str, Any]) -> None:
        """Queue a line of metrics.jsonl, without waiting: if it does not fit it is left out, with one warning."""
        if self._queue.qsize() < QUEUE:
            self._queue.put(line)
        elif not self._is_full:
            _log.warning("trackers: %d lines wait, so some are left out; metrics.jsonl has them all", QUEUE)
            self._is_full = True

    def close(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Let the thread send what is queued and end, for at most CLOSE_SECONDS, after an error FAILED_SECONDS."""
        seconds = FAILED_SECONDS if error else CLOSE_SECONDS
        self._queue.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            _log.warning("trackers: not done after %.0f s, so they may lack the last lines", seconds)

    def _send(self, makers: dict[str, Maker], *given: Any) -> None:
        for name, make in makers.items():
            with self._dropped_if_it_fails(name):
                self._trackers[name] = make(*given)
        step, epoch = 0, None
        for line in iter(self._queue.get, None):
            step, numbers = line["step"], dict(numbers_in(line))
            if line.get("epoch", epoch) != epoch:
                epoch = line["epoch"]
                numbers |= self._temperatures(step)
            self._share(numbers, (step, "evaluation" in line))
        if found := self._temperatures(step):  # of the last checkpoint
            self._share({"step": step} | found, (step, True))
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                tracker.close()

    def _share(self, numbers: dict[str, Any], place: tuple[int, bool]) -> None:
        for name, tracker in list(self._trackers.items()):
            if place > self._sent or name == "tensorboard":
                with self._dropped_if_it_fails(name):
                    tracker.add(dict(numbers))

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (it may raise anything, even SystemExit, and must cost no step)
            _log.warning("the tracker %s failed and gets no more lines; metrics.jsonl has all: %r", name, error)
            if tracker := self._trackers.pop(name, None):
                with suppress(BaseException):
                    tracker.close()

    def _temperatures(self, step: int) -> dict[str, Any]:
        """Return the summary of the newest snapshot; empty if it was sent, or is newer than the step being sent."""
        try:
            reader = StateReader.open(self._state)
            if not self._summed_up < reader.snapshot.step <= step:
                return {}
            self._summed_up = reader.snapshot.step
            return summary(reader, self._dataset)
        except Exception as error:  # noqa: BLE001 (the snapshot may be deleted meanwhile, the dataset damaged)
            _log.warning("trackers get no temperatures this time: %s", error)
            return {}


def _identified(run: RunDirectory) -> tuple[str, tuple[int, bool]]:
    """Return the run's id, and which line was sent last: its step, and whether it is an evaluation. Both are kept."""
    kept = _KEPT.fullmatch(run.trackers_id.read_bytes()) if run.trackers_id.is_present() else None
    made = read_lineage(run.lineage_file)
    run_id, *sent = kept.groups() if kept else ((made.id if made else secrets.token_hex(8)).encode(), b"0", b"0")
    places = [(int(sent[0]), sent[1] == b"1")]
    if run.metrics_file.exists():
        steps, evaluations, _ = last_lines(FileLog(run.metrics_file), 1, 1)
        places += [(line["step"], "evaluation" in line) for line in (*steps, *evaluations)]
    run.trackers_id.rewrite(b"%s %d %d\n" % (run_id, *max(places)))
    return run_id.decode(), max(places)


def summary(reader: StateReader, dataset: Dataset) -> dict[str, Any]:
    """Return what the visited samples' temperatures say; empty for a run without a temperature per sample.

    `histograms`: for each side, such as image/tau, counts int64 [bins] and edges float64 [bins + 1], from the first
    bin with samples to the last. And numbers image/tau_of_classes/16: the mean tau of a class, over the classes of 16
    to 31 visited samples; not for a dataset in an object store, where the classes would have to be fetched again.
    Reads a block at a time. Raises StateStoreError, DatasetError, OSError.
    """
    import pandas as pd  # late: only a run with trackers needs it

    sides, samples = [name for name in reader.fields if name.endswith("/tau")], reader.samples
    if not sides:
        return {}
    counts = {side: np.zeros(len(EDGES) - 1, np.int64) for side in sides}
    pieces = [pd.DataFrame(columns=[*sides, "size"], dtype=float)]  # sums over classes: of many blocks, of some more
    tables = repeat(None) if dataset.is_remote else dataset.tables(["group"], reader.block_rows)
    for start, table in zip(range(0, samples, reader.block_rows), tables, strict=False):
        rows = reader.rows(start, min(start + reader.block_rows, samples), [*sides, "visits"])
        seen = rows.pop("visits") > 0
        for side in sides:
            counts[side] += np.histogram(rows[side][seen].clip(EDGES[0], EDGES[-1]), EDGES)[0]
        if table is not None:
            frame = pd.DataFrame(rows | {"size": seen}, dtype=float)[seen]
            pieces.append(frame.groupby(table["group"].to_pandas()[seen]).sum())
            if sum(map(len, pieces[1:])) > len(pieces[0]):
                pieces = [pd.concat(pieces).groupby(level=0).sum()]
    sums = pd.concat(pieces).groupby(level=0).sum()
    means = sums[sides].div(sums["size"], axis=0).groupby(2 ** np.log2(sums["size"]).astype(int)).mean()
    numbers = {f"{side}_of_classes/{size}": mean for side in sides for size, mean in means[side].items()}
    histograms = {}
    for side, of_side in counts.items():
        if len(having := np.flatnonzero(of_side)):
            first, last = having[[0, -1]]
            histograms[side] = of_side[first : last + 1], EDGES[first : last + 2]
    return numbers | {"histograms": histograms}
