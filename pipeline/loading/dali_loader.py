"""The NVIDIA DALI loader: decodes and augments JPEGs on the GPU or CPU, in the sample order.

A JPEG is decoded once for all views. A view's random choices are inputs beside the bytes; the graph itself is
deterministic.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import current_thread
from typing import Any, Literal, NamedTuple

import numpy as np
import nvidia.dali.tensors
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ...storage.arrays import Int32s, Int64s, Uint8s
from ...storage.gpu_copies import Arriving, Copies, CudaDevice
from ..batch import Batch
from ..cores import cores
from ..dataset.stored_sample import UNDECODABLE, read_samples
from ..opening import Dataset
from ..order.order import AnyOrder
from ..planted import Planting
from ..views.recipes import Recipe, sides_of_views, view_parameters
from . import Loader, refuse_other_samples
from .dali_graph import inputs_of_view, views_of_jpegs
from .reader import Reader, own_thread

tensors: Any = nvidia.dali.tensors  # its own types lack `broadcast`


class _Read(NamedTuple):
    sample_ids: Int64s
    tokens: Int32s | None
    jpegs: Uint8s
    """The JPEGs' bytes, concatenated."""
    inputs: dict[str, NDArray[Any]]
    """Name of the pipeline's input -> values, [b, …]."""


