"""Optimisation state for every sample: one row each, in RAM during training and in an icechunk repository on disk.

`StateStore` is the only writer. `StateReader` and `list_snapshots` read at any time and do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    BackgroundError,
    DamagedChunkError,
    DuplicateIdError,
    FieldError,
    MemoryBudgetError,
    SampleIdError,
    SnapshotError,
    SnapshotNotFoundError,
    StateStoreError,
    StepError,
    StoreClosedError,
    StoreExistsError,
    StoreLockedError,
    StoreMismatchError,
    StoreNotFoundError,
)

if TYPE_CHECKING:
    from .durable import list_snapshots
    from .history import Snapshot
    from .ranks import TorchRanks
    from .reader import StateReader
    from .store import StateStore

__all__ = [
    "BackgroundError",
    "DamagedChunkError",
    "DuplicateIdError",
    "FieldError",
    "MemoryBudgetError",
    "SampleIdError",
    "Snapshot",
    "SnapshotError",
    "SnapshotNotFoundError",
    "StateReader",
    "StateStore",
    "StateStoreError",
    "StepError",
    "StoreClosedError",
    "StoreExistsError",
    "StoreLockedError",
    "StoreMismatchError",
    "StoreNotFoundError",
    "TorchRanks",
    "list_snapshots",
]

# Imported on first use: the store needs torch and numba, the reader zarr and icechunk, an error class neither.
_HOME = {
    "StateStore": "store",
    "StateReader": "reader",
    "Snapshot": "history",
    "list_snapshots": "durable",
    "TorchRanks": "ranks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
