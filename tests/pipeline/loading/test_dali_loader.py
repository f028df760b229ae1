"""DALI's own: operators that do what was drawn, one epoch at a time, errors that leave nothing behind."""

import gc
import math
import threading

import numpy as np
import pytest
import torch
from nvidia.dali.pipeline import Pipeline
from scipy.ndimage import affine_transform

from thermopile.pipeline.loading.dali_graph import views_of_jpegs
from thermopile.pipeline.loading.reader import Reader
from thermopile.pipeline.views.pixels import add_noise
from thermopile.pipeline.views.recipes import RECIPES, view_parameters

from support.loaders import PLAIN
from support.threads import watch

SIZE = 40
# What the operators do


def levels(batch, view=0):
    """Float64 [b, 3, H, W], 0 … 255."""
    return 255 * batch.views[view].double().numpy()


def moved(pixels, affine):
    """Scipy has y first and counts from the first pixel's centre, the recipe from the view's."""
    by_rows, middle = affine[::-1, [1, 0, 2]], (SIZE - 1) / 2
    offset = SIZE * by_rows[:, 2] + middle - by_rows[:, :2].sum(1) * middle
    return np.stack([affine_transform(c, by_rows[:, :2], offset, order=1, mode="nearest") for c in pixels])


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


def noisy(pixels, deviation, key):
    pixels = pixels.astype(np.float32)
    add_noise(pixels, deviation, key)
    return pixels


def expected(pixels, drawn, row):
    pixels = moved(pixels, drawn.affine[row].astype(float))
    pixels = recoloured(pixels, drawn.colour[row].astype(float), drawn.colour_mean[row].astype(float))
    if drawn.blur[row] > 0:
        pixels = blurred(pixels, drawn.blur[row])
    if drawn.solarise[row]:
        pixels = solarised(pixels)
    return noisy(pixels, drawn.noise[row], drawn.noise_key[row])


