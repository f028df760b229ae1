"""The CPU loader: the order's ids, the pixels that belong to them, from any step, and nothing left behind."""

import gc
import io
import shutil
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from numba import njit
from PIL import Image

from thermopile.pipeline.augment import Recipe
from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.order import Order
from thermopile.pipeline.rng import uniform
from thermopile.pipeline.sources.folder import FolderSource

WHOLE = Recipe(scale=(1.0, 1.0), ratio=(0.01, 100.0), flip=0.0, mean=(0, 0, 0), std=(1, 1, 1))
"""Nearly the whole picture, unchanged but for the resize; its pixels lie in [0, 1]."""
PLAIN = Recipe(mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture
def open_loader():
    opened = []

    def open_one(dataset, *, views=1, image_size=32, batch_size=64, recipe=PLAIN, seed=0, **options):
        order = Order.create(dataset.n, batch_size, seed)
        loader = FFCVLoader(dataset, order, recipe=recipe, image_size=image_size, views=views, **options)
        opened.append(loader)
        return loader

    yield open_one
    for loader in opened:
        loader.close()


def test_batches_carry_exactly_the_ids_of_the_order(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset)
    for epoch in range(3):
        expected = [loader.order.batch_ids(epoch, step) for step in range(loader.order.steps_per_epoch)]
        np.testing.assert_array_equal([batch.sample_ids.numpy() for batch in loader.epoch(epoch)], expected)


def test_an_epoch_entered_in_the_middle_goes_on_as_if_never_left(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset)
    whole = list(loader.epoch(1))
    resumed = list(loader.epoch(1, first_step=len(whole) - 3))
    for one, other in zip(whole[-3:], resumed, strict=True):
        assert torch.equal(one.sample_ids, other.sample_ids)
        assert torch.equal(one.views[0], other.views[0])
        assert torch.equal(one.tokens, other.tokens)


def test_ranks_together_serve_the_batch_of_one_rank(open_loader, pairs_dataset):
    (alone, *_) = open_loader(pairs_dataset).epoch(0)
    parts = [next(open_loader(pairs_dataset, rank=rank, world=2).epoch(0)) for rank in range(2)]
    assert torch.equal(alone.sample_ids, torch.cat([part.sample_ids for part in parts]))
    assert torch.equal(alone.views[0], torch.cat([part.views[0] for part in parts]))


def test_pixels_belong_to_their_ids(open_loader, pairs_dataset):
    # At the stored size a crop of the whole picture is the picture.
    for batch in open_loader(pairs_dataset, recipe=WHOLE).epoch(0):
        for sample_id, view in list(zip(batch.sample_ids.tolist(), batch.views[0], strict=True))[::16]:
            stored = np.asarray(Image.open(io.BytesIO(pairs_dataset.jpeg(sample_id)))) / 255
            # FFCV decodes with the fast DCT, Pillow with the exact one.
            assert np.abs(view.numpy().transpose(1, 2, 0) - stored).mean() < 0.02


def test_tokens_belong_to_their_ids(open_loader, pairs_dataset):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pairs_dataset.tokenizer_path))
    batch = next(open_loader(pairs_dataset).epoch(2))
    captions = [row["caption"] for row in pairs_dataset.rows(batch.sample_ids.tolist())]
    assert tokenizer.decode_batch(batch.tokens.tolist()) == captions


def test_images_give_two_different_views_of_the_same_picture_and_no_tokens(open_loader, images_dataset):
    batch = next(open_loader(images_dataset, views=2, image_size=20).epoch(0))
    first, second = batch.views
    assert first.shape == second.shape == (64, 3, 20, 20)
    assert first.dtype == torch.float32
    assert batch.tokens is None
    assert not torch.equal(first, second)
    own = torch.nn.functional.cosine_similarity(first.mean((2, 3)), second.mean((2, 3))).mean()
    other = torch.nn.functional.cosine_similarity(first.mean((2, 3)), second.roll(1, 0).mean((2, 3))).mean()
    assert own > other


def views_by_id(loader, epoch=0):
    return {
        int(sample_id): views
        for batch in loader.epoch(epoch)
        for sample_id, *views in zip(batch.sample_ids, *batch.views, strict=True)
    }


def test_augmentation_of_a_sample_does_not_depend_on_batch_size_or_threads(open_loader, images_dataset):
    one = views_by_id(open_loader(images_dataset, views=2, batch_size=32, workers=1))
    other = views_by_id(open_loader(images_dataset, views=2, batch_size=64, workers=3, ahead=4))
    shared = one.keys() & other.keys()
    assert len(shared) > 200
    assert all(torch.equal(a, b) for i in shared for a, b in zip(one[i], other[i], strict=True))


