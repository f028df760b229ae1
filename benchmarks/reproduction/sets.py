"""The datasets of the comparison: glyphs, long-tailed for training and balanced for testing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import CHARACTERS, GlyphSource

from reproduction.plan import Data

DEVELOPMENT_SEED, SEED = 1, 0


class Sets(NamedTuple):
    """The datasets that runs learn from and are scored on."""

    train: Dataset
    test: Dataset


class BalancedGlyphs(GlyphSource):
    """As many glyphs as there are long-tailed ones, as many of each character."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._characters = np.sort(np.arange(len(self)) % len(CHARACTERS))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"split": "balanced"}


def make_sets(folder: Path, data: Data) -> None:
    """Make the training and test set of this name where `folder` has none.

    The development set has another seed: other drawings, and other characters are frequent.
    """
    train, test = _paths(folder, data)
    if test.exists():  # written last, and whole or not at all
        return
    seed = DEVELOPMENT_SEED if data == "development" else SEED
    source = BalancedGlyphs(seed) if data == "balanced" else GlyphSource(seed)
    convert(source, train, ConvertSettings(), workers=1, resume=True)
    tokenizer = Dataset(train).tokenizer_path
    convert(GlyphSource(seed, test=True), test, ConvertSettings(), workers=1, resume=True, tokenizer_from=tokenizer)


def open_sets(folder: Path, data: Data) -> Sets:
    """Open what make_sets made."""
    return Sets(*map(Dataset, _paths(folder, data)))


def _paths(folder: Path, data: Data) -> tuple[Path, Path]:
    return folder / data, folder / f"{data}-test"