class DALILoader(Loader):
    """Serves the batches of one rank, one epoch at a time. Batches are fresh tensors and may be kept.

    On the GPU, views are CUDA tensors on the stream that is current when the batch is requested, made without a copy on
    the host. Ids stay on the CPU, as do tokens, in pinned memory.

    The loader's own thread reads, feeds the pipeline and takes its outputs, so the caller's thread waits only for
    late batches. Only this thread calls the pipeline, whose queue of runs has no lock.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: AnyOrder,
        *,
        recipe: Recipe,
        image_size: int,
        views: int,
        local_size: int = 96,
        local_views: int = 0,
        workers: int | None = None,
        ahead: int = 2,
        rank: int = 0,
        world: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
        hardware_load: float = 0.65,
        captions: Literal["draw", "first"] = "draw",
        planting: Planting | None = None,
    ) -> None:
        """Open a loader.

        Views and captions are ViewMaker's (ffcv_loader.py), as are the arguments not listed here.
        workers: DALI threads; None: one more than cores, since each operator waits for its last sample.
        ahead: number of batches to prefetch, at least 1.
        device: where to decode and augment; "cuda" is torch's current CUDA device.
        hardware_load: share of the JPEGs for the GPU's JPEG engine, if any, 0 … 1; the GPU's cores decode the rest.
        Raises DatasetError if the order was made for another number of samples.
        """
        if not 0 <= hardware_load <= 1:
            raise ValueError(f"hardware_load {hardware_load} is not a share; use 0 … 1")
        refuse_other_samples(order, dataset)
        self.order, self._recipe, self._views = order, recipe, views
        self._sides = sides_of_views(image_size, views, local_size, local_views)
        self._rank, self._world, self._hardware_load = rank, world, hardware_load
        self._workers, self._ahead = workers or cores() + 1, max(1, ahead)
        self._reader = Reader(dataset, self._workers, captions, order.seed, planting)
        self._device_id = torch.cuda.current_device() if device == "cuda" else None
        self._copies = None if self._device_id is None else Copies(CudaDevice(torch.device("cuda", self._device_id)))
        self._thread = own_thread(self._device_id)
        self._begun: deque[Future[_Read]] = deque()
        self._due: deque[Future[Callable[[], Batch]]] = deque()
        self._turn = 0
        self._pipeline: Any = None  # only the thread uses this and `_runs`
        self._runs = 0
        """Runs of the pipeline whose outputs were not taken."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """As `Loader.epoch`. Starting an epoch ends the previous one."""
        self._drain()
        self._turn = turn = self._turn + 1
        end = self.order.steps_per_epoch
        try:
            self._go_on(epoch, range(first_step, end)[: self._ahead])
            for step in range(first_step, end):
                yield self._next(epoch, range(step + self._ahead, end)[:1])
                if self._turn != turn:
                    raise RuntimeError(f"epoch {epoch} was ended by another: this loader serves one epoch at a time")
        finally:
            if self._turn == turn:
                self._drain()

    def close(self) -> None:
        """Stop DALI's and the reading threads after their current batches."""
        self._turn += 1
        self._drain()
        self._thread.shutdown()
        self._pipeline = None
        self._reader.close()

    def _next(self, epoch: int, steps: range) -> Batch:
        """Return the batch that is due; let the thread begin the batches of `steps` and finish the next one."""
        made = self._due.popleft().result()
        self._go_on(epoch, steps)
        return made()

    def _go_on(self, epoch: int, steps: range) -> None:
        for step in steps:
            self._begun.append(self._thread.submit(self._begin, epoch, step))
        if self._begun:
            self._due.append(self._thread.submit(self._finish, self._begun.popleft()))

    def _drain(self) -> None:
        """Discard the batches begun, and wait until the thread is idle."""
        futures: list[Future[Any]] = [*self._begun, *self._due]
        for future in futures:
            future.cancel()
        self._begun.clear()
        self._due.clear()
        with suppress(RuntimeError):  # the thread has ended: the loader was closed, or the interpreter is ending
            discarded = self._thread.submit(self._discard_runs)
            # The garbage collector may end an epoch in any thread, even in one of the threads awaited here.
            if not current_thread().name.startswith("thermopile-"):
                discarded.result()

    # The thread's work

    def _begin(self, epoch: int, step: int) -> _Read:
        """Read a batch and feed it to the pipeline. Raises DatasetError for a damaged sample."""
        ids = self.order.batch_ids(epoch, step, self._rank, self._world)
        batch = self._read(self.order.draw(epoch, step), ids)
        self._pipeline = self._pipeline or self._build()
        try:
            _start(self._pipeline, batch.jpegs, batch.inputs)
        except Exception:  # a half-fed pipeline would pair pixels with other samples' choices
            self._forget_pipeline()
            raise
        self._runs += 1
        return batch

    def _read(self, epoch: int, ids: Int64s) -> _Read:
        """Read a batch, whose rows are shared among the reader's threads."""
        located = self._reader.locate(ids, epoch)
        heights, widths, ends = located.height, located.width, np.cumsum(located.jpeg_bytes)
        jpegs = np.empty(ends[-1], np.uint8)
        self._reader.finish(self._reader.start(ids, located, read_samples, ends, jpegs))
        inputs: dict[str, NDArray[Any]] = {
            "jpeg_start": (ends - located.jpeg_bytes)[:, np.newaxis],
            "jpeg_bytes": located.jpeg_bytes[:, np.newaxis],
            "sides": np.stack([heights, widths], axis=1).astype(np.float32),
        }
        for view, side in self._sides.items():
            drawn = view_parameters(self._recipe, self.order.seed, epoch, ids, heights, widths, view)
            inputs |= {f"{name}{view}": values for name, values in inputs_of_view(self._recipe, drawn, side).items()}
        return _Read(ids, located.tokens if located.vocab_size else None, jpegs, inputs)

    def _finish(self, begun: Future[_Read]) -> Callable[[], Batch]:
        """Take the oldest batch. Returns a function for the caller's thread, whose stream then waits for the views."""
        batch = begun.result()
        if not self._runs:
            raise RuntimeError("a later batch could not be fed to DALI, which lost its pipeline; start the epoch again")
        try:
            outputs = self._take_outputs()
        except RuntimeError as error:
            if (row := self._first_refused(batch)) is not None:
                raise self._reader.damaged(int(batch.sample_ids[row]), UNDECODABLE) from error
            raise
        ids = torch.from_numpy(batch.sample_ids)
        tokens = None if batch.tokens is None else torch.from_numpy(batch.tokens)
        if self._copies is None:  # the tensors share DALI's memory and own it while they live
            views = tuple(from_dlpack(output.as_tensor()) for output in outputs)
            return lambda: self._batch(ids, views, tokens)
        pinned, arriving = None if tokens is None else tokens.pin_memory(), copy_outputs(outputs, self._copies)
        return lambda: self._batch(ids, tuple(arriving.here()), pinned)

    def _batch(self, ids: Tensor, views: tuple[Tensor, ...], tokens: Tensor | None) -> Batch:
        return Batch(ids, views[: self._views], tokens, views[self._views :])

    def _take_outputs(self) -> tuple[Any, ...]:
        """Return the oldest run's outputs. DALI pipelines do not survive an error: the next batch builds a new one."""
        try:
            stream = None if self._copies is None else self._copies.stream
            outputs: tuple[Any, ...] = self._pipeline.share_outputs(cuda_stream=stream)
            self._pipeline.release_outputs()
        except Exception:
            self._forget_pipeline()
            raise
        self._runs -= 1
        return outputs

    def _first_refused(self, batch: _Read) -> int | None:
        """Find the row that causes a batch's error by running each row alone: DALI does not always name it."""
        pipeline = self._build()
        for row in range(len(batch.sample_ids)):
            _start(pipeline, batch.jpegs, {name: values[row : row + 1] for name, values in batch.inputs.items()})
            try:
                pipeline.share_outputs()
            except RuntimeError:
                return row
            pipeline.release_outputs()
        return None

    def _discard_runs(self) -> None:
        while self._runs:
            with suppress(RuntimeError):  # a damaged sample that nobody requested
                self._take_outputs()

    def _forget_pipeline(self) -> None:
        self._pipeline, self._runs = None, 0

    def _build(self) -> Any:
        pipeline = views_of_jpegs(
            self._recipe,
            self._sides,
            self._device_id is not None,
            self._hardware_load,
            batch_size=self.order.batch_size // self._world,
            num_threads=self._workers,
            device_id=self._device_id,
            prefetch_queue_depth=1,  # runs started with the first one; later ones are scheduled explicitly
        )
        pipeline.build()
        return pipeline


