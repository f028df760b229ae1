"""The rows of a run on selected samples, as rows of the whole dataset: others and holes read as never visited.

Those of a run on a mixture of datasets are in another order than its samples.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from ..storage.mixed_rows import MIXTURE, MixedRows
from ..storage.selection import ABOUT, IDS, Selection, SelectionError
from .durable import Repository


def selection_of(repository: Repository) -> Selection | None:
    """Return the selection that a store was created with, or that has its run's holes; None: all samples.

    Raises SelectionError if the folder next to the store does not hold that selection.
    """
    description, folder = repository.description, repository.path.with_name("selection")
    if description.selection is None and not (folder / ABOUT).exists():
        return None
    selection = MixedRows.read(folder) if (folder / MIXTURE).exists() else Selection(folder)
    about = selection.about
    if (about.ids, about.kept) != (description.selection, description.samples):
        raise SelectionError(
            f"{selection.folder} is another run's: it selects {about.kept:,} samples with the sha256 {about.ids}, but "
            f"{repository.path} is of {description.samples:,} with {description.selection}. Restore the run's own"
        )
    return selection if about.ids or about.without else None


def places_within(selection: Selection, start: int, stop: int) -> tuple[tuple[int, int], npt.NDArray[np.int64]]:
    """Return the range of positions of the selected ids among start … stop − 1, and these ids minus start.

    Raises SelectionError if the ids are not ascending: the file is damaged.
    """
    assert selection.ids is not None
    first, end = np.searchsorted(selection.ids, (start, stop)).tolist()
    return (first, end), selection.ascending(IDS, selection.ids[first:end], start, stop) - start


class Scattered:
    """A stored column as a column of all samples; reads only the indexed rows."""

    def __init__(self, stored: zarr.Array[Any], selection: Selection, fill_value: float) -> None:
        self._stored, self._selection, self._fill_value = stored, selection, fill_value
        self.dtype: np.dtype[Any] = stored.dtype
        self.shape = (selection.about.samples,)
        self.ndim, self.size = 1, selection.about.samples

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> npt.NDArray[Any]:
        """Return values for a number, a slice, ids or a mask [samples]. Raises IndexError for an id out of range."""
        if isinstance(key, slice):
            low, high, step = key.indices(self.size)
            wanted = np.arange(low, high, step)
        else:
            wanted = np.asarray(key)
            wanted = np.flatnonzero(wanted) if wanted.dtype == bool else wanted.astype(np.int64)
            if wanted.size and not -self.size <= wanted.min() <= wanted.max() < self.size:
                raise IndexError(f"ids {wanted.min()} to {wanted.max()} of {self.size:,} samples")
            wanted = wanted % self.size
        if (ids := self._selection.ids) is None:
            places = self._selection.positions(wanted.reshape(-1), wanted).reshape(wanted.shape)
        else:
            places = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        present = self._selection.are_present(places) & (ids is None or ids[places] == wanted)
        values = np.full(wanted.shape, self._fill_value, self.dtype)
        if present.any():
            values[present] = self._stored.oindex[places[present]]
        return values[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)
