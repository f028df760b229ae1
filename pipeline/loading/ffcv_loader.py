"""The CPU loader: FFCV files and C decoders in the sample order, with one JPEG decode for all views of a sample."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ...storage.arrays import Float32s, Int64s, Uint8s, Uint64s
from ...storage.gpu_copies import Copies, CudaDevice
from ...storage.kernels import kernel
from ..batch import Batch
from ..cores import cores
from ..dataset.jpeg import decode
from ..dataset.stored_sample import SOUND, UNDECODABLE, Located, fetch
from ..opening import Dataset
from ..order.order import AnyOrder
from ..planted import Planting
from ..views.draws import view_key
from ..views.pixels import Pixels, add_noise, affine, gaussian_blur, recolour, solarise, store
from ..views.recipes import Recipe, ViewParameters, sides_of_views, view_parameters
from ..views.resample import resample_into
from . import Closing, Loader, refuse_other_samples
from .reader import Reader, Reading, own_thread

Augmentation = Callable[[Float32s, np.uint64], None]
"""A numba-compiled function that changes a view in place. It receives pixels, float32 [3, H, W] in 0 … 255, and the
view's key for `rng.uniform(key, draw)`; use draws from 1,000 on, since the recipe uses those below."""


class ViewMemory:
    """A pool that keeps at most `spare` returned float32 arrays: fresh pages cost a tenth of the loader's time."""

    def __init__(self, spare: int) -> None:
        self._spare: deque[Float32s] = deque(maxlen=spare)

    def lend(self, shape: tuple[int, ...]) -> Float32s:
        """Return an uninitialised array. Its memory returns to the pool once no view or tensor shares it."""
        try:
            owned = self._spare.pop()  # no length check first: another thread could take the last array in between
        except IndexError:
            owned = np.empty(0, np.float32)
        if owned.size < prod(shape):
            owned = np.empty(prod(shape), np.float32)  # on huge pages, unlike torch.empty
        # Through a memoryview, so that numpy and torch refer to `lent` and not directly to `owned`.
        lent = np.frombuffer(owned.data, np.float32, prod(shape))
        weakref.finalize(lent, self._spare.append, owned)
        return lent.reshape(shape)


class _Pixels(NamedTuple):
    """A batch's views, in one piece of memory, as float32 or uint8."""

    views: Tensor
    """[views, b, 3, image_size, image_size]."""
    local: Tensor
    """[local views, b, 3, local_size, local_size]."""


class _Wanted(NamedTuple):
    """A batch's views as compiled code makes them."""

    views: Pixels
    local: Pixels
    """As in _Pixels."""
    drawn: ViewParameters
    """Arrays [views and local views, b, …]."""
    warps: bool
    recolours: bool
    gain: Float32s
    offset: Float32s


