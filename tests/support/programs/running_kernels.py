"""Usage: running_kernels.py DATASET

Makes batches of views and moves rows of state, and prints a digest of all of it.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.state_store.records import aligned_words, gather, scatter, to_columns

digest = hashlib.sha256()
dataset = Dataset(Path(sys.argv[1]))
for recipe in ("moco_v3", "glyphs"):
    order = Order.create(dataset.n, 16, seed=3)
    asked = {"recipe": RECIPES[recipe], "image_size": 24, "views": 2, "workers": 1}
    with FFCVLoader(dataset, order, local_size=16, local_views=1, **asked) as loader:
        for _, batch in zip(range(3), loader.epoch(0), strict=False):
            for tensor in (batch.sample_ids, *batch.views, *batch.local):
                digest.update(tensor.numpy().tobytes())

places, values, visits = np.arange(20)[::3], np.arange(21, dtype=np.float32).reshape(3, 7), np.zeros(7, np.int32)
words, columns = aligned_words(20, 8), np.zeros((5, 20), np.uint32)
words[:] = 1
scatter(words, places, values, np.arange(7) % 2 == 0, np.uint32(9))
gather(words, places, values, visits)
to_columns(words, columns)
for array in (words, values, visits, columns):
    digest.update(array.tobytes())
print(digest.hexdigest())
