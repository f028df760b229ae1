"""The classes of the training set, and how frequent each is: head, medium or tail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...pipeline.errors import DatasetError

BANDS = ("head", "medium", "tail")
"""Thirds of the classes, not of the samples: sorted by their number of training samples, the largest first."""
NONE = -1
"""Code of a sample without a class, and of its band."""

Scores = dict[str, float | None]
"""Share of the samples that are right, 0 … 1: of `all`, and of those of each band; None where there are none."""


@dataclass(frozen=True)
class Classes:
    """The classes that the training set names, and which of them each sample has."""

    names: list[str]
    """In the order of their codes."""
    train: NDArray[np.int64]
    """int64 [n]: codes of the training samples, NONE where a sample has no class."""
    test: NDArray[np.int64]
    """int64 [m]: the same of the test samples."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64 [classes]: training samples of each."""
        return np.bincount(self.train[self.train != NONE], minlength=len(self.names)).astype(np.int64)

    @property
    def test_bands(self) -> NDArray[np.int64]:
        """int64 [m]: for each test sample the place in BANDS of its class's band, or NONE."""
        return np.append(band_of_class(self.sizes), NONE)[self.test]  # NONE is the last place


def match_classes(train: pa.ChunkedArray, test: pa.ChunkedArray) -> Classes:
    """Match two datasets' columns of class names by name; null is no class.

    Raises DatasetError where a test sample has a class that the training set lacks.
    """
    train_groups, test_groups = train.to_pylist(), test.to_pylist()
    names = sorted({name for name in train_groups if name is not None})
    codes: dict[str | None, int] = {None: NONE} | {name: code for code, name in enumerate(names)}
    if names and (unknown := sorted({name for name in test_groups if name not in codes})):
        raise DatasetError(
            f"the test set has {len(unknown):,} classes that the training set does not have, as {unknown[0]!r}; "
            f"the training set has {len(names):,}, as {names[0]!r}. Classes are matched by name"
        )
    return Classes(
        names,
        np.array([codes[name] for name in train_groups], np.int64),
        np.array([codes.get(name, NONE) for name in test_groups], np.int64),
    )


def band_of_class(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each class's place in BANDS, int64 [classes], from its number of training samples, int64 [classes].

    Where the classes cannot be divided by three, head and then medium have one class more. Classes of one size that lie
    across a cut are told apart by their place.
    """
    bands = np.empty(len(sizes), np.int64)
    largest_first = np.argsort(-sizes, kind="stable")
    for band, classes in enumerate(np.array_split(largest_first, len(BANDS))):
        bands[classes] = band
    return bands


def score(right: NDArray[np.bool_], bands: NDArray[np.int64]) -> Scores:
    """The share of `right`, bool [m], over all samples and over those of each band; bands int64 [m]."""
    chosen = {"all": right} | {name: right[bands == band] for band, name in enumerate(BANDS)}
    return {name: float(part.mean()) if len(part) else None for name, part in chosen.items()}