class ViewMaker(Closing):
    """Makes the views of any samples. Batches may be kept: memory is reused only once all references are gone.

    Uses threads, not processes: the kernels release the GIL, so nothing is copied between processes or left behind.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        recipe: Recipe,
        image_size: int,
        views: int,
        local_size: int = 96,
        local_views: int = 0,
        seed: int = 0,
        workers: int | None = None,
        spare: int = 1,
        augment: Augmentation | None = None,
        captions: Literal["draw", "first"] = "first",
        planting: Planting | None = None,
    ) -> None:
        """Make views of a dataset of any size; a sample's views depend on seed, epoch, id and recipe.

        image_size: side of the square views, in pixels. views: 1 for pairs, 2 for images only.
        local_size: side of the local views, in pixels. local_views: their number.
        workers: decoding threads; None: one per core. spare: number of batches whose memory is kept for reuse.
        augment: custom augmentation, applied after the recipe's operations and before normalisation.
        captions: for a sample with several captions, draw one per epoch, or always take the first.
        planting: whose captions some samples show; None: all show their own.
        """
        self._recipe, self._seed, self._augment = recipe, seed, augment
        self._gain = (1 / (255 * np.array(recipe.std))).astype(np.float32)
        self._offset = (-np.array(recipe.mean) / np.array(recipe.std)).astype(np.float32)
        self._sides = sides_of_views(image_size, views, local_size, local_views)
        self._shapes = (views, 3, image_size, image_size), (local_views, 3, local_size, local_size)
        self._reader = Reader(dataset, workers or cores(), captions, seed, planting)
        self._memory = ViewMemory(spare)

    def make(self, sample_ids: Int64s, epoch: int) -> Batch:
        """Return the samples, int64 [b], as a batch with their views of that epoch."""
        return self._finish(*self._start(sample_ids, epoch))

    def close(self) -> None:
        self._reader.close()
        self._memory = ViewMemory(spare=0)  # batches still in use go back to the old pool and are freed with it

    def _start(self, ids: Int64s, epoch: int) -> tuple[_Pixels, Reading]:
        recipe, seed = self._recipe, self._seed
        views, local = ((number, len(ids), *shape) for number, *shape in self._shapes)
        memory = self._lend(prod(views) + prod(local))
        pixels = _Pixels(memory[: prod(views)].view(views), memory[prod(views) :].view(local))
        located = self._reader.locate(ids, epoch)
        heights, widths = located.height, located.width
        of_views = [view_parameters(recipe, seed, epoch, ids, heights, widths, view) for view in self._sides]
        drawn = ViewParameters(*map(np.stack, zip(*of_views, strict=True)))
        gain, offset = self._gain, self._offset
        if pixels.views.dtype == torch.uint8:  # to the nearest level
            gain, offset = np.ones_like(gain), np.full_like(offset, 0.5)
        out = (pixels.views.numpy(), pixels.local.numpy())
        wanted = _Wanted(*out, drawn, recipe.has_affine, recipe.has_colour, gain, offset)
        if self._augment is None:
            return pixels, self._reader.start(ids, located, _make_rows, wanted)
        keyed = (self._augment, np.uint64(seed), np.uint64(epoch), ids, np.array([*self._sides], np.uint64))
        return pixels, self._reader.start(ids, located, _make_augmented_rows, wanted, *keyed)

    def _lend(self, values: int) -> Tensor:
        return torch.from_numpy(self._memory.lend((values,)))

    def _finish(self, pixels: _Pixels, reading: Reading) -> Batch:
        self._reader.finish(reading)
        tokens = torch.from_numpy(reading.located.tokens) if reading.located.vocab_size else None
        return Batch(torch.from_numpy(reading.sample_ids), tuple(pixels.views), tokens, tuple(pixels.local))


class FFCVLoader(ViewMaker, Loader):
    """Serves the batches of one rank in the sample order.

    For a GPU, views are CUDA tensors on the stream that is current when the batch is requested; the copy overlaps the
    GPU's work. They are copied as bytes, rounded to whole levels, a quarter of the memory and time, unless `augment`
    is given. Ids stay on the CPU, as do tokens, in pinned memory.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: AnyOrder,
        *,
        ahead: int = 2,
        rank: int = 0,
        world: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
        augment: Augmentation | None = None,
        captions: Literal["draw", "first"] = "draw",
        **views: Any,
    ) -> None:
        """Open a loader.

        ahead: number of batches to prefetch. device: where the views go; "cuda" is torch's current CUDA device.
        Other arguments as for ViewMaker, except `seed` and `spare`, which follow from these.
        Raises DatasetError if the order was made for another number of samples.
        """
        refuse_other_samples(order, dataset)
        spare = ahead + 2  # batches ahead, the one in use, the next one
        super().__init__(dataset, seed=order.seed, spare=spare, augment=augment, captions=captions, **views)
        self.order, self._rank, self._world, self._ahead = order, rank, world, ahead
        device_id = torch.cuda.current_device() if device == "cuda" else None
        self._copies = None if device_id is None else Copies(CudaDevice(torch.device("cuda", device_id)))
        self._dtype = torch.uint8 if device_id is not None and augment is None else torch.float32
        self._scaling = [torch.from_numpy(each)[:, None, None].to(device) for each in (self._gain, self._offset)]
        self._starts = own_thread(device_id)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        under_way: deque[Future[tuple[_Pixels, Reading]]] = deque()
        try:
            for step in range(first_step, self.order.steps_per_epoch):
                under_way.append(self._starts.submit(self._start_step, epoch, step))
                if len(under_way) > self._ahead:
                    yield self._finish(*under_way.popleft().result())
            while under_way:
                yield self._finish(*under_way.popleft().result())
        finally:
            for started in under_way:
                if not started.cancel():
                    started.add_done_callback(_cancel_parts)  # without waiting, for the collector may run this anywhere

    def close(self) -> None:
        self._starts.shutdown(cancel_futures=True)
        super().close()

    def _start_step(self, epoch: int, step: int) -> tuple[_Pixels, Reading]:
        ids = self.order.batch_ids(epoch, step, self._rank, self._world)
        return self._start(ids, self.order.draw(epoch, step))

    def _lend(self, values: int) -> Tensor:
        if self._copies is None:
            return super()._lend(values)
        # A GPU copies from pinned memory asynchronously. torch pools such memory, rounded up to a power of two, and
        # reuses it only after its copies are done.
        return torch.empty(values, dtype=self._dtype, pin_memory=True)

    def _finish(self, pixels: _Pixels, reading: Reading) -> Batch:
        batch = super()._finish(pixels, reading)
        if self._copies is None:
            return batch
        views, local = (normalised(each, *self._scaling) for each in self._copies.upload(pixels).here())
        tokens = None if batch.tokens is None else batch.tokens.pin_memory()
        return replace(batch, views=tuple(views), tokens=tokens, local=tuple(local))


