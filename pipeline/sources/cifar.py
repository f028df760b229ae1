"""CIFAR-10 and CIFAR-100 as published: python pickles or binary files, packed or unpacked.

https://www.cs.toronto.edu/~kriz/cifar.html describes both. An archive is read in memory and never unpacked to disk.
"""

import gzip
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...storage.arrays import Int32s, Uint8s
from ..errors import BadSampleError, SourceError
from .arrays import ArraysSource
from .listing import as_text, listing_digest, locate, read_regular_file
from .restricted_pickle import PickledArray, load_restricted
from .tar_members import BrokenTarError, members_of

SIDE = 32
PIXELS = 3 * SIDE * SIDE
"""Bytes per picture: all red values, then all green, then all blue values."""

MAX_UNPACKED = 256 << 20
"""Limit of an unpacked archive; the largest of the four has 186 MB."""
_Batch = tuple[Uint8s, Int32s]
"""Pixels [n, PIXELS], and labels [n], each below the number of classes."""


class _Layout(NamedTuple):
    """The files of one of the four archives."""

    kind: str
    names_file: str
    """The file with the class names; its name is unique to the layout."""
    train: tuple[str, ...]
    test: tuple[str, ...]
    names_key: str = ""
    labels_key: str = ""
    """Keys of the pickled dictionaries; empty for binary files."""
    label_bytes: int = 0
    """Label bytes before the pixels of a binary record; the last is the class, in CIFAR-100 after the superclass."""
    superclasses: bool = False


_TENTHS = tuple(f"data_batch_{i}" for i in range(1, 6))
_BINARY_TENTHS = tuple(f"{name}.bin" for name in _TENTHS)
_LAYOUTS = (
    _Layout("cifar-10 python", "batches.meta", _TENTHS, ("test_batch",), "label_names", "labels"),
    _Layout("cifar-100 python", "meta", ("train",), ("test",), "fine_label_names", "fine_labels"),
    _Layout("cifar-10 binary", "batches.meta.txt", _BINARY_TENTHS, ("test_batch.bin",), label_bytes=1),
    _Layout("cifar-100 binary", "fine_label_names.txt", ("train.bin",), ("test.bin",), label_bytes=2),
    _Layout("cifar-100 python", "meta", ("train",), ("test",), "coarse_label_names", "coarse_labels", 0, True),
    _Layout("cifar-100 binary", "coarse_label_names.txt", ("train.bin",), ("test.bin",), "", "", 2, True),
)


class CifarSource(ArraysSource):
    """The training set, or with `test` the test batch, held in memory: 150 MB for 50,000 pictures.

    root: the downloaded .tar.gz, the folder in it, or that folder's parent. superclasses: whether the classes are
    CIFAR-100's twenty superclasses, in place of its hundred classes. Raises SourceError if root is none of these, a
    file is missing or damaged, or a pickle contains anything but plain values and arrays.
    """

    def __init__(self, root: Path, *, test: bool, superclasses: bool = False) -> None:
        self.root, self.test, self.files = root, test, []
        files = _read_files(root, test)
        layout = _layout_of(root, files, superclasses)
        self._batches = layout.test if test else layout.train
        if missing := [name for name in self._batches if name not in files]:
            raise SourceError(f"{root} is {layout.kind} but lacks {', '.join(missing)}; download it again")
        self.kind = layout.kind
        self._names = _class_names(layout, files[layout.names_file])
        parts = [_read_batch(layout, name, files.pop(name), len(self._names)) for name in self._batches]
        planes = np.concatenate([pixels for pixels, _ in parts])
        self._pixels = planes.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
        self._classes = np.concatenate([labels for _, labels in parts])
        self._listing = listing_digest(self._classes, planes)
        self._first = np.cumsum([0] + [len(labels) for _, labels in parts])

    def uri(self, index: int) -> str:
        return f"{as_text(self.root.name)}/{self.key(index)}"

    def key(self, index: int) -> str:
        batch, place = locate(self._first, index)
        return f"{self._batches[batch].removesuffix('.bin')}/{place}"

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "root": as_text(self.root.resolve()),
            "split": "test" if self.test else "train",
            "listing": self._listing,
        }


