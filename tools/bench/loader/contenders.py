"""The loaders that take turns: each is opened once, and serves some batches a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch

from ....pipeline.augment import RECIPES
from ....pipeline.cores import cores
from ....pipeline.dataset import Dataset
from ....pipeline.ffcv_loader import FFCVLoader
from .cases import (
    AHEAD,
    DALI,
    DALI_UNVERIFIED,
    DECODE,
    FFCV,
    FFCV_OWN,
    FFCV_UNVERIFIED,
    NAMES,
    PILLOW,
    Case,
)
from .decode import decode_only
from .ffcv_own import ffcv_own_loader
from .first_format import write_first_format
from .material import Material
from .pillow_views import pillow_loader
from .sizes import RateSizes

Serve = Callable[[int], Iterator[object]]
"""Round -> that round's batches; no contender works on after the last one."""
_Contender = Callable[[Material, Case, RateSizes], AbstractContextManager[Serve]]


@contextmanager
def _ffcv(material: Material, case: Case, sizes: RateSizes) -> Iterator[Serve]:
    with FFCVLoader.open(
        material.dataset, material.order, recipe=RECIPES[case.recipe], image_size=sizes.image_size, views=case.views,
        ahead=AHEAD,
    ) as loader:  # fmt: skip
        yield lambda number: loader.epoch(number, _first_step(material, sizes))


@contextmanager
def _dali(material: Material, case: Case, sizes: RateSizes) -> Iterator[Serve]:
    from ....pipeline.dali_loader import DALILoader  # it takes a second to import

    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    with DALILoader.open(
        material.dataset, material.order, recipe=RECIPES[case.recipe], image_size=sizes.image_size, views=case.views,
        ahead=AHEAD, device=device,
    ) as loader:  # fmt: skip
        yield lambda number: loader.epoch(number, _first_step(material, sizes))


def _unverified(contender: _Contender) -> _Contender:
    """The same files as a dataset of format 1."""

    def open_contender(material: Material, case: Case, sizes: RateSizes) -> AbstractContextManager[Serve]:
        path = material.dataset.path.with_name("first_format")
        dataset = Dataset(path) if path.exists() else write_first_format(material.dataset, path)
        return contender(material._replace(dataset=dataset), case, sizes)

    return open_contender


def _first_step(material: Material, sizes: RateSizes) -> int:
    """Where to enter an epoch, so that it ends with the round."""
    return material.order.steps_per_epoch - sizes.warm_up - sizes.batches


CONTENDERS: dict[str, _Contender] = {
    FFCV: _ffcv,
    DALI: _dali,
    FFCV_OWN: ffcv_own_loader,
    PILLOW: pillow_loader,
    DECODE: decode_only,
    FFCV_UNVERIFIED: _unverified(_ffcv),
    DALI_UNVERIFIED: _unverified(_dali),
}


def configured(case: Case) -> tuple[str, ...]:
    """How each contender of the case is opened, a line each."""
    device = "the GPU" if torch.cuda.is_available() else "the CPU"
    decodes = "decoded once" if case.views == 1 else "decoded again for each view"
    words = {
        FFCV: f"{cores()} threads, {AHEAD} batches ahead, a JPEG decoded once",
        DALI: f"on {device}, {cores() + 1} threads, {AHEAD} batches ahead, a JPEG decoded once",
        FFCV_OWN: f"{cores()} threads, {AHEAD} batches ahead, os_cache, rows drawn at random, a JPEG {decodes}",
        PILLOW: f"{cores()} processes, {AHEAD} batches ahead in each, JPEGs of a folder, decoded once",
        FFCV_UNVERIFIED: "as ffcv, on the same files as a dataset of format 1, which has no checksums",
        DALI_UNVERIFIED: "as dali, on the same files as a dataset of format 1, which has no checksums",
        DECODE: f"{cores()} threads, whole pictures, once each, with the fast DCT",
    }
    return tuple(f"{NAMES[name]}: {words[name]}." for name in case.contenders)
