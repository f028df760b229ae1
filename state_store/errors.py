"""What can go wrong in the state store; every class is a StateStoreError."""


class StateStoreError(Exception):
    """Base of all errors raised by the state store."""


class SampleIdError(StateStoreError, ValueError):
    """Sample ids are not int64, not one-dimensional, or outside 0 … samples − 1."""


class DuplicateIdError(SampleIdError):
    """One `put` names a sample twice, so which of its rows should stay is undefined."""


class FieldError(StateStoreError, ValueError):
    """A field is missing, unknown, misnamed, or has the wrong shape, dtype or initial value."""


class StepError(StateStoreError, ValueError):
    """A step is out of range, or a snapshot's step is not after the last snapshot's."""


class StoreExistsError(StateStoreError):
    """A new store was asked for where something exists already."""


class StoreNotFoundError(StateStoreError):
    """There is no state store at this path, or none that this version can read."""


class SnapshotNotFoundError(StateStoreError, LookupError):
    """No snapshot answers to this tag or id."""


class StoreMismatchError(StateStoreError, ValueError):
    """The store was made for another dataset, number of samples or set of fields."""


class StoreLockedError(StateStoreError):
    """Another process, or another StateStore of this process, writes to this store."""


class StoreClosedError(StateStoreError):
    """The store was used after `close`, or in a process forked from the one that opened it."""


class BackgroundError(StateStoreError):
    """Work in a background thread failed; `__cause__` is the failure."""


class SnapshotError(StateStoreError):
    """A snapshot could not be opened, written, undone or deleted; the rows in memory and the last snapshot stand."""


class DamagedChunkError(StateStoreError):
    """A chunk of a snapshot cannot be read, or is not what was written."""


class DamagedFileError(DamagedChunkError):
    """A file of a snapshot is missing, or is not what was written. file: its path in the directory of the state."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} in the directory of the state: {reason}")
        self.file, self.reason = file, reason


class MemoryBudgetError(StateStoreError):
    """The memory budget holds fewer blocks than one step needs."""
