"""Reads batches of more shards than this process may open files: a process of its own, whose limit cannot be raised.

Arguments: the dataset, the limit. Prints the most descriptors that were open between batches, for each loader.
"""

import os
import resource
import sys

from thermopile.pipeline.loading.dali_loader import DALILoader
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES


def max_open_files(kind, path):
    dataset = Dataset(path)
    order = Order.create(dataset.n, 512)
    most = 0
    with kind(dataset, order, recipe=RECIPES["clip"], image_size=8, views=1, workers=2, ahead=4) as loader:
        for step, batch in enumerate(loader.epoch(0)):
            assert batch.sample_ids.tolist() == order.batch_ids(0, step).tolist()
            most = max(most, len(os.listdir("/proc/self/fd")))
    return most


if __name__ == "__main__":
    path, limit = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print(max_open_files(FFCVLoader, path), max_open_files(DALILoader, path))
    assert "ffcv" not in sys.modules  # its import takes seconds and sets torch and numba to one thread
