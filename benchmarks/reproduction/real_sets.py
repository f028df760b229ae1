"""Icons and Fashion-MNIST: what is trained on, what is tested, and how the test samples are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources import Source
from thermopile.pipeline.sources.parquet import ParquetSource
from thermopile.trainer.evaluation.bands import BANDS, match_classes

from .. import fashion, icons
from ..kinds import PlantedSource, wrong
from .plan import Data, base_of, is_searched_on, wrong_share

ICONS = 100_000
"""Icons that are trained on, of 350,000 that are left; of icons-all, all."""
REAL_BANDS = (*BANDS, "held out")
"""Of icons by the frequency of the caption's rarest word, in thirds of those at random; the last, of sets held out."""
HELD_OUT = 3

Chosen = tuple[Source, Any]
"""A source, and which of its samples, int64, ascending, or None for all."""


def real_sources(folder: Path, data: Data) -> list[Chosen]:
    """Return the training set's source, and each test set's; with what is chosen of it, None for all."""
    if data.startswith("fashion"):
        return _fashion(folder / "sources", data)
    file = icons.make(folder / "sources")
    source, parts = (
        ParquetSource([file], group="set"),
        icons.split(pq.read_table(file, columns=["set"])["set"].to_pylist()),
    )
    train = parts.train if data == "icons-all" else np.sort(np.random.default_rng(0).permutation(parts.train)[:ICONS])
    tests = [parts.development] if is_searched_on(data) else [parts.at_random, parts.held_out]
    trained: Chosen = source, train
    if share := wrong_share(data):
        right = Dataset(folder / base_of(data))
        trained = PlantedSource(right, data, wrong(right, share, "random", {})), None
    return [trained, *((source, test) for test in tests)]


def _fashion(folder: Path, data: Data) -> list[Chosen]:
    if not (folder / "test.parquet").exists():
        fashion.make(folder)
    train, test = (ParquetSource([folder / f"{name}.parquet"], group="label") for name in ("train", "test"))
    groups = train.groups()
    assert groups is not None
    long_tailed, development = fashion.split(groups)
    return [(train, long_tailed), (train, development) if is_searched_on(data) else (test, None)]


def described(folder: Path, data: Data) -> dict[str, NDArray[np.int64]]:
    """Return of the test samples, in the order in which they are scored: `caption`, a number, and `band`; int64."""
    (_, chosen), *tests = real_sources(folder, data)
    sources = folder / "sources"
    if data == "fashion":
        train, test = (
            pq.read_table(sources / f"{name}.parquet", columns=["label"])["label"] for name in ("train", "test")
        )
        bands = match_classes(train.take(chosen), test).test_bands
        return {"caption": np.arange(len(bands)), "band": bands}
    every = pq.read_table(sources / "icons.parquet", columns=["caption"])["caption"]
    captions = [caption for _, test in tests for caption in every.take(test).to_pylist()]
    counts, at_random = icons.rarest_word_counts(captions, every.take(chosen).to_pylist()), len(tests[0][1])
    bands = 2 - np.searchsorted(np.quantile(counts[:at_random], [1 / 3, 2 / 3]), counts)
    bands[at_random:] = HELD_OUT
    return {"caption": np.unique(captions, return_inverse=True)[1], "band": bands}
