"""DALI's own: operators that do what was drawn, one epoch at a time, errors that leave nothing behind."""

import gc
import itertools
import math
import os
import threading

import numpy as np
import pytest
import torch
from nvidia.dali.pipeline import Pipeline

from thermopile.pipeline.augment import RECIPES, Recipe, view_parameters
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.dali_graph import views_of_jpegs
from thermopile.pipeline.loading.dali_loader import DALILoader
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.loading.reader import Reader
from thermopile.pipeline.order import Order

from made import write_first_format
from watched import watch

SIZE = 40
PLAIN = Recipe(mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture
def open_loader():
    opened = []

    def open_one(dataset, *, recipe=PLAIN, views=1, image_size=SIZE, batch_size=64, **options):
        order = Order.create(dataset.n, batch_size)
        loader = DALILoader(dataset, order, recipe=recipe, image_size=image_size, views=views, **options)
        opened.append(loader)
        return loader

    yield open_one
    for loader in opened:
        loader.close()


# What the operators do


def levels(batch, view=0):
    """Float64 [b, 3, H, W], 0 … 255."""
    return 255 * batch.views[view].double().numpy()


def recoloured(pixels, matrix, of_mean):
    offset = of_mean @ pixels.mean((1, 2))
    return np.clip(np.einsum("ij,jyx->iyx", matrix, pixels) + offset[:, None, None], 0, 255)


def blurred(pixels, sigma):
    reach = math.ceil(3 * sigma)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    for axis in (1, 2):
        padding = [(reach, reach) if a == axis else (0, 0) for a in range(3)]
        wide = np.pad(pixels, padding, mode="reflect")
        pixels = np.apply_along_axis(np.convolve, axis, wide, weights / weights.sum(), mode="valid")
    return pixels


def solarised(pixels):
    return np.where(pixels >= 128, 255 - pixels, pixels)


def expected(pixels, drawn, row):
    pixels = recoloured(pixels, drawn.colour[row].astype(float), drawn.colour_mean[row].astype(float))
    if drawn.blur[row] > 0:
        pixels = blurred(pixels, drawn.blur[row])
    return solarised(pixels) if drawn.solarise[row] else pixels


@pytest.mark.parametrize(
    "operations",
    [
        {"grayscale": 0.5},
        {"jitter": 0.9, "brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2},
        {"blur": (0.5, 0.5)},
        {"solarise": (0.5, 0.5)},
        {"jitter": 0.8, "contrast": 0.8, "blur": (1.0, 0.1), "solarise": (0.0, 0.5)},
    ],
)
def test_the_operators_do_to_a_crop_what_was_drawn_for_it(open_loader, images_dataset, operations):
    recipe = PLAIN.model_copy(update=operations)
    loader = open_loader(images_dataset, recipe=recipe, views=2)
    crops, batch = next(open_loader(images_dataset, views=2).epoch(1)), next(loader.epoch(1))
    ids = batch.sample_ids.numpy()
    records = images_dataset.shard(0).records(ids)
    sizes = records["height"].astype(np.int64), records["width"].astype(np.int64)
    for view in range(2):
        drawn = view_parameters(recipe, loader.order.seed, 1, ids, *sizes, view)
        for row, (crop, made) in enumerate(zip(levels(crops, view), levels(batch, view), strict=True)):
            # A value within a rounding error of 128 may be inverted or not.
            wrong = np.abs(made - expected(crop, drawn, row)) > 0.01
            assert wrong.mean() < 1e-3


def test_views_are_normalised_as_the_recipe_says(open_loader, images_dataset):
    plain = next(open_loader(images_dataset).epoch(0)).views[0]
    normalised = next(open_loader(images_dataset, recipe=RECIPES["crop_flip"]).epoch(0)).views[0]
    mean, std = (torch.tensor(getattr(RECIPES["crop_flip"], name)).view(3, 1, 1) for name in ("mean", "std"))
    assert torch.allclose(normalised, (plain - mean) / std, atol=1e-5)


def test_operations_that_a_recipe_never_uses_are_not_in_the_graph():
    def graph(name):
        recipe = RECIPES[name]
        return views_of_jpegs(recipe, SIZE, 2, False, 0.5, batch_size=4, num_threads=1, device_id=None).serialize()

    for operation, users in {
        b"CoordTransform": {"simclr", "simclr_cifar", "moco_v3", "vicreg"},
        b"GaussianBlur": {"simclr", "moco_v3", "vicreg"},
        b"split": {"simclr", "moco_v3", "vicreg"},
    }.items():
        assert {name for name in RECIPES if operation in graph(name)} == users


# One epoch at a time


def test_a_new_epoch_ends_the_one_before_instead_of_mixing_them(open_loader, images_dataset):
    loader = open_loader(images_dataset)
    old = loader.epoch(0)
    next(old)
    new = loader.epoch(1)
    assert next(new).sample_ids.tolist() == loader.order.batch_ids(1, 0).tolist()
    with pytest.raises(RuntimeError, match="epoch 0 was ended by another one"):
        next(old)
    assert next(new).sample_ids.tolist() == loader.order.batch_ids(1, 1).tolist()


def test_the_batches_ahead_are_read_while_the_caller_does_other_things(open_loader, images_dataset, monkeypatch):
    place, begun = Reader.locate, threading.Event()

    def watched(reader, ids):
        if ids.tolist() == loader.order.batch_ids(0, 2).tolist():
            begun.set()
        return place(reader, ids)

    monkeypatch.setattr(Reader, "locate", watched)
    loader = open_loader(images_dataset, ahead=2)
    batches = loader.epoch(0)
    next(batches)
    assert begun.wait(timeout=60)


def test_one_thread_alone_calls_the_pipeline_and_it_is_not_the_caller_s(open_loader, images_dataset, monkeypatch):
    names = ["feed_input", "schedule_run", "share_outputs", "release_outputs"]
    threads = watch(monkeypatch, [(Pipeline, name) for name in names])
    for _ in open_loader(images_dataset).epoch(0):
        pass
    assert threads.keys() == set(names)
    (thread,) = set.union(*threads.values())
    assert thread is not threading.current_thread()


def test_an_epoch_that_the_garbage_collector_ends_in_the_loader_s_own_thread_does_not_hang(
    open_loader, images_dataset, monkeypatch
):
    place, dropped, ended_in = Reader.locate, threading.Event(), []

    def collecting(reader, ids):
        if ids.tolist() == loader.order.batch_ids(0, 1).tolist():
            assert dropped.wait(timeout=60)
            gc.collect()
        return place(reader, ids)

    def epoch():
        try:
            yield from loader.epoch(0)
        finally:
            ended_in.append(threading.current_thread())

    monkeypatch.setattr(Reader, "locate", collecting)
    loader = open_loader(images_dataset, ahead=1)
    gc.disable()
    try:
        batches = epoch()
        cycle = [batches]
        cycle.append(cycle)
        next(batches)
        del batches, cycle
        dropped.set()
        batch = next(loader.epoch(1))
    finally:
        gc.enable()
    assert ended_in
    assert threading.current_thread() not in ended_in
    assert batch.sample_ids.tolist() == loader.order.batch_ids(1, 0).tolist()


def test_a_loader_may_be_closed_twice_or_before_it_was_used(open_loader, images_dataset):
    unused, used = open_loader(images_dataset), open_loader(images_dataset)
    next(used.epoch(0))
    for loader in (unused, used):
        loader.close()
        loader.close()


def test_a_batch_that_cannot_be_fed_ends_the_epoch_and_leaves_nothing_half_fed(
    open_loader, images_dataset, monkeypatch
):
    feed, feeds = Pipeline.feed_input, []

    def failing(pipeline, name, values):
        feeds.append(name)
        if feeds.count("sides") == 2:
            raise MemoryError
        feed(pipeline, name, values)

    loader = open_loader(images_dataset)
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "feed_input", failing)
        with pytest.raises((MemoryError, RuntimeError)):
            list(loader.epoch(0))
    fresh = open_loader(images_dataset)
    for one, other in zip(loader.epoch(0), fresh.epoch(0), strict=True):
        assert torch.equal(one.views[0], other.views[0])


def test_a_share_beyond_all_jpegs_is_refused(open_loader, images_dataset):
    with pytest.raises(ValueError, match=r"hardware_load 1\.5 is not a share"):
        open_loader(images_dataset, hardware_load=1.5)


def cut_short(jpeg):
    return jpeg[: len(jpeg) // 2] + bytes(len(jpeg) - len(jpeg) // 2)


def garbage(jpeg):
    return np.random.default_rng(0).bytes(len(jpeg))


def zeros(jpeg):
    return bytes(len(jpeg))


def with_another_height(jpeg):
    """The frame header's height, 24 or a little more, becomes 7."""
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[: frame + 5] + b"\0\7" + jpeg[frame + 7 :]


def garbage_behind_the_frame_header(jpeg):
    end = jpeg.index(b"\xff\xc0") + 19
    return jpeg[:end] + np.random.default_rng(0).bytes(len(jpeg) - end)


@pytest.fixture(params=[cut_short, with_another_height])
def damage(request):
    return request.param


@pytest.fixture
def damaged(damage, images_dataset, tmp_path):
    """The pictures without checksums, so that only DALI can find the damage, and the id of the damaged sample.

    It is the first sample of epoch 0's third batch.
    """
    dataset = write_first_format(images_dataset, tmp_path / "copy")
    victim = int(Order.create(images_dataset.n, 64).batch_ids(0, 2)[0])
    shard, _ = images_dataset.locate(np.array([victim]))
    path = dataset.path / "shards" / f"shard-{shard[0]:05d}.beton"
    jpeg, data = images_dataset.jpeg(victim), path.read_bytes()
    assert data.count(jpeg) == 1
    path.unlink()  # a link to the sound one
    path.write_bytes(data.replace(jpeg, damage(jpeg)))
    return dataset, victim


def test_damage_in_a_batch_that_nobody_asked_for_is_no_error(open_loader, damaged):
    dataset, victim = damaged
    loader = open_loader(dataset, ahead=3)
    for _ in range(2):
        batches = loader.epoch(0)
        for step in range(2):
            assert next(batches).sample_ids.tolist() == loader.order.batch_ids(0, step).tolist()
    with pytest.raises(DatasetError, match=f"sample {victim} "):
        next(batches)


@pytest.mark.parametrize("times", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_damage_ends_neither_the_process_nor_leaves_threads(open_loader, damaged, times):
    # Runs were scheduled behind the one that fails: DALI's decoder and resize crash in them if they are let.
    dataset, victim = damaged
    loader = open_loader(dataset, workers=3, ahead=2)

    def threads_after_an_error():
        with pytest.raises(DatasetError, match=f"sample {victim} "):
            list(loader.epoch(0))
        gc.collect()
        return len(os.listdir("/proc/self/task"))

    threads = [threads_after_an_error() for _ in range(times)]
    assert max(threads) == threads[0]


# On a GPU; what a CPU can show of it, it shows too

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "damage", [cut_short, garbage, zeros, with_another_height, garbage_behind_the_frame_header], indirect=True
)
def test_damage_is_named_where_the_loader_decodes_and_the_next_epoch_is_served(open_loader, damaged, damage, device):
    dataset, victim = damaged
    loader = open_loader(dataset, device=device)
    batches, error = loader.epoch(0), None
    try:
        for _ in range(3):
            next(batches)
    except DatasetError as found:
        error = str(found)
    if error is None:
        assert (device, damage) == ("cuda", cut_short)  # nvJPEG may fill up what is missing
    else:
        assert f"sample {victim} " in error
    sound = [step for step in range(4) if victim not in loader.order.batch_ids(1, step)]
    for step in sound:
        batch = next(loader.epoch(1, step))
        assert batch.sample_ids.tolist() == loader.order.batch_ids(1, step).tolist()
        assert all(view.isfinite().all() for view in batch.views)


def checksum(view):
    """An exact sum of the bits of a view, weighted by their places; int64, on the view's device."""
    bits = view.reshape(-1).view(torch.int32)
    return (bits * torch.arange(1, len(bits) + 1, device=view.device)).sum()


def keep_busy(device):
    """Let the device's current stream work for a while, some 30 ms, before what it is given next."""
    if device == "cuda":
        torch.cuda._sleep(50_000_000)


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
def test_pixels_stay_until_the_work_in_flight_on_a_dropped_batch_has_read_them(open_loader, pairs_dataset, device):
    # DALI works in memory of its own, which it reuses as soon as nothing in Python refers to it.
    loader = open_loader(pairs_dataset, recipe=RECIPES["simclr"], views=2, image_size=128, device=device)
    in_peace = []
    for step in range(10):
        batches = loader.epoch(0, step)
        batch = next(batches)
        batches.close()
        wait_for(device)
        in_peace.append([checksum(view).item() for view in batch.views])
    in_flight = []
    for batch, _ in zip(loader.epoch(0), range(10), strict=False):
        keep_busy(device)
        in_flight.append([checksum(view) for view in batch.views])
        del batch
    assert [[each.item() for each in sums] for sums in in_flight] == in_peace
    assert len({sums[0] for sums in in_peace}) == 10


def first_gradients(loader, device):
    """The gradients of a first layer's weights in a short contrastive training, and the pixels' standard deviation."""
    torch.manual_seed(0)
    first, last = torch.nn.Conv2d(3, 16, 5, stride=2).to(device), torch.nn.Linear(16, 16).to(device)
    optimiser = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
    gradients, deviation = [], 0.0
    for batch, _ in zip(loader.epoch(0), range(4), strict=False):
        views = batch.to(torch.device(device)).views
        deviation = max(deviation, float(torch.stack(views).std()))
        one, other = (torch.nn.functional.normalize(last(first(view).relu().mean((2, 3)))) for view in views)
        loss = torch.nn.functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(one), device=device))
        optimiser.zero_grad()
        keep_busy(device)
        loss.backward()
        optimiser.step()
        gradients.append(first.weight.grad.clone())
        del batch, views, one, other, loss
    return [gradient.cpu() for gradient in gradients], deviation


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_layer_learns_as_from_the_ffcv_loader_on_the_same_ids(open_loader, pairs_dataset, device):
    loader = open_loader(pairs_dataset, views=2, image_size=64, device=device)
    options = {"recipe": PLAIN, "image_size": 64, "views": 2}
    with FFCVLoader(pairs_dataset, loader.order, **options) as ffcv:
        expected, deviation = first_gradients(ffcv, device)
    found, _ = first_gradients(loader, device)
    # The loaders' views differ by less than 1.5 levels of 255 in the mean (docs/data.md). The gradient is a sum over
    # pixels times what comes back from the layers behind, and each of the two changes by no more than that share.
    tolerance = 2 * (1.5 / 255) / deviation
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < tolerance * other.norm()
    for one, other in itertools.permutations(expected, 2):  # another batch's pixels would show
        assert (one - other).norm() > 2 * tolerance * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_a_gpu_gives_the_ids_and_the_pixels_of_the_cpu_as_cuda_tensors(open_loader, pairs_dataset, name):
    recipe = RECIPES[name].model_copy(update={"mean": (0, 0, 0), "std": (1, 1, 1)})
    loaders = [open_loader(pairs_dataset, recipe=recipe, views=2, device=device) for device in ("cpu", "cuda")]
    for one, other in zip(*(loader.epoch(0) for loader in loaders), strict=True):
        assert torch.equal(one.sample_ids, other.sample_ids)
        assert torch.equal(one.tokens, other.tokens)
        assert other.tokens.is_pinned()
        for first, second in zip(one.views, other.views, strict=True):
            assert second.is_cuda
            assert 255 * (first - second.cpu()).abs().mean() < 1.5


@pytest.mark.gpu
def test_batches_of_a_gpu_are_ready_on_the_stream_that_asks_for_them_and_may_be_kept(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        batches = loader.epoch(0)
        kept = next(batches)
        copy = kept.views[0].clone()
        for _ in batches:
            pass
        assert torch.equal(kept.views[0], copy)
