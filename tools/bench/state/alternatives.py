"""What a user would pick instead of the state store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import zarr
from torch import Tensor


class SeparateTensors:
    """One float32 tensor [samples] a field, indexed and assigned by an int64 tensor of ids within the step."""

    def __init__(self, samples: int, fields: Mapping[str, float]) -> None:
        # Filled, not zeroed: untouched zero pages all share one page of memory, which would be read from the cache.
        self._columns = {name: torch.full((samples,), value) for name, value in fields.items()}

    def prefetch(self, sample_ids: Tensor) -> None:
        """There is nothing to prefetch to."""

    def take(self, sample_ids: Tensor) -> dict[str, Tensor]:
        return {name: column[sample_ids] for name, column in self._columns.items()}

    def put(self, sample_ids: Tensor, state: Mapping[str, Tensor], *, step: int) -> None:
        for name, column in self._columns.items():
            column[sample_ids] = state[name].detach()


class PlainZarr:
    """One zarr array a column in a local directory, uncompressed, in chunks of `chunk_rows`."""

    def __init__(self, path: Path, columns: Mapping[str, npt.NDArray[Any]], chunk_rows: int) -> None:
        group = zarr.create_group(path)
        self._columns = columns
        self._arrays = {
            name: group.create_array(
                name, shape=column.shape, chunks=(chunk_rows,), dtype=column.dtype, compressors=None, filters=None
            )
            for name, column in columns.items()
        }

    def write(self) -> None:
        for name, array in self._arrays.items():
            array[:] = self._columns[name]
