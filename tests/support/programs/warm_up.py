"""Imported by the server that the tests fork processes from: decodes a batch, whose kernels take seconds to load."""

import os
from pathlib import Path

from thermopile.pipeline.opening import Dataset
from thermopile.trainer.config import load_config
from thermopile.trainer.run.build import create_order, device_named, objective_of, open_loader, resolve

dataset = Dataset(Path(os.environ["WARM_UP_DATASET"]))
config = resolve(load_config({"device": "cpu", "data": {"path": str(dataset.path), "image_size": 16}}), dataset)[0]
order = create_order(config, dataset, objective_of(config))
# Closed again: a process with threads cannot be forked safely.
with open_loader(config.data, dataset, order, config.objective.mode, device_named("cpu")) as loader:
    next(loader.epoch(0))
