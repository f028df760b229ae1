"""Drops loaders and their datasets in the middle of an epoch, and ends in the middle of others. Argument: dataset."""

import sys
from pathlib import Path

from thermopile.pipeline.loading.dali_loader import DALILoader
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES


def begun(kind, path):
    """An epoch whose next batches are under way."""
    dataset, order = Dataset(path), Order.create(96, 32)
    loader = kind(dataset, order, recipe=RECIPES["simclr"], image_size=128, views=2, workers=2)
    batches = loader.epoch(0)
    next(batches)
    return batches


if __name__ == "__main__":
    left = []
    for kind in (FFCVLoader, DALILoader):
        for _ in range(2):
            begun(kind, Path(sys.argv[1]))
        left.append(begun(kind, Path(sys.argv[1])))