@pytest.mark.parametrize(
    "operations",
    [
        {"grayscale": 0.5},
        {"jitter": 0.9, "brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2},
        {"blur": (0.5, 0.5)},
        {"solarise": (0.5, 0.5)},
        {"jitter": 0.8, "contrast": 0.8, "blur": (1.0, 0.1), "solarise": (0.0, 0.5)},
        {"rotation": 40, "shear": 20, "zoom": (0.5, 1.5), "shift": 0.2},
        {"noise": (10.0, 60.0)},
        {"rotation": 20, "jitter": 0.8, "contrast": 0.8, "noise": (10.0, 60.0)},
    ],
)
def test_the_operators_do_to_a_crop_what_was_drawn_for_it(open_dali, images_dataset, operations):
    recipe = PLAIN.model_copy(update=operations)
    loader = open_dali(images_dataset, recipe=recipe, views=2)
    crops, batch = next(open_dali(images_dataset, views=2).epoch(1)), next(loader.epoch(1))
    ids = batch.sample_ids.numpy()
    records = images_dataset.shard(0).records(ids)
    sizes = records["height"].astype(np.int64), records["width"].astype(np.int64)
    for view in range(2):
        drawn = view_parameters(recipe, loader.order.seed, 1, ids, *sizes, view)
        for row, (crop, made) in enumerate(zip(levels(crops, view), levels(batch, view), strict=True)):
            # A value within a rounding error of 128 may be inverted or not.
            wrong = np.abs(made - expected(crop, drawn, row)) > 0.01
            assert wrong.mean() < 1e-3


def test_views_are_normalised_as_the_recipe_says(open_dali, images_dataset):
    plain = next(open_dali(images_dataset).epoch(0)).views[0]
    normalised = next(open_dali(images_dataset, recipe=RECIPES["crop_flip"]).epoch(0)).views[0]
    mean, std = (torch.tensor(getattr(RECIPES["crop_flip"], name)).view(3, 1, 1) for name in ("mean", "std"))
    assert torch.allclose(normalised, (plain - mean) / std, atol=1e-5)


def graph_of(recipe, sides):
    return views_of_jpegs(recipe, sides, False, 0.5, batch_size=4, num_threads=1, device_id=None).serialize()


def test_a_picture_is_decoded_once_for_all_its_views_local_ones_included():
    one, five = (graph_of(PLAIN, sides) for sides in ({0: SIZE}, {0: SIZE, 1: SIZE, 2: 16, 3: 16, 4: 16}))
    assert five.count(b"decoders__Image") == one.count(b"decoders__Image") > 0
    assert five.count(b"CropMirrorNormalize") == 5 * one.count(b"CropMirrorNormalize")


def test_operations_that_a_recipe_never_uses_are_not_in_the_graph():
    def graph(name):
        return graph_of(RECIPES[name], {0: SIZE, 1: SIZE})

    for operation, users in {
        b"WarpAffine": {"glyphs"},
        b"noise0": {"glyphs"},
        b"CoordTransform": {"simclr", "simclr_cifar", "moco_v3", "vicreg", "glyphs"},
        b"GaussianBlur": {"simclr", "moco_v3", "vicreg"},
        b"split": {"simclr", "moco_v3", "vicreg"},
    }.items():
        assert {name for name in RECIPES if operation in graph(name)} == users


# One epoch at a time


def test_a_new_epoch_ends_the_one_before_instead_of_mixing_them(open_dali, images_dataset):
    loader = open_dali(images_dataset)
    old = loader.epoch(0)
    next(old)
    new = loader.epoch(1)
    assert next(new).sample_ids.tolist() == loader.order.batch_ids(1, 0).tolist()
    with pytest.raises(RuntimeError, match="epoch 0 was ended by another"):
        next(old)
    assert next(new).sample_ids.tolist() == loader.order.batch_ids(1, 1).tolist()


def test_the_batches_ahead_are_read_while_the_caller_does_other_things(open_dali, images_dataset, monkeypatch):
    place, begun = Reader.locate, threading.Event()

    def watched(reader, ids, epoch):
        if ids.tolist() == loader.order.batch_ids(0, 2).tolist():
            begun.set()
        return place(reader, ids, epoch)

    monkeypatch.setattr(Reader, "locate", watched)
    loader = open_dali(images_dataset, ahead=2)
    batches = loader.epoch(0)
    next(batches)
    assert begun.wait(timeout=60)


def test_one_thread_alone_calls_the_pipeline_and_it_is_not_the_caller_s(open_dali, images_dataset, monkeypatch):
    names = ["feed_input", "schedule_run", "share_outputs", "release_outputs"]
    threads = watch(monkeypatch, [(Pipeline, name) for name in names])
    for _ in open_dali(images_dataset).epoch(0):
        pass
    assert threads.keys() == set(names)
    (thread,) = set.union(*threads.values())
    assert thread is not threading.current_thread()


def test_an_epoch_that_the_garbage_collector_ends_in_the_loaders_thread_is_over(open_dali, images_dataset, monkeypatch):
    place, dropped, ended_in = Reader.locate, threading.Event(), []

    def collecting(reader, ids, epoch):
        if ids.tolist() == loader.order.batch_ids(0, 1).tolist():
            assert dropped.wait(timeout=60)
            gc.collect()
        return place(reader, ids, epoch)

    def epoch():
        try:
            yield from loader.epoch(0)
        finally:
            ended_in.append(threading.current_thread())

    monkeypatch.setattr(Reader, "locate", collecting)
    loader = open_dali(images_dataset, ahead=1)
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


def test_a_loader_may_be_closed_twice_or_before_it_was_used(open_dali, images_dataset):
    unused, used = open_dali(images_dataset), open_dali(images_dataset)
    next(used.epoch(0))
    for loader in (unused, used):
        loader.close()
        loader.close()


def test_a_batch_that_cannot_be_fed_ends_the_epoch_and_leaves_nothing_half_fed(open_dali, images_dataset, monkeypatch):
    feed, feeds = Pipeline.feed_input, []

    def failing(pipeline, name, values):
        feeds.append(name)
        if feeds.count("sides") == 2:
            raise MemoryError
        feed(pipeline, name, values)

    loader = open_dali(images_dataset)
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "feed_input", failing)
        with pytest.raises((MemoryError, RuntimeError)):
            list(loader.epoch(0))
    fresh = open_dali(images_dataset)
    for one, other in zip(loader.epoch(0), fresh.epoch(0), strict=True):
        assert torch.equal(one.views[0], other.views[0])


def test_a_share_beyond_all_jpegs_is_refused(open_dali, images_dataset):
    with pytest.raises(ValueError, match=r"hardware_load 1\.5 is not a share"):
        open_dali(images_dataset, hardware_load=1.5)
