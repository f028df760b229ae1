"""Reads all samples of datasets in every way that there is, and tells how each ended: a process that may crash.

Arguments: the datasets. One line of JSON for each dataset and way: [dataset, way, error or null].
"""

import json
import sys

from thermopile.pipeline.errors import DatasetError
from thermopile.pipeline.loading.dali_loader import DALILoader
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES


def loaded(kind, dataset):
    order = Order.create(dataset.n, dataset.n, canonical_shards=1)
    with kind(dataset, order, recipe=RECIPES["clip"], image_size=16, views=1, workers=1, ahead=1) as loader:
        for _ in loader.epoch(0):
            pass


WAYS = {
    "ffcv": lambda dataset: loaded(FFCVLoader, dataset),
    "dali": lambda dataset: loaded(DALILoader, dataset),
    "one by one": lambda dataset: [dataset.jpeg(sample_id) for sample_id in range(dataset.n)],
}

if __name__ == "__main__":
    for path in sys.argv[1:]:
        for name, read in WAYS.items():
            try:
                read(Dataset(path))
                error = None
            except DatasetError as damaged:
                error = str(damaged)
            print(json.dumps([path, name, error]), flush=True)
