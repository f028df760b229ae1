"""Real data: photographs, DALI's settings, and trainings that they feed beside one on random batches."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.tools.bench.loader import WARM_UP, Contender, Work, ffcv, rates
from thermopile.tools.bench.loader import dali as dali_loader
from thermopile.tools.bench.step import complete, is_out_of_memory, step_cost

from .findings import Findings
from .running import missing
from .steps import IMAGE, SMALL_IMAGE, SMALL_TEXT, TEXT

IMAGES = 8192
HARDWARE_LOADS = (0.0, 0.65, 1.0)
USUAL_LOAD = 0.65
THREADS = (4, 8, 16)
BATCH = 256
MIN_OF_SYNTHETIC = {"ffcv": 0.95, "dali": 0.97}
VIEWS = {"one view of crop_flip": (1, "crop_flip"), "two views of crop_flip": (2, "crop_flip"),
         "two views of simclr": (2, "simclr")}  # fmt: skip


def dali(found: Findings) -> None:
    """Images a second for each share of the hardware decoder, and each number of threads; ffcv beside them."""
    size, batch = (16, 16) if found.small else (224, BATCH)
    dataset = photographs_of(found)
    order = Order.create(dataset.n, batch)
    batches = min(12, order.steps_per_epoch - WARM_UP)

    def rate(contender: Contender, views: int, recipe: str) -> float:
        work = Work(dataset, order, recipe, views, size, batches, torch.device(found.device))
        return median(rates({"": contender}, work, rounds=1)[""])

    about, simclr = f"Images a second, {size}×{size}, batches of {batch}", list[float]()
    contenders = {f"dali, hardware_decoder_load {load:g}": partial(dali_loader, hardware_load=load)
                  for load in HARDWARE_LOADS} | {"ffcv": ffcv}  # fmt: skip
    for loader, contender in contenders.items():
        of_views = {name: rate(contender, *asked) for name, asked in VIEWS.items()}
        found.row(about, {"": loader} | _plain(of_views))
        simclr.append(of_views["two views of simclr"])
    *of_dali, of_ffcv = simclr
    if not found.small:
        share = max(of_dali) / of_ffcv
        found.check("dali's images a second, of ffcv's: SimCLR's recipe", "> 100%", f"{share:.0%}", share > 1)
    name, asked = next(iter(VIEWS.items()))
    of_threads = {f"{threads} threads": rate(partial(dali_loader, workers=threads, hardware_load=USUAL_LOAD), *asked)
                  for threads in ((1, 2) if found.small else THREADS)}  # fmt: skip
    found.row(f"Images a second of dali, {name}, hardware_decoder_load {USUAL_LOAD:g}", _plain(of_threads))


def _plain(rates: dict[str, float]) -> dict[str, str]:
    return {name: f"{rate:,.0f}" for name, rate in rates.items()}


def training(found: Findings, recipe: str) -> None:
    """Samples a second of ResNet-50 on two views of each photograph, beside random batches.

    recipe: clip takes one view, and a caption, which DistilBERT reads.
    """
    lacking = missing(["nvidia.dali"])
    for package in lacking:
        found.note(f"Not run: {package} is missing.")
    dataset = _captioned(found) if recipe == "clip" else photographs_of(found)
    loaders, batch = ["ffcv"] if lacking else ["dali", "ffcv"], 16 if found.small else BATCH
    while batch >= 16 and not _trained(found, dataset, loaders, batch, recipe):
        batch //= 2


def _trained(found: Findings, dataset: Dataset, loaders: list[str], batch: int, recipe: str) -> bool:
    """Add a row for random batches and each loader; return whether they all fit into the memory."""
    synthetic = 0.0
    for loader in ("synthetic", *loaders):
        config = complete(dataset, _settings(found, batch, loader, recipe))
        with TemporaryDirectory(dir=found.folder) as run:
            try:
                cost = step_cost(config, 2 if found.small else 40, Path(run))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                found.note(f"A batch of {batch} of {loader} data does not fit into the memory.")
                return False
        synthetic = synthetic or cost.samples_per_second
        share = cost.samples_per_second / synthetic
        of_what = "two views" if cost.text is None else f"{cost.text}, one view"
        found.row(f"{cost.image}, {of_what} of {recipe}, batch {batch:,}", {
            "data": loader, "samples a second": f"{cost.samples_per_second:,.0f}", "of synthetic": f"{share:.1%}",
            "wait for data": f"{cost.shares.get('data_wait', 0):.1%}", "step": f"{cost.step_ms:,.1f} ms",
        })  # fmt: skip
        if (least := MIN_OF_SYNTHETIC.get(loader)) and recipe == "crop_flip" and not found.small:
            found.check(f"training on {loader} data, of synthetic", f"≥ {least:.0%}", f"{share:.1%}", share >= least)
    return True


def _settings(found: Findings, batch: int, loader: str, recipe: str) -> dict[str, Any]:
    image, text = (SMALL_IMAGE, SMALL_TEXT) if found.small else (IMAGE, TEXT)
    return {
        "device": found.device, "batch_size": batch, "model": {"image": image, "text": text},
        "data": {"loader": loader, "recipe": recipe, "image_size": 32 if found.small else 224},
    }  # fmt: skip


def photographs_of(found: Findings) -> Dataset:
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


def _captioned(found: Findings) -> Dataset:
    """Return the same photographs with captions."""
    photographs_of(found)
    folder = found.folder / "photographs"
    if not (folder / "captioned").is_dir():
        files = sorted((folder / "files").iterdir())
        rows = (f"{file.name},photograph {number} of a {('flower', 'temple')[number % 2]}\n"
                for number, file in enumerate(files))  # fmt: skip
        (folder / "captions.csv").write_text("".join(["filepath,title\n", *rows]), "utf-8")
        convert(CsvSource(folder / "captions.csv", root=folder / "files"), folder / "captioned", ConvertSettings())
    return Dataset(folder / "captioned")
