"""The NVIDIA DALI loader: decodes and augments JPEGs on the GPU or CPU, in the sample order.

A JPEG is decoded once for all views. The random choices of a view are inputs beside the bytes; the graph itself is
deterministic.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import nvidia.dali
import nvidia.dali.math
import torch
from numpy.typing import NDArray
from nvidia.dali.plugin.pytorch.torch_utils import feed_ndarray
from torch.utils.dlpack import from_dlpack

from ...streams import Arriving, Copies, CudaDevice
from ..augment import Recipe, ViewParameters, view_parameters
from ..batch import Batch
from ..cores import cores
from ..dataset import Dataset
from ..order import Order
from ..stored_sample import UNDECODABLE, read_samples
from . import refuse_other_samples
from .reader import Reader

dali: Any = nvidia.dali  # its own types know neither its constants nor conditionals
fn, types = dali.fn, dali.types


class _Read(NamedTuple):
    """A batch that was read."""

    sample_ids: NDArray[np.int64]
    tokens: NDArray[np.int32] | None
    inputs: dict[str, Any]
    """Name of the pipeline's input -> values by sample."""


class DALILoader:
    """Serves the batches of one rank, one epoch at a time. Batches are fresh tensors and may be kept.

    On the GPU, views are CUDA tensors on the stream that is current when the batch is requested; they never were on the
    host. Ids stay on the CPU, as do tokens, in pinned memory.
    """

    def __init__(
        self, dataset: Dataset, order: Order, *, recipe: Recipe, image_size: int, views: int,
        workers: int | None = None, ahead: int = 2, rank: int = 0, world: int = 1,
        device: Literal["cpu", "cuda"] = "cpu", hardware_load: float = 0.65,
    ) -> None:  # fmt: skip
        """Open a loader.

        image_size: side of the square views, in pixels. views: 1 for pairs, 2 for images only.
        workers: DALI threads; None: one more than cores, since each operator waits for its last sample.
        ahead: number of batches to prefetch.
        device: where to decode and augment; "cuda" is torch's current CUDA device.
        hardware_load: share of the JPEGs for the GPU's JPEG engine, if it has one, 0 … 1; its cores decode the rest.
        Raises DatasetError if the order was made for another number of samples.
        """
        refuse_other_samples(order, dataset)
        self.order, self._recipe, self._image_size, self._views = order, recipe, image_size, views
        self._rank, self._world, self._on_gpu = rank, world, device == "cuda"
        self._workers, self._ahead, self._hardware_load = workers or cores() + 1, ahead, hardware_load
        self._reader = Reader(dataset, self._workers)
        self._batches = ThreadPoolExecutor(1, "thermopile-batches")  # reads one batch at a time
        self._copies = Copies(CudaDevice(torch.device("cuda", torch.cuda.current_device()))) if self._on_gpu else None
        self._pipeline: Any = None  # built when an epoch begins
        self._reading: deque[Future[_Read]] = deque()  # this and the next, oldest first
        self._scheduled: deque[Future[_Read]] = deque()
        """Batches that the pipeline is processing, unless they hold an error, which is raised when they are due."""
        self._turn = 0

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from first_step on. Starting an epoch ends the previous one.

        A damaged sample raises DatasetError at the batch that contains it.
        """
        self._drain()
        self._turn = turn = self._turn + 1
        self._pipeline = self._pipeline or self._build()
        end = self.order.steps_per_epoch
        try:
            # Read one batch more than `ahead` while the pipeline makes the others.
            for step in range(first_step, min(first_step + self._ahead + 1, end)):
                self._start_reading(epoch, step)
            for _ in range(min(self._ahead, end - first_step)):
                self._schedule()
            for step in range(first_step, end):
                if step + self._ahead + 1 < end:
                    self._start_reading(epoch, step + self._ahead + 1)
                if self._reading:
                    self._schedule()
                yield self._collect()
                if self._turn != turn:
                    raise RuntimeError(
                        f"epoch {epoch} was ended by another one: this loader serves one epoch at a time"
                    )
        finally:
            if self._turn == turn:
                self._drain()

    def close(self) -> None:
        """Stop DALI's and the reading threads after their current batches."""
        self._turn += 1
        self._drain()
        self._pipeline = None
        self._batches.shutdown()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> Any:
        pipeline = _views_of_jpegs(
            self._recipe, self._image_size, self._views, self._on_gpu, self._hardware_load,
            batch_size=self.order.batch_size // self._world, num_threads=self._workers,
            device_id=torch.cuda.current_device() if self._on_gpu else None,
            prefetch_queue_depth=1,  # runs that start with the first; later ones are scheduled explicitly
        )  # fmt: skip
        pipeline.build()
        return pipeline

    def _start_reading(self, epoch: int, step: int) -> None:
        ids = self.order.batch_ids(epoch, step, self._rank, self._world)
        self._reading.append(self._batches.submit(self._read, epoch, ids))

    def _read(self, epoch: int, ids: NDArray[np.int64]) -> _Read:
        """Read a batch, whose rows the reader's threads share. Raises DatasetError for a damaged sample."""
        located = self._reader.locate(ids)
        heights, widths, ends = located.height, located.width, np.cumsum(located.jpeg_bytes)
        memory = np.empty(ends[-1], np.uint8)
        self._reader.finish(self._reader.start(ids, located, read_samples, ends, memory))
        inputs: dict[str, Any] = {
            "jpeg": np.split(memory, ends[:-1]),
            "sides": np.stack([heights, widths], axis=1).astype(np.float32),
        }
        for view in range(self._views):
            drawn = view_parameters(self._recipe, self.order.seed, epoch, ids, heights, widths, view)
            inputs |= {f"{name}{view}": values for name, values in _inputs_of_view(self._recipe, drawn).items()}
        return _Read(ids, located.tokens if located.vocab_size else None, inputs)

    def _schedule(self) -> None:
        """Wait for the oldest batch being read and feed it to the pipeline."""
        batch = self._reading.popleft()
        if batch.exception() is None:
            try:
                _start(self._pipeline, batch.result().inputs)
            except BaseException:  # a half-fed pipeline would pair pixels with other samples' choices
                self._forget_pipeline()
                raise
        self._scheduled.append(batch)

    def _collect(self) -> Batch:
        batch = self._scheduled.popleft().result()
        try:
            outputs = self._take_outputs()
        except RuntimeError as error:
            if (row := self._first_refused(batch.inputs)) is not None:
                raise self._reader.damaged(int(batch.sample_ids[row]), UNDECODABLE) from error
            raise
        if self._copies is None:  # the tensors share DALI's memory and own it as long as they live
            views = tuple(from_dlpack(output.as_tensor()) for output in outputs)
        else:
            views = tuple(copy_outputs(outputs, self._copies).here())
        tokens = None if batch.tokens is None else torch.from_numpy(batch.tokens)
        if tokens is not None and self._on_gpu:
            tokens = tokens.pin_memory()
        return Batch(torch.from_numpy(batch.sample_ids), views, tokens)

    def _take_outputs(self) -> tuple[Any, ...]:
        """Return the oldest run's outputs. DALI pipelines do not survive an error: the next epoch builds a new one."""
        try:
            stream = None if self._copies is None else self._copies.stream
            outputs: tuple[Any, ...] = self._pipeline.share_outputs(cuda_stream=stream)
            self._pipeline.release_outputs()
        except BaseException:
            self._forget_pipeline()
            raise
        return outputs

    def _first_refused(self, inputs: dict[str, Any]) -> int | None:
        """Find the row that causes a batch's error by running each alone: DALI does not always name it."""
        pipeline = self._build()
        for row in range(len(inputs["jpeg"])):
            _start(pipeline, {name: values[row : row + 1] for name, values in inputs.items()})
            try:
                pipeline.share_outputs()
            except RuntimeError:
                return row
            pipeline.release_outputs()
        return None

    def _drain(self) -> None:
        """Discard everything still being read or scheduled."""
        while self._reading:
            self._reading.popleft().cancel()
        while self._scheduled:
            if self._scheduled.popleft().exception() is None:
                # A damaged sample that nobody requested, or a pipeline that DALI ended at interpreter exit.
                with suppress(RuntimeError, AttributeError):
                    self._take_outputs()

    def _forget_pipeline(self) -> None:
        self._pipeline = None
        self._scheduled.clear()


