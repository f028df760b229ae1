"""Validation of sample id vectors."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .errors import DuplicateIdError, SampleIdError

IdArray: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
SampleIds: TypeAlias = IdArray | torch.Tensor
"""int64 [b]: a numpy array or a CPU tensor."""


def checked_ids(sample_ids: SampleIds, owned: range) -> IdArray:
    """Return a private copy of `sample_ids`, int64 [b]; b may be 0.

    Raises SampleIdError for a wrong dtype, more than one dimension, a GPU tensor, or an id outside `owned`.
    """
    if isinstance(sample_ids, torch.Tensor):
        if sample_ids.device.type != "cpu":
            raise SampleIdError(f"sample ids are on {sample_ids.device}; keep them on the CPU, where the rows are")
        sample_ids = sample_ids.numpy()
    # Copy: the caller may reuse its buffer before a background thread reads the ids.
    ids = np.array(sample_ids)
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise SampleIdError(f"sample ids are {ids.dtype} of shape {ids.shape}; pass int64 of shape [b]")
    if len(ids) and (ids.min() < owned.start or ids.max() >= owned.stop):
        outside = ids[(ids < owned.start) | (ids >= owned.stop)]
        raise SampleIdError(
            f"sample id {outside[0]} is outside {owned.start} … {owned.stop - 1}: the store holds {len(owned):,} "
            "samples. Pass ids of the store's dataset, and to a rank those of its canonical shards"
        )
    return ids


def sorted_without_repeats(ids: IdArray) -> IdArray:
    """Return `ids` in ascending order. Raises DuplicateIdError naming the first repeated id."""
    ascending = np.sort(ids)
    repeated = ascending[1:] == ascending[:-1]
    if repeated.any():
        twice = ascending[1:][repeated][0]
        places = np.flatnonzero(ids == twice).tolist()
        raise DuplicateIdError(f"sample id {twice} occurs at positions {places} of one put; give each sample one row")
    return ascending


def found_in(ids: IdArray, ascending: IdArray) -> Flags:
    """Return which of `ids` occur in `ascending`, bool [b]."""
    if not len(ascending):
        return np.zeros(len(ids), dtype=bool)
    place = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    return np.asarray(ascending[place] == ids)
