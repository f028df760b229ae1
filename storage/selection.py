"""A run's own copy of its selection: the selected samples, their weights, the forgotten ones; in `RUN/selection/`.

    ids.int64         ids of the selected samples, ascending; absent if all are selected
    weights.float32   weight of each sample, in the same order, with mean 1; absent without weights
    without.int64     positions of the samples that are left out of every batch, the *holes*, ascending; absent if none
    selection.json    numbers of samples, and the sha256 of the files; sealed

The arrays are little-endian, have no header and are mapped into memory. The *position* of a sample is its place among
the selected samples, 0 … kept - 1. The sample order and the state's rows use positions; everything else uses ids. A
hole keeps its place in the order and its row, so that all other samples keep theirs.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from . import files
from .arrays import Bools, Float32s, Int64s
from .bucket import Address
from .local import LocalPath
from .place import Place
from .sealed_json import DamagedJSONError, seal_document, unseal

IDS, WEIGHTS, WITHOUT, ABOUT = "ids.int64", "weights.float32", "without.int64", "selection.json"
_DTYPES: dict[str, np.dtype[Any]] = {IDS: np.dtype("<i8"), WEIGHTS: np.dtype("<f4"), WITHOUT: np.dtype("<i8")}

_Count = Annotated[int, Field(ge=1, lt=2**63)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SelectionError(OSError):
    """A run's copy of its selection is missing, damaged or another run's."""


def unusable(path: Path | Address, what: str) -> SelectionError:
    return SelectionError(f"{path} {what}; restore it from a copy of the run")


class About(BaseModel, frozen=True):
    """Content of selection.json."""

    model_config = ConfigDict(strict=True, extra="forbid")

    samples: _Count
    """Samples in the dataset."""
    kept: _Count
    """Selected samples."""
    ids: _Sha256 | None
    """sha256 of ids.int64; None if all samples are selected."""
    weights: _Sha256 | None
    """sha256 of weights.float32; None without weights."""
    without: _Sha256 | None = None
    """sha256 of without.int64. With `holes` absent from the file if there are none, as in earlier versions."""
    holes: _Count | None = None
    """Number of holes."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kept > self.samples or (self.ids is None and self.kept < self.samples):
            raise ValueError(f"{self.kept} of {self.samples} samples")
        if (self.without is None) != (self.holes is None) or (self.holes or 0) >= self.kept:
            raise ValueError(f"{self.holes} holes among {self.kept} samples")
        return self

    @property
    def arrays(self) -> dict[str, tuple[str, int]]:
        """Name of each array -> its sha256 and its number of rows."""
        known = {IDS: (self.ids, self.kept), WEIGHTS: (self.weights, self.kept), WITHOUT: (self.without, self.holes)}
        return {name: (digest, rows) for name, (digest, rows) in known.items() if digest and rows}