def copy_outputs(outputs: Sequence[Any], copies: Copies, feed: Callable[..., object] = feed_ndarray) -> Arriving:
    """Copy what a pipeline returned into memory of torch's.

    DALI overwrites an output in the order of its own stream as soon as nothing in Python refers to it, though torch's
    stream may still read it: the first layer's weight gradient does, at the end of the step. With a stream to copy on,
    `feed` lets DALI's stream and the copies' wait for each other.
    """
    views = []
    for output in outputs:
        pixels = output.as_tensor()
        views.append(copies.device.empty(pixels.shape(), torch.float32, copies.stream))
        feed(pixels, views[-1], cuda_stream=copies.stream)
    return copies.arriving(views)


def _start(pipeline: Any, inputs: dict[str, Any]) -> None:
    for name, values in inputs.items():
        pipeline.feed_input(name, values)
    pipeline.schedule_run()


def _inputs_of_view(recipe: Recipe, drawn: ViewParameters) -> dict[str, NDArray[Any]]:
    """Return the inputs of a view's graph, by the names that `_view` uses."""
    start, size = drawn.box[:, :2], drawn.box[:, 2:]
    inputs: dict[str, NDArray[Any]] = {
        "start": start.astype(np.float32),
        "end": (start + size).astype(np.float32),
        "flip": drawn.flip.astype(np.int32),
    }
    if recipe.has_colour:
        inputs |= {"colour": drawn.colour, "colour_mean": drawn.colour_mean}
    if recipe.has_blur:
        inputs["blur"] = drawn.blur
    if recipe.has_solarise:
        inputs["solarise"] = drawn.solarise
    return inputs


