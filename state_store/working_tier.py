"""Blocks that are not in memory: in a working copy on disk if they changed, otherwise in the last snapshot."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec

from ..storage.arrays import Bools, Uint32s
from ..storage.files import own_directory
from ..storage.place import Place, working_folder
from .durable import Repository
from .errors import DAMAGE, DamagedChunkError
from .history import Snapshot
from .reader import read_records


class WorkingTier:
    """One zarr array of records with one chunk per block, rewritten in place. Private to a rank, useless after a crash.

    A block that was never written here is unchanged, and is read from the last snapshot, so opening takes the same
    time for any number of rows. Thread-safe, except for concurrent writes of one block.
    """

    def __init__(self, repository: Repository, owned: range, snapshot: Snapshot, rank: int) -> None:
        self._repository, self._owned = repository, owned
        self._description = description = repository.description
        folder = working_folder(repository.path.parent) / f"{repository.path.name}.working"
        # Not a place of storage/, of which zarr would read no file above 64 MiB.
        self.path = Path(own_directory(folder)) / f"rank-{rank}"
        shutil.rmtree(self.path, ignore_errors=True)  # on machines other than rank 0's, leftovers of a killed run
        self.path.mkdir()  # must not exist: leftovers of killed runs and planted files have been discarded
        rows, words = len(owned), description.schema.row_words
        self._array: zarr.Array[Any] = zarr.create_array(
            self.path,
            shape=(rows, words),
            chunks=(min(description.block_rows, rows), words),
            dtype=np.uint32,
            fill_value=0,
            compressors=Crc32cCodec(),
            filters=None,
            config={"write_empty_chunks": True},
        )
        self._written: Bools = np.zeros(-(-rows // description.block_rows), dtype=bool)
        self._opened: tuple[Snapshot, zarr.Group] | None = None
        self._first_step = snapshot.step
        self.follow(snapshot)

    def follow(self, snapshot: Snapshot) -> None:
        """From now on, read blocks that were never written here from `snapshot`; the older one may be collected."""
        self._snapshot = snapshot

    def read(self, block: int) -> Uint32s:
        """Return the records of a block, [rows of the block, row_words]. Raises DamagedChunkError, OSError."""
        start = block * self._description.block_rows
        stop = min(start + self._description.block_rows, len(self._owned))
        if self._written[block]:
            file = self.path / "c" / str(block) / "0"
            try:
                if not file.exists():  # zarr would read a missing file as zeros
                    raise FileNotFoundError("it is missing")
                return np.ascontiguousarray(self._array[start:stop], dtype=np.uint32)
            except (OSError, ValueError) as error:
                raise DamagedChunkError(
                    f"block {block} of the working tier cannot be read from {file}: {error}. "
                    "Resume at the last snapshot, which does not need it"
                ) from error
        words = np.zeros((stop - start, self._description.schema.row_words), dtype=np.uint32)
        snapshot = followed = self._snapshot
        while True:
            opened, first = self._opened, self._owned.start
            try:
                if opened is None or opened[0] is not snapshot:
                    opened = self._opened = (snapshot, self._repository.group(snapshot))
                read_records(opened[1], self._description, first + start, first + stop, words)
                return words
            except Exception as error:
                # Another thread may have switched to a newer snapshot and collected this one.
                if followed is not self._snapshot:
                    snapshot = followed = self._snapshot
                    continue
                # Damaged? Blocks that were never written here are the same in all snapshots since the opened one.
                known = self._repository.snapshots() if isinstance(error, DAMAGE) else []
                earlier = [entry for entry in known if self._first_step <= entry.step < snapshot.step]
                if not earlier:
                    raise
                snapshot = earlier[-1]

    def write(self, block: int, words: Uint32s) -> None:
        """Replace the records of a block. On OSError the block keeps its old ones."""
        start = block * self._description.block_rows
        self._array[start : start + len(words)] = words
        self._written[block] = True

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other ranks still have their files
            self.path.parent.rmdir()


def discard(repository: Place) -> None:
    """Delete the working tiers of killed runs, with THERMOPILE_SCRATCH or without. Only for the lock's holder."""
    with suppress(OSError):  # THERMOPILE_SCRATCH cannot be written, and this run may not need it
        for folder in (repository.parent.made_scratch(), working_folder(repository.parent)):
            shutil.rmtree(folder / f"{repository.name}.working", ignore_errors=True)
