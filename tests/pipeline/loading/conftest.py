"""Photographs, and loaders that a test opens and that are closed at its end."""

from functools import partial

import numpy as np
import pytest
from PIL import Image

from thermopile.pipeline import sources
from thermopile.pipeline.order.order import Order, Served
from thermopile.pipeline.sources.folder import FolderSource

from support.conversions import dataset_of
from support.loaders import PLAIN


def loader_of(kind):
    """Return the class, without importing the other's package."""
    if kind == "ffcv":
        from thermopile.pipeline.loading.ffcv_loader import FFCVLoader

        return FFCVLoader
    from thermopile.pipeline.loading.dali_loader import DALILoader

    return DALILoader


def photograph(seed):
    """400×300: large shapes under a grain, which tells apart crops that differ by a pixel."""
    rng = np.random.default_rng(seed)
    shapes = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((400, 300), Image.BICUBIC)
    grain = rng.normal(0, 8, (300, 400, 1))
    return Image.fromarray(np.clip(np.asarray(shapes) + grain, 0, 255).astype(np.uint8))


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    """A folder of 96 JPEGs of 400×300, and the same as a dataset of several shards."""
    root = tmp_path_factory.mktemp("photographs")
    for i in range(96):
        photograph(i).save(root / f"{i:03d}.jpg", quality=90)
    out = tmp_path_factory.mktemp("dataset") / "photographs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "shard_count", lambda samples, stored_bytes: 4)
        return root, dataset_of(FolderSource(root), out)


@pytest.fixture
def open_one():
    opened = []

    def open_one(
        kind, dataset, *, views=1, image_size=32, batch_size=32, recipe=PLAIN, seed=0, selection=None, **options
    ):
        order = Order.create(dataset.n, batch_size, seed)
        if selection is not None:
            order = Served(order, selection, dataset.n)
        loader = loader_of(kind)(dataset, order, recipe=recipe, image_size=image_size, views=views, **options)
        opened.append(loader)
        return loader

    yield open_one
    for loader in opened:
        loader.close()


@pytest.fixture(params=["ffcv", "dali"])
def open_loader(request, open_one):
    return lambda *given, **options: open_one(request.param, *given, **options)


@pytest.fixture
def open_dali(open_one):
    return partial(open_one, "dali", image_size=40, batch_size=64)
