"""Loaders over datasets in an object store, beside those over the same samples on disk."""

import errno
import os
from contextlib import contextmanager

import numpy as np
import pytest

from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.order.order import Served
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.trainer.run.build import windows_from


def loader_named(name):
    if name == "ffcv":
        return FFCVLoader
    return pytest.importorskip("thermopile.pipeline.loading.dali_loader").DALILoader


def loader_over(dataset, order, name="ffcv"):
    return loader_named(name)(dataset, order, recipe=RECIPES["clip"], image_size=32, views=1)


@contextmanager
def reading(dataset, order, limit=None, *, epochs=1, name="ffcv"):
    """Yield a loader; with a limit, of a dataset that is read ahead."""
    with loader_over(dataset, order, name) as loader:
        if limit is None:
            yield loader
            return
        positions = order.order if isinstance(order, Served) else order
        with dataset.files.expect(windows_from(0, positions, epochs), order, limit):
            yield loader


def assert_same(dataset, local, order, limit, *, epochs=1, name="ffcv", after=lambda step: None):
    """Assert that both datasets give the same batches in all epochs; after(step) is called after each."""
    step = 0
    with (
        reading(dataset, order, limit, epochs=epochs, name=name) as remote,
        reading(local, order, name=name) as expected,
    ):
        for epoch in range(epochs):
            for ours, theirs in zip(remote.epoch(epoch), expected.epoch(epoch), strict=True):
                step += 1
                dataset.files.finished(step)
                np.testing.assert_array_equal(ours.sample_ids, theirs.sample_ids)
                np.testing.assert_array_equal(ours.views[0], theirs.views[0])
                np.testing.assert_array_equal(ours.tokens, theirs.tokens)
                after(step)


def cached_bytes(dataset):
    """Bytes of the pictures and tokens in the cache, all in blocks' files."""
    with dataset.files.lock:  # under which blocks are evicted
        return sum(path.stat().st_size for path in (dataset.files.cache / "blocks").iterdir())


def on_disk(dataset):
    """Bytes of the whole cache; of the records' files what is no hole. st_blocks counts a file system's own besides."""
    return cached_bytes(dataset) + sum(map(bytes_without_holes, (dataset.files.cache / "shards").iterdir()))


def bytes_without_holes(path):
    found = stop = 0
    with path.open("rb") as file:
        while (start := next_data(file, stop)) is not None:
            stop = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            found += stop - start
    return found


def next_data(file, start):
    try:
        return os.lseek(file.fileno(), start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole up to the end
            return None
        raise
