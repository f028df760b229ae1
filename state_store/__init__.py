"""Optimisation state for every sample: one row each, in RAM during training and in an icechunk repository on disk.

`StateStore` is the only writer. `StateReader` and `list_snapshots` read at any time and do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import BackgroundError as BackgroundError
from .errors import DamagedChunkError as DamagedChunkError
from .errors import DuplicateIdError as DuplicateIdError
from .errors import FieldError as FieldError
from .errors import MemoryBudgetError as MemoryBudgetError
from .errors import SampleIdError as SampleIdError
from .errors import SnapshotError as SnapshotError
from .errors import SnapshotNotFoundError as SnapshotNotFoundError
from .errors import StateStoreError as StateStoreError
from .errors import StepError as StepError
from .errors import StoreClosedError as StoreClosedError
from .errors import StoreExistsError as StoreExistsError
from .errors import StoreLockedError as StoreLockedError
from .errors import StoreMismatchError as StoreMismatchError
from .errors import StoreNotFoundError as StoreNotFoundError

if TYPE_CHECKING:
    from .durable import list_snapshots as list_snapshots
    from .history import Snapshot as Snapshot
    from .ranks import TorchRanks as TorchRanks
    from .reader import StateReader as StateReader
    from .store import StateStore as StateStore

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
