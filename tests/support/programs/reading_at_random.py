"""Read samples of the dataset in the folder named as argument at random, through a small cache, until killed."""

import sys
import threading
from pathlib import Path

import numpy as np

from thermopile.benchmarks.scale import FolderStore
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.remote import samples
from thermopile.storage.bucket import Address

samples.DEFAULT_BYTES = 300_000


def read(seed):
    random = np.random.default_rng(seed)
    while True:
        dataset.jpeg(int(random.integers(0, dataset.n)))


with FolderStore(Path(sys.argv[1]), 0).in_place():
    dataset = Dataset(Address("bucket", "placed"))
    dataset.jpeg(0)
    print("reading", flush=True)
    for thread in [threading.Thread(target=read, args=[seed]) for seed in range(4)]:
        thread.start()
    threading.Event().wait()
