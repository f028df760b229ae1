"""Converts a folder of pictures and loads a batch of it. Arguments: the folder, the dataset to write."""

import sys
from pathlib import Path

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.views.recipes import RECIPES

if __name__ == "__main__":
    out = Path(sys.argv[2])
    convert(FolderSource(Path(sys.argv[1])), out, ConvertSettings(), workers=1)
    dataset = Dataset(out)
    order = Order.create(dataset.n, 16)
    with FFCVLoader(dataset, order, recipe=RECIPES["clip"], image_size=8, views=1, workers=1) as loader:
        next(loader.epoch(0))