# The functions below are in DALI's language and run once, to build the graph. An `if` on an input is a branch that only
# some samples take; an `if` on the recipe decides whether the graph has that operation at all.


@dali.pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
def _views_of_jpegs(
    recipe: Recipe, image_size: int, views: int, on_gpu: bool, hardware_load: float
) -> tuple[Any, ...]:  # fmt: skip
    jpeg = fn.external_source(name="jpeg", dtype=types.UINT8, ndim=1, no_copy=True)  # kept with the batch
    sides = fn.external_source(name="sides", dtype=types.FLOAT, ndim=1)
    # Decode as FFCV does: orientation as stored, chroma interpolated, fast inverse DCT.
    picture = fn.decoders.image(
        _with_header_of(jpeg, sides), device="mixed" if on_gpu else "cpu",
        adjust_orientation=False, jpeg_fancy_upsampling=True, use_fast_idct=True, hw_decoder_load=hardware_load,
    )  # fmt: skip
    return tuple([_view(picture, view, recipe, image_size, on_gpu) for view in range(views)])


def _with_header_of(jpeg: Any, sides: Any) -> Any:
    """Return the same bytes if their header has these sides; otherwise fail.

    Without this check a damaged header crashes the process: in the decoder's next run if the header cannot be read, and
    in the resize if the crop lies outside the picture that it describes.
    """
    found = fn.peek_image_shape(jpeg, dtype=types.FLOAT, adjust_orientation=False)
    off_by = fn.reductions.sum(dali.math.abs(found[:2] - sides), keep_dims=True)
    return fn.reshape(jpeg, rel_shape=1.0 + off_by)  # reshaping to more bytes than there are fails


def _view(picture: Any, view: int, recipe: Recipe, image_size: int, on_gpu: bool) -> Any:
    pixels = fn.resize(
        picture, size=[image_size, image_size], dtype=types.FLOAT, interp_type=types.INTERP_LINEAR, antialias=True,
        roi_start=_input("start", view, types.FLOAT, 1), roi_end=_input("end", view, types.FLOAT, 1),
    )  # fmt: skip
    if recipe.has_colour:
        mean = fn.reductions.mean(pixels, axes=[0, 1])
        of_mean = _input("colour_mean", view, types.FLOAT, 2)
        if on_gpu:
            of_mean = of_mean.gpu()
        turned = fn.coord_transform(pixels, M=_input("colour", view, types.FLOAT, 2))
        pixels = dali.math.clamp(turned + fn.reductions.sum(of_mean * mean, axes=[1]), 0.0, 255.0)
    if recipe.has_blur:
        sigma = _input("blur", view, types.FLOAT, 0)
        if sigma > 0.0:
            pixels = fn.gaussian_blur(pixels, sigma=sigma)  # same window and borders as ours
    if recipe.has_solarise:
        solarise = _input("solarise", view, types.BOOL, 0)
        if solarise:
            pixels = pixels + (pixels >= 128.0) * (255.0 - 2.0 * pixels)
    return fn.crop_mirror_normalize(
        pixels, mirror=_input("flip", view, types.INT32, 0),
        mean=[255 * mean for mean in recipe.mean], std=[255 * std for std in recipe.std],
    )  # fmt: skip


def _input(name: str, view: int, dtype: Any, ndim: int) -> Any:
    return fn.external_source(name=f"{name}{view}", dtype=dtype, ndim=ndim)
