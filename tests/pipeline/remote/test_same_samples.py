"""Wherever a dataset and its tars are, and in every order, three epochs have the same ids, pixels and tokens."""

import numpy as np
import pytest

from thermopile.benchmarks.object_server import uploaded
from thermopile.pipeline.opening import Dataset, Mixture
from thermopile.pipeline.order.mixed_order import MixedOrder
from thermopile.pipeline.order.order import Order, Served
from thermopile.storage.bucket import Address
from thermopile.storage.selection import IDS, WITHOUT, Selection, SelectionWriter
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.build import windows_from
from thermopile.trainer.run.dataset_cache import DatasetCache
from thermopile.trainer.world import ALONE

from support.in_place import in_place, versions_of
from support.remote_reading import loader_over, on_disk

pytestmark = pytest.mark.wide

EPOCHS, SELECTED, HOLES = 3, np.arange(1, 600, 2), np.arange(60, 300, 5)
WINDOWED = Order.create(600, 32, 0, 2, 15, 2)
OF_SELECTED = Order.create(300, 32, 0, 2, 8, 2)


@pytest.fixture(scope="module")
def places(s3, of_tars, tmp_path_factory):
    """The dataset on disk, in the store, and in place with its tars or all of it in the store."""
    tars, converted = of_tars
    root = uploaded(tars[0].parent, Address("bucket", "tars"))
    placed = in_place(converted, tars, tmp_path_factory.mktemp("placed") / "out")
    on_disk = placed.with_name("of_local_tars")
    in_place(converted, tars, on_disk)
    versions_of(placed, root, [version for _, _, version in root.listing()])
    return {
        "store": uploaded(converted.path, Address("bucket", "converted")),
        "tars on disk": on_disk,
        "tars in store": placed,
        "all in store": uploaded(placed, Address("bucket", "placed")),
    }


@pytest.fixture
def orders(tmp_path):
    """Each kind of order, and the one of positions behind it."""

    def selected(name, kept, order, without=()):
        with SelectionWriter(tmp_path / name, 600) as writer:
            writer.add(IDS, [kept])
            if len(without):
                writer.add(WITHOUT, [without])
            writer.finish()
        return Served(order, Selection(tmp_path / name), 600)

    return {
        "windows": WINDOWED,
        "full shuffle": Order.create(600, 32, 0, 2, 15),
        "selected": selected("half", SELECTED, OF_SELECTED),
        "holes": selected("holes", np.arange(600), WINDOWED, HOLES),
    }


def batches(dataset, order, *, limit=None, done=0):
    """Return all batches from a step on, as bytes, and the most bytes on disk."""
    positions, found, most = order.order if isinstance(order, Served) else order, [], 0
    steps = order.steps_per_epoch
    windows = windows_from(done, positions, EPOCHS)
    with loader_over(dataset, order) as loader, dataset.files.expect(windows, order, limit or 0):
        for epoch in range(done // steps, EPOCHS):
            for batch in loader.epoch(epoch, done % steps):
                done += 1
                dataset.files.finished(done)
                found.append([np.asarray(each).tobytes() for each in (batch.sample_ids, *batch.views, batch.tokens)])
                most = max(most, on_disk(dataset)) if dataset.fetches else 0
    return found, most


@pytest.mark.parametrize("kind", ["windows", "full shuffle", "selected", "holes"])
@pytest.mark.parametrize("where", ["store", "tars on disk", "tars in store", "all in store"])
def test_three_epochs_resumed_in_the_middle_are_those_of_the_dataset_on_disk(places, of_tars, orders, where, kind):
    order = orders[kind]
    expected, _ = batches(of_tars[1], order)
    for done in (0, len(expected) // 2 + 3):
        dataset = Dataset(places[where])
        limit = None
        if dataset.fetches:
            limit = DatasetCache.of(DataConfig(cache=1), dataset, ALONE).needed(getattr(order, "order", order))
        found, most = batches(dataset, order, limit=limit, done=done)
        assert found == expected[done:]
        assert most <= (limit or 0)


def test_a_mixture_of_both_forms_on_disk_serves_that_of_converted_datasets(places, of_tars):
    order = MixedOrder.of(Order.create(1200, 96, 0, 2, 12, 2), [600, 600], [2, 1])
    expected, _ = batches(Mixture([of_tars[1], of_tars[1]]), order)
    mixture = Mixture([Dataset(places["tars on disk"]), of_tars[1]])
    for done in (0, len(expected) // 2 + 3):
        assert batches(mixture, order, done=done)[0] == expected[done:]
