"""The datasets of the comparisons: glyphs, long-tailed for training, with ten balanced test sets; drawings; emoji."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources import Source
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.glyphs import CHARACTERS, TEST_PER_CLASS, GlyphSource
from thermopile.trainer.evaluation.bands import Classes, band_of_class, match_classes

from .. import noto_emoji, openclipart
from .plan import RIGHT, Data, base_of, is_drawn, is_real, is_searched_on, wrong_share
from .real_sets import real_sources

DEVELOPMENT_SEED, SEED = 1, 0
TEST_SETS = 10
DEVELOPMENT_TEST_SEED, TEST_SEED = 200, 100
"""The first of the seeds of the test sets, whose pictures no training set has."""
DRAWINGS_TESTED = {"-development": 300, "": 600}
"""How the name of drawings or emoji ends -> its test samples."""


class Sets(NamedTuple):
    """The datasets that runs learn from and are scored on."""

    train: Dataset
    tests: list[Dataset]
    classes: list[Classes]
    """The classes of each test set; none of drawings and emoji, nor where classes may have lost all their samples."""


class BalancedGlyphs(GlyphSource):
    """As many glyphs as there are long-tailed ones, as many of each character."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._characters = np.sort(np.arange(len(self)) % len(CHARACTERS))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"split": "balanced"}


def test_sources(data: Data) -> list[GlyphSource]:
    """The test sets of this name; the balanced and the long-tailed training set have the same."""
    first = DEVELOPMENT_TEST_SEED if is_searched_on(data) else TEST_SEED
    return [GlyphSource(first + number, test=True) for number in range(TEST_SETS)]


def train_source(data: Data) -> GlyphSource:
    if data == "balanced":
        return BalancedGlyphs(SEED)
    return GlyphSource(DEVELOPMENT_SEED if is_searched_on(data) else SEED, swap=wrong_share(data))


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
    paths = _paths(folder, data)
    if all(path.exists() for path in paths):  # each is written whole or not at all
        return
    if is_real(data) and wrong_share(data):
        make_sets(folder, base_of(data))  # whose captions are exchanged
    tokenizer = None
    for (source, selection), path in zip(_sources(folder, data), paths, strict=True):
        if not path.exists():
            convert(source, path, ConvertSettings(), workers=1, resume=True, selection=selection,
                    tokenizer_from=tokenizer)  # fmt: skip
        if (train := Dataset(paths[0])).index.tokenizer is not None:
            tokenizer = train.tokenizer_path


def open_sets(folder: Path, data: Data) -> Sets:
    """Open what make_sets made."""
    train, *tests = map(Dataset, _paths(folder, data))
    tested = [] if is_drawn(data) or data.endswith(RIGHT) else tests
    return Sets(train, tests, [match_classes(train.column("group"), test.column("group")) for test in tested])


def source_indices(dataset: Dataset) -> NDArray[np.int64]:
    """Return the place in the source of each sample of a dataset, int64 [n]."""
    return np.concatenate([dataset.shard(number).records()["source_index"] for number in range(dataset.shards)])


def test_samples(data: Data) -> int:
    """The number of samples of all test sets."""
    if is_drawn(data):
        return DRAWINGS_TESTED["-development" if is_searched_on(data) else ""]
    return TEST_SETS * TEST_PER_CLASS * len(CHARACTERS)


def split(captions: list[str]) -> dict[str, NDArray[np.int64]]:
    """Return which drawings, ascending, are for `train` and in the test set of each name.

    A test set has one drawing of each of its captions, and no other set has any.
    """
    _, first, caption = np.unique(captions, return_index=True, return_inverse=True)
    parts = np.split(np.random.default_rng(SEED).permutation(len(first)), np.cumsum([*DRAWINGS_TESTED.values()]))
    tests = {name: np.sort(first[part]) for name, part in zip(DRAWINGS_TESTED, parts, strict=False)}
    return {"train": np.flatnonzero(np.isin(caption, parts[-1])), **tests}


def _sources(folder: Path, data: Data) -> list[tuple[Source, NDArray[np.int64] | None]]:
    """The training set's source, and each test set's; with what is chosen of it, None for all."""
    if is_real(data):
        return real_sources(folder, data)
    if is_drawn(data):
        return _drawn(folder, data)
    glyphs, right = train_source(data), None
    if data.endswith(RIGHT):
        given, meant = (np.array(list(of.captions(np.arange(len(of))))) for of in (glyphs, train_source(base_of(data))))
        right = np.flatnonzero(given == meant)
    return [(glyphs, right), *((source, None) for source in test_sources(data))]


def _drawn(folder: Path, data: Data) -> list[tuple[Source, NDArray[np.int64] | None]]:
    """As _sources, of drawings or emoji."""
    name, ending, _ = base_of(data).partition("-development")
    made, group = (noto_emoji, None) if name == "emoji" else (openclipart, "folder")
    of_pairs = folder / made.__name__
    pairs: Sequence[Any] = made.make(of_pairs)
    chosen = split([pair.title for pair in pairs])
    train, file = chosen["train"], of_pairs / "pairs.csv"
    test = CsvSource(file, group=group), chosen[ending]
    if share := wrong_share(data):
        given = with_wrong_titles(pairs, train, share, DEVELOPMENT_SEED if ending else SEED)
        file = openclipart.write_pairs(of_pairs, given, f"{data}.csv")
        if data.endswith(RIGHT):
            train = train[[given[number].title == pairs[number].title for number in train]]
    return [(CsvSource(file, group=group), train), test]


def with_wrong_titles(pairs: Sequence[Any], chosen: NDArray[np.int64], share: float, seed: int) -> list[Any]:
    """Return the pairs with a share of the chosen ones' titles passed on around a ring in random order."""
    moved = np.random.default_rng(seed).permutation(chosen)[: round(share * len(chosen))].tolist()
    found = list(pairs)
    for place, number in enumerate(moved):
        found[number] = pairs[number]._replace(title=pairs[moved[place - 1]].title)
    return found


def _paths(folder: Path, data: Data) -> list[Path]:
    sets = 2 if base_of(data) in ("icons", "icons-all") else 1 if is_drawn(data) or is_real(data) else TEST_SETS
    return [folder / data, *(folder / f"{base_of(data)}-test-{number}" for number in range(sets))]
