"""Loaders that a test opens, and that are closed at its end."""

import pytest

from thermopile.pipeline.augment import Recipe
from thermopile.pipeline.order import Order

SIZE = 40
PLAIN = Recipe(mean=(0, 0, 0), std=(1, 1, 1))


@pytest.fixture
def open_dali():
    from thermopile.pipeline.loading.dali_loader import DALILoader

    opened = []

    def open_one(dataset, *, recipe=PLAIN, views=1, image_size=SIZE, batch_size=64, **options):
        order = Order.create(dataset.n, batch_size)
        loader = DALILoader(dataset, order, recipe=recipe, image_size=image_size, views=views, **options)
        opened.append(loader)
        return loader

    yield open_one
    for loader in opened:
        loader.close()
