"""The CPU loader's own: views of any samples, a user's augmentation, reduced decoding, memory that is used again."""

import gc
import shutil
import tracemalloc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from PIL import Image

from thermopile.pipeline.loading.ffcv_loader import FFCVLoader, ViewMemory, normalised
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.rng import uniform
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.views.draws import view_key
from thermopile.pipeline.views.recipes import RECIPES

from support.conversions import dataset_of
from support.loaders import WHOLE, views_by_id
from support.pictures import draw


@pytest.fixture
def open_loader(open_one):
    return partial(open_one, "ffcv", batch_size=64)


def test_any_samples_can_be_made_with_the_views_of_an_epoch(open_loader, images_dataset):
    loader = open_loader(images_dataset, views=2)
    of_epoch = views_by_id(loader, 1)
    ids = np.array(sorted(of_epoch)[5:40:3])
    batch = loader.make(ids, epoch=1)
    assert batch.sample_ids.tolist() == ids.tolist()
    for i, *views in zip(ids, *batch.views, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(of_epoch[i], views, strict=True))


class BytesLoader(FFCVLoader):
    """Makes views as one for a GPU does, and leaves them on the host."""

    def _lend(self, values):
        return torch.empty(values, dtype=torch.uint8)


def test_bytes_for_a_gpu_are_the_cpu_s_pixels_to_the_nearest_level(images_dataset):
    order = Order.create(images_dataset.n, 64, seed=0)
    asked = {"recipe": RECIPES["simclr"], "image_size": 32, "views": 2, "local_size": 16, "local_views": 1}
    with FFCVLoader(images_dataset, order, **asked) as plain, BytesLoader(images_dataset, order, **asked) as of_bytes:
        for whole, rounded in zip(plain.epoch(0), of_bytes.epoch(0), strict=True):
            for pixels, levels in zip((*whole.views, *whole.local), (*rounded.views, *rounded.local), strict=True):
                assert levels.dtype == torch.uint8
                off = (normalised(levels, *of_bytes._scaling) - pixels) / plain._scaling[0]  # in levels
                assert off.abs().max() <= 0.501
                assert normalised(pixels, *of_bytes._scaling) is pixels


@njit(nogil=True)
def darken_some(view, key):
    if uniform(key, np.uint64(1000)) < 0.5:
        view[:] = view * np.float32(0.5)


@pytest.mark.wide  # compiles all that makes views once more
@pytest.mark.parametrize("views", [1, 2])
def test_a_user_s_own_augmentation_sees_each_view_before_it_is_normalised(open_loader, images_dataset, views):
    asked = {"views": views, "local_size": 20, "local_views": 2}
    plain = views_by_id(open_loader(images_dataset, **asked))
    darkened = views_by_id(open_loader(images_dataset, augment=darken_some, **asked))
    for place, number in enumerate([*range(views), 2, 3]):
        halved = {i: torch.allclose(darkened[i][place], plain[i][place] / 2, atol=1e-6) for i in plain}
        assert all(torch.equal(darkened[i][place], plain[i][place]) != halved[i] for i in plain)
        keys = {i: np.uint64(view_key(*(np.uint64(each) for each in (0, 0, i, number)))) for i in plain}
        assert halved == {i: uniform(keys[i], np.uint64(1000)) < 0.5 for i in plain}


def test_large_pictures_are_decoded_at_a_fraction_of_their_size_and_look_the_same(open_loader, tmp_path):
    draw(1, height=700, width=900).save(tmp_path / "large.jpg", quality=95)
    for copy in range(32):
        shutil.copyfile(tmp_path / "large.jpg", tmp_path / f"{copy}.jpg")
    dataset = dataset_of(FolderSource(tmp_path), tmp_path / "out", image={"max_size": 800})
    batch = open_loader(dataset, recipe=WHOLE, batch_size=32).make(np.array([3]), epoch=0)
    whole = Image.open(tmp_path / "large.jpg").resize((32, 32), Image.Resampling.BILINEAR)
    assert np.abs(batch.views[0][0].numpy().transpose(1, 2, 0) - np.asarray(whole) / 255).mean() < 0.01


def test_a_closed_loader_holds_no_memory_of_views(open_loader, pairs_dataset):
    tracemalloc.start()
    try:
        loader = open_loader(pairs_dataset, image_size=128)
        batches = loader.epoch(0)
        megabytes_of_a_batch = next(batches).views[0].nbytes / 1e6
        batches.close()
        loader.close()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] / 1e6 < megabytes_of_a_batch / 2
    finally:
        tracemalloc.stop()


# Memory of views

SHAPE = (2, 3, 4)

REFERRING = {
    "itself": lambda lent: lent,
    "a view": lambda lent: lent[1, ::2],
    "a tensor": torch.from_numpy,
    "a slice of a tensor": lambda lent: torch.from_numpy(lent)[0, :, 1],
    "a tensor's storage": lambda lent: torch.from_numpy(lent).untyped_storage(),
    "numpy of a tensor": lambda lent: torch.from_numpy(lent).view(-1).numpy(),
    "a tuple of views": lambda lent: tuple(torch.from_numpy(lent)),
}


def address(lent):
    return lent.__array_interface__["data"][0]


@pytest.mark.parametrize("refer", REFERRING.values(), ids=REFERRING)
def test_memory_is_lent_again_only_when_nothing_refers_to_it(refer):
    memory = ViewMemory(spare=1)
    lent = memory.lend(SHAPE)
    first = address(lent)
    kept = refer(lent)
    del lent
    other = memory.lend(SHAPE)
    assert address(other) != first
    del kept
    assert address(memory.lend(SHAPE)) == first


def test_another_shape_of_the_same_size_fits_and_another_size_does_not():
    memory = ViewMemory(spare=1)
    first = address(memory.lend((2, 6)))
    again = memory.lend((4, 3))
    assert address(again) == first
    assert again.shape == (4, 3)
    del again
    assert memory.lend((5, 3)).shape == (5, 3)


def test_no_more_is_kept_than_asked_for():
    memory = ViewMemory(spare=2)
    lent = [memory.lend(SHAPE) for _ in range(5)]
    owned = [weakref.ref(array.base.base.obj) for array in lent]
    lent.clear()
    gc.collect()
    assert sum(alive() is not None for alive in owned) == 2


@given(st.lists(st.sampled_from(["lend", "drop first", "drop last"]), max_size=30), st.integers(0, 4))
def test_what_is_held_keeps_its_values_whatever_else_is_lent(calls, spare):
    memory, held = ViewMemory(spare), []
    for number, call in enumerate(calls):
        if call == "lend":
            held.append((number, memory.lend(SHAPE)))
            held[-1][1][:] = number
        elif held:
            held.pop(0 if call == "drop first" else -1)
        for value, array in held:
            np.testing.assert_array_equal(array, value)
