"""The loaders beside FFCV's own Loader and torch's DataLoader with Pillow; what a machine can feed, `thermopile bench
loader` says.

\b
single     one view, crop and flip
two_views  two views, crop and flip
simclr     two views, SimCLR's whole recipe, for which FFCV has no operations
open       time and memory to open a dataset of a hundred million rows
windowed   the same with windows, as a tenth of the rows' state allows
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from thermopile.pipeline.cores import cores
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.views.recipes import RECIPES

from .harness import Figure, Measured, Part, isolated, memory_in_use, script
from .made import make_pairs

if TYPE_CHECKING:
    from thermopile.pipeline.loading.dali_loader import DALILoader
    from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
    from thermopile.tools.bench.loader import Contender, Work

# `open` counts the memory of processes that import this file: what is heavy is imported where it is used.

LABELS = {
    "ffcv": "ffcv",
    "dali": "dali",
    "ffcv_own": "FFCV's own Loader",
    "pillow": "torch DataLoader + Pillow",
    "decode": "libjpeg-turbo alone",
    "public": "thermopile.Loader",
}


@dataclass(frozen=True)
class RateSizes:
    """Batches that each contender serves once a round."""

    recipe: str
    views: int
    rivals: str
    """Those that ffcv and dali are compared with, joined by `+`."""
    images: int = 2_048
    """Photographs of 400 × 300 pixels, in the page cache."""
    batch: int = 64
    batches: int = 12
    """Batches of a round that are timed."""
    rounds: int = 7
    image_size: int = 224

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(ours, other) whose rates are compared."""
        public = [("public", "ffcv")] * (self.views == 2)  # it serves one view only of pairs
        return [*public, *product(("ffcv", "dali"), self.rivals.split("+"))]


ASKED = {
    ("crop_flip", 1, "ffcv", "ffcv_own"): 1.2,
    ("crop_flip", 1, "ffcv", "pillow"): 2.5,
    ("crop_flip", 1, "dali", "pillow"): 1.2,
    ("crop_flip", 2, "ffcv", "ffcv_own"): 2.0,
    ("simclr", 2, "ffcv", "pillow"): 3.0,
    ("crop_flip", 2, "public", "ffcv"): 0.98,
    ("simclr", 2, "public", "ffcv"): 0.98,
}
"""(recipe, views, ours, other) → how many times faster ours has to be."""


@contextmanager
def public(work: Work) -> Iterator[Callable[[int], Iterator[object]]]:
    """Serve with the loader that is for other libraries' trainers."""
    import thermopile

    data = {"recipe": work.recipe, "image_size": work.image_size}
    settings = {"batch_size": work.order.batch_size, "data": data, "objective": {"mode": "unimodal"}}
    with thermopile.Loader(work.dataset.path, settings) as loader:

        def serve(number: int) -> Iterator[object]:
            loader.steps_done = number * len(loader) + work.first_step
            return iter(loader)

        yield serve


def rate(sizes: RateSizes, directory: Path) -> Measured:
    """Open every contender, and let each serve its batches once a round."""
    from thermopile.tools.bench.loader import LOADERS, Work, rates
    from thermopile.trainer.run.build import device_named

    from .decoding import decode_alone
    from .ffcv_rival import ffcv_own_loader, has_opencv
    from .photographs import photographs
    from .pillow_views import pillow

    dataset = photographs(directory, sizes.images)
    order = Order.create(sizes.images, sizes.batch)
    work = Work(dataset, order, sizes.recipe, sizes.views, sizes.image_size, sizes.batches, device_named("auto"))
    known: dict[str, Contender] = LOADERS | {
        "ffcv_own": ffcv_own_loader,
        "pillow": pillow,
        "decode": decode_alone,
        "public": public,
    }
    pairs = [(ours, other) for ours, other in sizes.pairs if other != "ffcv_own" or has_opencv()]
    contenders = {name: known[name] for pair in pairs for name in pair}
    found = rates(contenders, work, sizes.rounds)
    views = "one view" if sizes.views == 1 else f"{sizes.views} views"
    return Measured(
        f"images a second, {views} of {sizes.recipe}; {sizes.images:,} photographs of 400×300 to {sizes.image_size}×"
        f"{sizes.image_size}, batches of {sizes.batch}, {cores()} cores; medians of {sizes.rounds} rounds of "
        f"{sizes.batches} batches each",
        "as named; ratios are the median of the rounds (lowest–highest)",
        [
            Figure.of_rounds(f"{ours}_over_{other}", f"{LABELS[ours]}, beside {LABELS[other]}", "/s", found[ours],
                             found[other], more_is_better=True,
                             ratio_at_least=ASKED.get((sizes.recipe, sizes.views, ours, other)))
            for ours, other in pairs
        ],
        notes=[*(["FFCV's own Loader needs an ffcv with OpenCV: see ffcv_rival.py."] if not has_opencv() else []),
               "Each on all cores, with two batches ahead. ffcv and dali decode a JPEG once for all its views, FFCV's "
               f"own Loader once for each. dali runs on the {'GPU' if torch.cuda.is_available() else 'CPU'}."],
    )  # fmt: skip