def test_augmentation_differs_between_epochs(open_loader, images_dataset):
    loader = open_loader(images_dataset, views=2)
    one, other = views_by_id(loader, 0), views_by_id(loader, 1)
    assert not any(torch.equal(one[i][0], other[i][0]) for i in one.keys() & other.keys())


def test_a_batch_kept_stays_as_it_was(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset)
    batches = loader.epoch(0)
    kept = next(batches)
    copy = kept.views[0].clone()
    for _ in batches:
        pass
    assert torch.equal(kept.views[0], copy)


def test_iterators_broken_off_leave_no_threads(open_loader, pairs_dataset):
    loader = open_loader(pairs_dataset, workers=2)
    next(loader.epoch(0))
    threads = threading.active_count()
    for epoch in range(30):
        batches = loader.epoch(epoch)
        next(batches)
        batches.close()
    assert threading.active_count() == threads
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("thermopile-loader")]


def test_a_sample_damaged_after_conversion_is_named_at_its_batch(open_loader, pairs_dataset, tmp_path):
    shutil.copytree(pairs_dataset.path, tmp_path / "copy")
    victim = 123
    shard, row = (int(x[0]) for x in pairs_dataset.locate(np.array([victim])))
    jpeg = pairs_dataset.jpeg(victim)
    path = tmp_path / "copy" / "shards" / f"shard-{shard:05d}.beton"
    data = path.read_bytes()
    assert data.count(jpeg) == 1
    path.write_bytes(data.replace(jpeg, bytes(len(jpeg))))
    loader = open_loader(Dataset(tmp_path / "copy"))
    step = next(s for s in range(loader.order.steps_per_epoch) if victim in loader.order.batch_ids(0, s))
    batches = loader.epoch(0)
    for _ in range(step):
        next(batches)
    with pytest.raises(
        DatasetError, match=f"sample {victim} .*row {row} of shard {shard}.* the checksum of its picture does not match"
    ):
        next(batches)


def test_any_samples_can_be_made_with_the_views_of_an_epoch(open_loader, images_dataset):
    loader = open_loader(images_dataset, views=2)
    of_epoch = views_by_id(loader, 1)
    ids = np.array(sorted(of_epoch)[5:40:3])
    batch = loader.make(ids, epoch=1)
    assert batch.sample_ids.tolist() == ids.tolist()
    for i, *views in zip(ids, *batch.views, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(of_epoch[i], views, strict=True))


@njit(nogil=True)
def darken_some(view, key):
    if uniform(key, np.uint64(1000)) < 0.5:
        view[:] = view * np.float32(0.5)


def test_a_user_s_own_augmentation_sees_each_view_before_it_is_normalised(open_loader, images_dataset):
    plain = views_by_id(open_loader(images_dataset, views=2))
    darkened = views_by_id(open_loader(images_dataset, views=2, augment=darken_some))
    halved = {
        (i, view): torch.allclose(darkened[i][view], plain[i][view] / 2, atol=1e-6) for i in plain for view in (0, 1)
    }
    same = {(i, view): torch.equal(darkened[i][view], plain[i][view]) for i in plain for view in (0, 1)}
    assert all(halved[at] != same[at] for at in halved)
    assert 0.4 < np.mean(list(halved.values())) < 0.6


def test_large_pictures_are_decoded_at_a_fraction_of_their_size_and_look_the_same(open_loader, draw, tmp_path):
    draw(1, height=700, width=900).save(tmp_path / "large.jpg", quality=95)
    for copy in range(32):
        shutil.copyfile(tmp_path / "large.jpg", tmp_path / f"{copy}.jpg")
    convert(FolderSource(tmp_path), tmp_path / "out", ConvertSettings(image={"max_size": 800}), workers=1)
    dataset = Dataset(tmp_path / "out")
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


def test_an_order_for_another_number_of_samples_is_refused(pairs_dataset):
    with pytest.raises(DatasetError, match=r"order is for 1,999 samples.*holds 2,000"):
        FFCVLoader(pairs_dataset, Order.create(1999, 64), recipe=PLAIN, image_size=32, views=1)


def test_opening_the_loader_leaves_torch_its_threads():
    import subprocess
    import sys

    loader = "thermopile.pipeline.loading.ffcv_loader"
    code = f"n = torch.get_num_threads(); import {loader}; assert torch.get_num_threads() == n"
    subprocess.run([sys.executable, "-c", "import torch; torch.set_num_threads(2); " + code], check=True)