def normalised(views: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    """Return views [..., 3, H, W] as float32: bytes times `gain` plus `offset`, both [3, 1, 1]; floats unchanged."""
    return views.float().mul_(gain).add_(offset) if views.dtype == torch.uint8 else views


def _cancel_parts(started: Future[tuple[_Pixels, Reading]]) -> None:
    if started.exception() is None:
        for part in started.result()[1].parts:
            part.cancel()


def _make_augmented_rows(located: Located, low: int, high: int, wanted: _Wanted, *keyed: Any) -> tuple[int, int]:
    """As `_make_rows`, with a user's augmentation before the normalisation."""
    as_they_are = wanted._replace(gain=np.ones_like(wanted.gain), offset=np.zeros_like(wanted.offset))
    row, fault = _make_rows(located, low, high, as_they_are)
    if fault == SOUND:
        _augment_rows(low, high, wanted, *keyed)
    return row, fault


@njit(nogil=True)  # type: ignore[untyped-decorator]  # not kept: a user's function has another type in each process
def _augment_rows(
    low: int,
    high: int,
    wanted: _Wanted,
    augment: Augmentation,
    seed: np.uint64,
    epoch: np.uint64,
    ids: Int64s,
    numbers: Uint64s,
) -> None:
    for place in range(len(numbers)):
        for row in range(low, high):
            view = _view_at(wanted, place, row)
            augment(view, view_key(seed, epoch, np.uint64(ids[row]), numbers[place]))
            store(view, view, wanted.gain, wanted.offset)


@kernel()
def _view_at(wanted: _Wanted, place: int, row: int) -> Any:
    """Return a row's view at this place, global views first: [3, side, side]."""
    views = wanted.views
    view = views[place, row] if place < len(views) else wanted.local[place - len(views), row]
    return view


@kernel()
def _make_rows(located: Located, low: int, high: int, wanted: _Wanted) -> tuple[int, int]:
    """Fill views[:, row], local[:, row] and the tokens for rows low … high - 1.

    Returns the first damaged row and its fault, or (high, SOUND).
    """
    views, local = wanted.views, wanted.local
    memory, jpeg = np.empty(0, np.uint8), np.empty(located.jpeg_bytes[low:high].max(), np.uint8)
    of_view, of_local = np.empty(views.shape[2:], np.float32), np.empty(local.shape[2:], np.float32)
    for row in range(low, high):
        fault = fetch(located, row, jpeg)
        if fault != SOUND:
            return row, fault
        reduced = _reduction(wanted, row)
        height, width = -(-located.height[row] // reduced), -(-located.width[row] // reduced)
        if len(memory) < 3 * height * width:  # the JPEG's header confirms height and width
            memory = np.empty(3 * height * width, np.uint8)
        if not decode(jpeg[: located.jpeg_bytes[row]], located.height[row], located.width[row], memory, reduced):
            return row, UNDECODABLE
        picture = memory[: 3 * height * width].reshape(height, width, 3)
        for place in range(len(wanted.drawn.box)):
            view = of_view if place < len(views) else of_local
            _make_view(view, picture, reduced, wanted, place, row)
            store(_view_at(wanted, place, row), view, wanted.gain, wanted.offset)
    return high, SOUND


@kernel()
def _make_view(view: Float32s, picture: Uint8s, reduced: int, wanted: _Wanted, place: int, row: int) -> None:
    drawn = wanted.drawn
    top, left, height, width = drawn.box[place, row] / reduced
    resample_into(view, picture, top, left, height, width, drawn.flip[place, row])
    if wanted.warps:
        affine(view, drawn.affine[place, row])
    if wanted.recolours:
        recolour(view, drawn.colour[place, row], drawn.colour_mean[place, row])
    if drawn.blur[place, row] > 0:
        gaussian_blur(view, drawn.blur[place, row])
    if drawn.solarise[place, row]:
        solarise(view)
    if drawn.noise[place, row] > 0:
        add_noise(view, drawn.noise[place, row], drawn.noise_key[place, row])


@kernel()
def _reduction(wanted: _Wanted, row: int) -> int:
    """Return the decoder's reduction, 1, 2, 4 or 8: the largest that keeps every crop at least as large as its view."""
    reduced, boxes = 8, wanted.drawn.box
    for place in range(len(boxes)):
        side = _view_at(wanted, place, row).shape[1]
        while reduced > 1 and min(boxes[place, row, 2], boxes[place, row, 3]) < reduced * side:
            reduced //= 2
    return reduced
