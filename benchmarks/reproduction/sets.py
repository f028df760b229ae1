"""The datasets of the comparison: glyphs, long-tailed for training, and ten balanced test sets."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import CHARACTERS, GlyphSource
from thermopile.trainer.evaluation.bands import band_of_class

from reproduction.plan import Data

DEVELOPMENT_SEED, SEED = 1, 0
TEST_SETS = 10
DEVELOPMENT_TEST_SEED, TEST_SEED = 200, 100
"""The first of the seeds of the test sets, whose drawings no training set has."""


class Sets(NamedTuple):
    """The datasets that runs learn from and are scored on."""

    train: Dataset
    tests: list[Dataset]


class BalancedGlyphs(GlyphSource):
    """As many glyphs as there are long-tailed ones, as many of each character."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._characters = np.sort(np.arange(len(self)) % len(CHARACTERS))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"split": "balanced"}


def test_sources(data: Data) -> list[GlyphSource]:
    """The test sets of this name; the balanced and the long-tailed training set have the same."""
    first = DEVELOPMENT_TEST_SEED if data == "development" else TEST_SEED
    return [GlyphSource(first + number, test=True) for number in range(TEST_SETS)]


def train_source(data: Data) -> GlyphSource:
    if data == "balanced":
        return BalancedGlyphs(SEED)
    return GlyphSource(DEVELOPMENT_SEED if data == "development" else SEED)


@cache
def bands_of(data: Data) -> NDArray[np.int64]:
    """Return the band of each sample of all test sets, int64 [m]: of its class by its number of training samples."""
    counts = np.bincount(train_source(data).groups().of_sample, minlength=len(CHARACTERS))
    by_name = np.argsort([unicodedata.name(character) for character in CHARACTERS])
    band = np.empty(len(CHARACTERS), np.int64)
    band[by_name] = band_of_class(counts[by_name])  # classes of equal size are in the order of their names
    return np.concatenate([band[source.groups().of_sample] for source in test_sources(data)])


@cache
def captions_of(data: Data) -> NDArray[np.int64]:
    """Return a number of the caption of each sample of all test sets, int64 [m]."""
    captions = [text for source in test_sources(data) for text in source.captions(np.arange(len(source)))]
    return np.unique(captions, return_inverse=True)[1]


def make_sets(folder: Path, data: Data) -> None:
    """Make the training and test sets of this name where `folder` has none.

    The development set has another seed: other drawings, and other characters are frequent.
    """
    train, *tests = _paths(folder, data)
    if tests[-1].exists():  # written last, and whole or not at all
        return
    convert(train_source(data), train, ConvertSettings(), workers=1, resume=True)
    tokenizer = Dataset(train).tokenizer_path
    for source, test in zip(test_sources(data), tests, strict=True):
        convert(source, test, ConvertSettings(), workers=1, resume=True, tokenizer_from=tokenizer)


def open_sets(folder: Path, data: Data) -> Sets:
    """Open what make_sets made."""
    train, *tests = map(Dataset, _paths(folder, data))
    return Sets(train, tests)


def _paths(folder: Path, data: Data) -> list[Path]:
    return [folder / data, *(folder / f"{data}-test-{number}" for number in range(TEST_SETS))]