def _read_batch(layout: _Layout, name: str, data: bytes, classes: int) -> _Batch:
    pixels, labels = (_binary if layout.label_bytes else _pickled)(layout, name, data)
    if len(labels) == 0 or pixels.shape != (len(labels), PIXELS):
        raise SourceError(f"{name} holds pixels of shape {pixels.shape} for {len(labels):,} labels; each has {PIXELS}")
    if not 0 <= labels.min() <= labels.max() < classes:
        raise SourceError(f"{name} has labels {labels.min()} to {labels.max()} for {classes} classes")
    return pixels, labels


def _binary(layout: _Layout, name: str, data: bytes) -> _Batch:
    record = layout.label_bytes + PIXELS
    if len(data) % record:
        raise SourceError(f"{name} has {len(data):,} bytes, not a multiple of {record:,}; download it again")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1 - layout.superclasses].astype(np.int32)


def _pickled(layout: _Layout, name: str, data: bytes) -> _Batch:
    match _unpickled(name, data):
        case {"data": PickledArray() as array, layout.labels_key: list(labels)} if _all_are(int, labels):
            try:
                return array.uint8(), np.array(labels, np.int32)
            except (ValueError, OverflowError) as error:
                raise SourceError(f"{name}: {error}") from error
    raise SourceError(f"{name} has no 'data' with integers in {layout.labels_key!r}; it is no batch of {layout.kind}")


def _unpickled(name: str, data: bytes) -> object:
    try:
        return load_restricted(data)
    except pickle.UnpicklingError as error:
        raise SourceError(f"{name} is not a CIFAR pickle: {error}") from error


def _class_names(layout: _Layout, data: bytes) -> tuple[str, ...]:
    if layout.label_bytes:
        return tuple(as_text(line).strip() for line in data.splitlines() if line.strip())
    match _unpickled(layout.names_file, data):
        case {layout.names_key: list(names)} if _all_are(str, names):
            return tuple(names)
    raise SourceError(f"{layout.names_file} has no list {layout.names_key!r}")


def _all_are(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _layout_of(root: Path, files: Mapping[str, bytes], superclasses: bool) -> _Layout:
    layouts = [layout for layout in _LAYOUTS if layout.superclasses == superclasses]
    if found := [layout for layout in layouts if layout.names_file in files]:
        return found[0]
    wanted, kind = ", ".join(layout.names_file for layout in layouts), "CIFAR-100" if superclasses else "CIFAR"
    raise SourceError(f"{root} is not a {kind} archive, python or binary: it has none of {wanted}")


def _read_files(root: Path, test: bool) -> dict[str, bytes]:
    """Read the files of any of the four archives that are present, by name."""
    wanted = {name for layout in _LAYOUTS for name in (layout.names_file, *(layout.test if test else layout.train))}
    if not root.is_dir():
        return dict(_members(root, wanted))
    for folder in (root, *sorted(root.glob("cifar-*"))):
        if any((folder / layout.names_file).exists() for layout in _LAYOUTS):
            return {name: _read(folder / name) for name in wanted if (folder / name).exists()}
    return {}


def _read(file: Path) -> bytes:
    try:
        return read_regular_file(os.fsencode(file))
    except BadSampleError as error:
        raise SourceError(f"{file}: {error}") from error


def _members(root: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    if not root.is_file():
        raise SourceError(f"{root} is neither a folder nor a file; pass CIFAR's .tar.gz or the folder in it")
    try:
        with gzip.open(root) as packed:
            archive = packed.read(MAX_UNPACKED)
        for member in members_of(lambda offset, size: archive[offset : offset + size], len(archive)):
            name = as_text(member.name).rpartition("/")[2]
            if name in wanted:
                yield name, archive[member.offset : member.offset + member.size]
    except (OSError, EOFError, zlib.error, BrokenTarError) as error:
        raise SourceError(f"{root} is not a complete .tar.gz: {error}; download it again") from error
