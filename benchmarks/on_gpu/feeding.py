"""Real data: photographs, DALI's settings, and a training that they feed beside one on random batches."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.tools.bench.loader import WARM_UP, Work, ffcv, rates
from thermopile.tools.bench.loader import dali as dali_loader
from thermopile.tools.bench.step import is_out_of_memory, step_cost

from .findings import Findings
from .running import missing
from .steps import IMAGE, SMALL_IMAGE

IMAGES = 8192
HARDWARE_LOADS = (0.0, 0.65, 1.0)
THREADS = (4, 8, 16)
BATCH = 256
MIN_OF_SYNTHETIC = 0.95


def dali(found: Findings) -> None:
    """Images a second for each share of the hardware decoder and each number of threads; ffcv beside them."""
    size, batch = (16, 16) if found.small else (224, BATCH)
    dataset = _photographs(found)
    order = Order.create(dataset.n, batch)
    batches = min(12, order.steps_per_epoch - WARM_UP)
    work = Work(dataset, order, "crop_flip", 1, size, batches, torch.device(found.device))
    about = f"Images a second, one view of crop_flip, {size}×{size}, batches of {batch}"
    for load in HARDWARE_LOADS:
        cells = {"hardware_decoder_load": f"{load:g}"}
        for threads in (1, 2) if found.small else THREADS:
            contender = partial(dali_loader, workers=threads, hardware_load=load)
            cells[f"{threads} threads"] = f"{median(rates({'dali': contender}, work, rounds=1)['dali']):,.0f}"
        found.row(about, cells)
    found.note(f"ffcv, on all cores: {median(rates({'ffcv': ffcv}, work, rounds=1)['ffcv']):,.0f} images a second.")


def training(found: Findings) -> None:
    """Samples a second of ResNet-50 on two views of each photograph, beside random batches."""
    lacking = missing(["nvidia.dali"])
    for package in lacking:
        found.note(f"Not run: {package} is missing.")
    # The loader that `auto` chooses on a GPU comes first.
    dataset = _photographs(found)
    loaders, batch = ["ffcv"] if lacking else ["dali", "ffcv"], 16 if found.small else BATCH
    while batch >= 16 and not _trained(found, dataset, loaders, batch):
        batch //= 2


def _trained(found: Findings, dataset: Dataset, loaders: list[str], batch: int) -> bool:
    """Add a row for random batches and each loader; return whether they all fit into the memory."""
    synthetic = 0.0
    for loader in ("synthetic", *loaders):
        with TemporaryDirectory(dir=found.folder) as run:
            try:
                cost = step_cost(dataset, _settings(found, batch, loader), 2 if found.small else 40, Path(run))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found.note(f"A batch of {batch} of {loader} data does not fit into the memory.")
                return False
        synthetic = synthetic or cost.samples_per_second
        share = cost.samples_per_second / synthetic
        found.row(f"{cost.image}, two views of crop_flip, batch {batch:,}", {
            "data": loader, "samples a second": f"{cost.samples_per_second:,.0f}", "of synthetic": f"{share:.1%}",
            "wait for data": f"{cost.shares.get('data_wait', 0):.1%}", "step": f"{cost.step_ms:,.1f} ms",
        })  # fmt: skip
        if loader == loaders[0] and not found.small:
            found.check(f"training on {loader} data, of synthetic", f"≥ {MIN_OF_SYNTHETIC:.0%}", f"{share:.1%}",
                        share >= MIN_OF_SYNTHETIC)  # fmt: skip
    return True


def _settings(found: Findings, batch: int, loader: str) -> dict[str, Any]:
    return {
        "device": found.device, "batch_size": batch, "model": {"image": SMALL_IMAGE if found.small else IMAGE},
        "data": {"loader": loader, "recipe": "crop_flip", "image_size": 32 if found.small else 224},
    }  # fmt: skip


def _photographs(found: Findings) -> Dataset:
    """Return photographs, made and converted if no earlier part has; the loaders read them from the page cache."""
    from ..photographs import photographs

    images, folder, began = 320 if found.small else IMAGES, found.folder / "photographs", time.monotonic()
    if folder.is_dir():
        return Dataset(folder / "dataset")
    with TemporaryDirectory(dir=found.folder) as making:
        photographs(Path(making), images)
        Path(making).rename(folder)
        Path(making).mkdir()
    found.note(f"{images:,} photographs of 400×300 were made and converted in {time.monotonic() - began:.0f} s.")
    return Dataset(folder / "dataset")
