"""Drops loaders and their datasets in the middle of an epoch, and ends in the middle of another one.

Arguments: kind, dataset.
"""

import sys
from pathlib import Path

from thermopile.pipeline.augment import RECIPES
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.loading.dali_loader import DALILoader
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.order import Order

LOADERS = {"ffcv": FFCVLoader, "dali": DALILoader}


def begun(kind, path):
    """An epoch whose next batches are under way."""
    dataset = Dataset(path)
    loader = LOADERS[kind](
        dataset, Order.create(dataset.n, 32), recipe=RECIPES["simclr"], image_size=224, views=2, workers=2
    )
    batches = loader.epoch(0)
    next(batches)
    return batches


if __name__ == "__main__":
    for _ in range(3):
        begun(sys.argv[1], Path(sys.argv[2]))
    left = begun(sys.argv[1], Path(sys.argv[2]))