class Selection:
    """The files of one folder, read on first use; in a bucket, through a copy on this machine.

    All attributes raise SelectionError, OSError.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder

    @cached_property
    def about(self) -> About:
        path = self.folder / ABOUT
        try:
            return About.model_validate(unseal(path.read_bytes()))
        except FileNotFoundError as error:
            raise unusable(path, "is missing") from error
        except (DamagedJSONError, ValidationError) as error:
            raise unusable(path, f"is damaged: {' '.join(str(error).split())}") from error

    @cached_property
    def ids(self) -> Int64s | None:
        """Ids of the selected samples, int64 [kept], ascending, mapped; None if all samples are selected."""
        return self._mapped(IDS) if self.about.ids else None

    @cached_property
    def weights(self) -> Float32s | None:
        """Weights of the selected samples, float32 [kept], mapped; None without weights."""
        return self._mapped(WEIGHTS) if self.about.weights else None

    @cached_property
    def without(self) -> Int64s | None:
        """Positions of the holes, int64 [holes], ascending, mapped; None if there are none."""
        return self.ascending(WITHOUT, self._mapped(WITHOUT), 0, self.about.kept) if self.about.without else None

    def ascending(self, name: str, numbers: Int64s, start: int, stop: int) -> Int64s:
        """Return a file's numbers. Raises SelectionError unless they are ascending and within start … stop - 1."""
        if len(numbers) and not (start <= numbers[0] and numbers[-1] < stop and (numbers[:-1] < numbers[1:]).all()):
            raise unusable(self.folder / name, f"is damaged: not ascending in {start:,} … {stop - 1:,}")
        return numbers

    @property
    def forgotten(self) -> Int64s:
        """Ids of the samples in holes, int64 [holes], ascending."""
        return np.empty(0, np.int64) if self.without is None else self.ids_at(self.without)

    def are_present(self, positions: Int64s | range) -> Bools:
        """Return which positions are no holes, bool [b]."""
        asked = np.arange(positions.start, positions.stop) if isinstance(positions, range) else positions
        if self.without is None:
            return np.ones(asked.shape, np.bool_)
        places = np.minimum(np.searchsorted(self.without, asked), len(self.without) - 1)
        return np.asarray(self.without[places] != asked)

    def are_trained(self, ids: Int64s) -> Bools:
        """Return which samples of the dataset are selected and no holes, bool [b]."""
        places = ids if self.ids is None else np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        return np.asarray((self.ids_at(places) == ids) & self.are_present(places))

    def ids_at(self, positions: Int64s) -> Int64s:
        """Return the ids of the samples at these positions, int64 [b]."""
        return positions if self.ids is None else self.ids[positions]

    def positions(self, ids: Int64s, expected: Int64s) -> Int64s:
        """Return the positions of selected samples, int64 [b]. Raises ValueError if a sample is not selected.

        expected: likely positions, int64 [any]. If they are right, no search is needed: among 10⁸ ids it takes 5 µs
        an id.
        """
        if self.ids is None:
            return ids
        if len(ids) == len(expected) and np.array_equal(self.ids[expected], ids):
            return expected
        places: Int64s = np.searchsorted(self.ids, ids)
        found = self.ids[np.minimum(places, len(self.ids) - 1)] == ids
        if not found.all():
            raise ValueError(f"sample {ids[~found][0]} is not among the {len(self.ids):,} selected ones")
        return places

    def verify(self) -> None:
        """Read the arrays and compare their digests. Raises SelectionError if a digest differs."""
        for name, (digest, _) in self.about.arrays.items():
            self._mapped(name)  # check the length first: do not read a sparse file of a terabyte
            if files.sha256_of(self._local / name) != digest:
                raise unusable(self.folder / name, f"is damaged: its sha256 differs from the one in {ABOUT}")

    def _mapped(self, name: str) -> NDArray[Any]:
        path, dtype, rows = self._local / name, _DTYPES[name], self.about.arrays[name][1]
        try:
            with files.open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size == rows * dtype.itemsize:
                    return np.memmap(file, dtype, mode="r", shape=(rows,)).view(np.ndarray)
        except FileNotFoundError as error:
            raise unusable(path, "is missing") from error
        raise self._of_wrong_size(name, size)

    def _of_wrong_size(self, name: str, size: int) -> SelectionError:
        expected = self.about.arrays[name][1] * _DTYPES[name].itemsize
        return unusable(self.folder / name, f"is damaged: it has {size:,} bytes instead of {expected:,}")

    @cached_property
    def _local(self) -> Path:
        """Return the folder, or a copy made once."""
        if isinstance(self.folder, LocalPath):
            return self.folder
        copy, about = files.own_directory(_beside(self.folder)), (self.folder / ABOUT).read_bytes()
        if (copy / ABOUT).exists() and files.read_regular(copy / ABOUT) == about:
            return copy
        for name, (digest, rows) in self.about.arrays.items():
            if (size := (place := self.folder / _in_bucket(name, digest)).size()) != rows * _DTYPES[name].itemsize:
                raise self._of_wrong_size(name, size)
            with files.written_aside(copy / name) as file:
                place.download(file)
        files.write_atomically(copy / ABOUT, about)  # last: it marks the copy as complete
        return copy


def _in_bucket(name: str, digest: str) -> str:
    """Return the array's object name, with its digest: a late request cannot replace another array."""
    return f"{digest[:16]}.{name}"


def _beside(folder: Address) -> LocalPath:
    return folder.parent.made_scratch() / folder.name


class SelectionWriter:
    """Writes a folder under a temporary name, in pieces; `finish` renames it. Use it as a context manager.

    Replaces a selection left by a killed start. Raises SelectionError if the folder holds other files, someone's.
    """

    def __init__(self, to: Place, samples: int) -> None:
        self._to, self._folder = to, (folder := to if isinstance(to, LocalPath) else _beside(to))
        self._building = folder.with_name(f".{folder.name}.partial")
        self._about: dict[str, int | str | None] = {"samples": samples, "kept": samples, "ids": None, "weights": None}

    def __enter__(self) -> Self:
        files.refuse_link(self._folder)
        if isinstance(self._to, LocalPath) and (others := {*self._to.content()} - {*_DTYPES, ABOUT}):
            raise SelectionError(f"{self._to} holds {min(others)}, which is no run's; move it, or choose another --out")
        self._building.clear()
        files.own_directory(self._building)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._building, ignore_errors=True)

    def add(self, name: str, pieces: Iterable[NDArray[Any]]) -> NDArray[Any]:
        """Write an array, such as IDS, and return it mapped."""
        digest, path = hashlib.sha256(), self._building / name
        with files.written_aside(path) as file:
            for piece in pieces:
                data = np.ascontiguousarray(piece, _DTYPES[name]).data
                digest.update(data)
                file.write(data)
            rows = file.tell() // _DTYPES[name].itemsize
        self._about |= {"holes" if name == WITHOUT else "kept": rows, name.partition(".")[0]: digest.hexdigest()}
        return np.memmap(path, _DTYPES[name], mode="r", shape=(rows,)).view(np.ndarray)

    def finish(self) -> None:
        """Move the folder into place, or its files into the bucket; durable on return."""
        files.write_atomically(self._building / ABOUT, seal_document(self._about))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._building.rename(self._folder)
        files.sync(self._folder.parent)
        if isinstance(self._to, Address):
            for name, (digest, _) in About.model_validate(self._about).arrays.items():
                (self._to / _in_bucket(name, digest)).write(self._folder / name)
            (self._to / ABOUT).rewrite((self._folder / ABOUT).read_bytes())
