"""Errors of the state store; each is a StateStoreError."""

from ..storage.lock import TakenOverError


class StateStoreError(Exception):
    """Base class of all state store errors."""


class SampleIdError(StateStoreError, ValueError):
    """Sample ids are not int64, not one-dimensional, or outside 0 … samples − 1."""


class DuplicateIdError(SampleIdError):
    """A `put` contains an id twice, so the new row is ambiguous."""


class FieldError(StateStoreError, ValueError):
    """A field is missing, unknown, misnamed, or has the wrong shape, dtype or initial value."""


class StepError(StateStoreError, ValueError):
    """A step is out of range, or a snapshot's step is not after the previous snapshot's."""


class StoreExistsError(StateStoreError):
    """The path for a new store already exists."""


class StoreNotFoundError(StateStoreError):
    """The path holds no state store that this version can read."""


class SnapshotNotFoundError(StateStoreError, LookupError):
    """No snapshot has this tag or id."""


class StoreMismatchError(StateStoreError, ValueError):
    """The store was created for another dataset, number of samples or set of fields."""


class StoreLockedError(StateStoreError, TakenOverError):
    """Another process, or another StateStore in this process, is writing to this store."""


class StoreClosedError(StateStoreError):
    """The store was used after `close`, or in a fork of the process that opened it."""


class BackgroundError(StateStoreError):
    """A background thread failed; `__cause__` is the original error."""


class SnapshotError(StateStoreError):
    """A snapshot could not be opened, written, undone or deleted. Rows in memory and the last snapshot are intact."""


class DamagedChunkError(StateStoreError):
    """A chunk of a snapshot cannot be read or does not match its checksum."""


class DamagedFileError(DamagedChunkError):
    """A file of a snapshot is missing or does not match its checksum. file: path relative to the state directory."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file} in the state directory: {reason}")
        self.file, self.reason = file, reason


DAMAGE = (DamagedChunkError, SnapshotNotFoundError)
"""Unreadable rows of a snapshot that another attempt would not read either."""


class MemoryBudgetError(StateStoreError):
    """The memory budget holds fewer blocks than one step needs."""
