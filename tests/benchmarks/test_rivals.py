"""The rivals compute what ours compute: else their times would say nothing."""

import shutil

import numpy as np
import pytest

from thermopile.benchmarks.made import PairSource, repeat_shard
from thermopile.benchmarks.photographs import HEIGHT, WIDTH, jpegs, photographs
from thermopile.benchmarks.pillow_views import PillowViews
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES


@pytest.mark.soak
def test_pillow_makes_the_crops_that_our_loader_makes(tmp_path):
    dataset = photographs(tmp_path, 16)
    files, ids = [tmp_path / "files" / key for key in dataset.column("key").to_pylist()], np.arange(16)
    views = PillowViews(files, "crop_flip", 2, 64).__getitems__([(3, int(sample_id)) for sample_id in ids])
    recipe, order = RECIPES["crop_flip"], Order.create(16, 16)
    with FFCVLoader(dataset, order, recipe=recipe, image_size=64, views=2) as loader:
        batch = loader.make(ids, 3)
    std = np.array(recipe.std, np.float32).reshape(1, 3, 1, 1)
    for view in range(2):
        theirs = np.stack([of_sample[view].numpy() for of_sample in views])
        squares = np.square(255 * std * (theirs - batch.views[view].numpy())).mean((1, 2, 3))
        assert (10 * np.log10(255**2 / squares) > 36).all()


def test_a_repeated_shard_is_a_dataset_whose_samples_come_again(images_dataset, tmp_path):
    shutil.copytree(images_dataset.path, tmp_path / "dataset")
    repeated, rows = repeat_shard(tmp_path / "dataset", 5), images_dataset.n
    assert repeated.n == 5 * rows
    first, last = repeated.rows([7, 4 * rows + 7])
    assert first | {"sample_id": 4 * rows + 7} == last
    assert repeated.jpeg(4 * rows + 7) == images_dataset.jpeg(7)


def test_few_classes_are_large_and_most_are_small():
    sizes = np.bincount(PairSource(5000).groups().of_sample)
    assert sizes.sum() == 5000
    assert sizes[0] > 1.9 * sizes[1] > 90 * sizes[500] > 0


def test_photographs_are_all_different_and_the_same_at_every_call():
    files = list(jpegs(8))
    assert len(set(files)) == 8
    assert list(jpegs(3)) == files[:3]
    assert (HEIGHT, WIDTH) == (300, 400)