@dataclass(frozen=True)
class OpenSizes:
    """A dataset of many rows of a tiny picture; its shards are one file under several names."""

    shards: int = 763
    rows: int = 131_072
    """Rows of a shard."""
    batch: int = 1024
    batches: int = 20
    """Drawn from all shards."""
    windowed: int = 0
    """1: windows instead of a full shuffle."""


class Opened(NamedTuple):
    """What it took to open a dataset."""

    seconds: float
    taken_bytes: int
    process_bytes: int


def open_dataset(sizes: OpenSizes, directory: Path) -> Measured:
    """With each loader open a small dataset, for all that is done once in a process, and then the large one."""
    small, large = directory / "small", directory / "large"
    make_pairs(small, 2 * sizes.batch, 1)
    make_pairs(large, sizes.rows, sizes.shards)
    figures: list[Figure] = []
    for name in ("ffcv", "dali"):
        opened = isolated(_open_both, name, small, large, sizes)
        figures += [
            Figure(f"{name}_seconds", f"{name}: first batch", "s", opened.seconds, at_most=60),
            Figure(f"{name}_megabytes", f"{name}: memory taken", "MB", opened.taken_bytes / 1e6, at_most=200),
            Figure(f"{name}_process_megabytes", f"{name}: memory of its process", "MB", opened.process_bytes / 1e6,
                   at_most=1000),
        ]  # fmt: skip
    return Measured(
        f"{sizes.shards * sizes.rows:,} rows in {sizes.shards} shards, in the page cache, "
        f"{'in windows' if sizes.windowed else 'fully shuffled'}; after "
        f"{sizes.batches} batches of {sizes.batch}, each loader in a fresh process; what a process does once is not "
        "counted in the first two",
        "",
        figures,
    )


def _open_both(name: str, small: Path, large: Path, sizes: OpenSizes) -> Opened:
    with ExitStack() as held:  # to the end: memory freed would be taken again unseen
        _open(name, small, replace(sizes, batches=1), held)
        return _open(name, large, sizes, held)


def _open(name: str, path: Path, sizes: OpenSizes, held: ExitStack) -> Opened:
    """How long it takes from nothing to the first batch, and the memory taken after some batches."""
    before, began = memory_in_use(), time.perf_counter()
    dataset = Dataset(path)
    rows = dataset.n // 10 if sizes.windowed else dataset.n
    order = Order.for_memory(rows, dataset.n, sizes.batch)
    loader = _loader(name)(dataset, order, recipe=RECIPES["clip"], image_size=32, views=1)
    held.enter_context(loader)
    batches = loader.epoch(0)
    next(batches)
    seconds = time.perf_counter() - began
    for _ in range(sizes.batches - 1):
        next(batches)
    return Opened(seconds, memory_in_use() - before, memory_in_use())


def _loader(name: str) -> type[FFCVLoader | DALILoader]:
    """Import one of the loaders, and not the other: it would count as memory of the process."""
    if name == "ffcv":
        from thermopile.pipeline.loading.ffcv_loader import FFCVLoader

        return FFCVLoader
    from thermopile.pipeline.loading.dali_loader import DALILoader

    return DALILoader


def _rate_part(sizes: RateSizes) -> Part:
    return Part(rate, sizes, replace(sizes, images=96, batch=16, batches=2, rounds=1, image_size=64))


PARTS = {
    "single": _rate_part(RateSizes("crop_flip", 1, "ffcv_own+pillow+decode")),
    "two_views": _rate_part(RateSizes("crop_flip", 2, "ffcv_own+pillow+decode")),
    "simclr": _rate_part(RateSizes("simclr", 2, "pillow+decode", rounds=5)),
    "open": Part(open_dataset, OpenSizes(), OpenSizes(2, 256, 64, 2)),
    "windowed": Part(open_dataset, OpenSizes(windowed=1), OpenSizes(4, 1024, 64, 2, 1)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "ffcv", "nvidia-dali-cuda130", "torch", "pillow")()