def _shared(pixels: Any, stream: Any) -> Tensor:
    """Return DALI's memory as a tensor for use on a stream, which waits until it is filled."""
    return from_dlpack(pixels.__dlpack__(stream=stream.cuda_stream))


def copy_outputs(outputs: Sequence[Any], copies: Copies, shared: Callable[[Any, Any], Tensor] = _shared) -> Arriving:
    """Copy a pipeline's outputs to torch's memory, and wait for the end of the copies.

    DALI overwrites an output in the order of its own stream as soon as its last reference is gone, though torch's
    stream may still read it: the first layer's weight gradient does, at the end of the step. The caller therefore
    holds `outputs` until this returns. DALI's `feed_ndarray` is no help: its copy waits for all earlier work on
    DALI's stream, later batches included, and that work waits for the copy.
    """
    views = []
    for output in outputs:
        pixels = shared(output.as_tensor(), copies.stream)
        views.append(copies.device.empty(pixels.shape, torch.float32, copies.stream))
        copies.device.copy(views[-1], pixels, copies.stream)
    arriving = copies.arriving(views)
    arriving.wait()
    return arriving


def _start(pipeline: Any, jpegs: Uint8s, inputs: dict[str, NDArray[Any]]) -> None:
    # Every sample gets the memory of the whole batch, and the graph cuts out its own part. Making an object for each
    # would hold the interpreter's lock, 10 ms for 1,024, and DALI's threads would take it as often to release them.
    rows = len(inputs["jpeg_start"])
    pipeline.feed_input("jpegs", tensors.TensorListCPU.broadcast(tensors.TensorCPU(jpegs), rows))
    for name, values in inputs.items():
        pipeline.feed_input(name, values)
    pipeline.schedule_run()
