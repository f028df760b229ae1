"""A folder of pictures, nested or flat; the first subfolder on the way to a picture is its class."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...storage.bucket import Address
from ...storage.local import LocalPath
from ...storage.place import AnyPlace, made_for, place_of
from ..errors import SourceError
from . import NEVER, ClassGroups, Sample, Source, marks_of
from .listing import as_text, binary_array, estimated_bytes, groups_by_name, listing_digest, read_picture, resolved_text

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class FolderSource(Source):
    """Lists the pictures once, sorted by the bytes of their names, so that every machine numbers them alike.

    Raises SourceError if the folder is missing, a subfolder cannot be listed, or there are no pictures.
    Symbolic links to files are followed; links to folders are not, as they can form cycles.
    """

    mode = "images"

    def __init__(self, root: AnyPlace) -> None:
        """root: a folder, or an address above the pictures' objects."""
        root = place_of(root)
        if not root.is_folder():
            raise SourceError(f"{root} is not a folder; pass the folder that holds the pictures")
        self.root = root
        versions = array("Q")
        below = made_for(root, _pictures_below, lambda address: _objects_below(address, versions))
        paths = binary_array(below)
        order = pc.array_sort_indices(paths).to_numpy()
        self._paths = paths.take(order)
        self._versions = np.array(versions, np.uint64)[order[: len(versions)]]
        if not len(self._paths):
            raise SourceError(f"{root} holds no picture: no file below it ends in {', '.join(sorted(SUFFIXES))}")

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        return self.sample(index, NEVER)

    def sample(self, index: int, unchanged_since: int) -> Sample:
        data = read_picture(self.root, self._path(index), unchanged_since)
        folder, slash, _ = self._path(index).partition(b"/")
        return Sample(self.uri(index), self.key(index), data, caption=None, group=as_text(folder) if slash else None)

    def uri(self, index: int) -> str:
        return as_text(self._path(index))

    def key(self, index: int) -> str:
        return self.uri(index)

    def groups(self) -> ClassGroups | None:
        parts = pc.split_pattern(self._paths, "/", max_splits=1)
        flat = pc.equal(pc.list_value_length(parts), 1)
        return groups_by_name([pc.if_else(flat, pa.scalar(b"", pa.large_binary()), pc.list_element(parts, 0))])

    def stored_bytes(self) -> int | None:
        return estimated_bytes(self.root, self._path, len(self))

    def describe(self) -> dict[str, Any]:
        return {"kind": "folder", "root": resolved_text(self.root), "listing": listing_digest(self._paths)}

    def marks(self) -> dict[str, str]:
        return marks_of(self.uri, memoryview(self._versions))  # its items are plain integers

    def _path(self, index: int) -> bytes:
        path: bytes = self._paths[index].as_py()
        return path


def _pictures_below(path: LocalPath) -> Iterator[bytes]:
    root = os.fsencode(path)
    for folder, _, names in os.walk(root, onerror=_refuse):
        below = os.path.relpath(folder, root)
        for name in filter(_is_picture, names):
            yield name if below == b"." else os.path.join(below, name)


def _objects_below(root: Address, versions: array[int]) -> Iterator[bytes]:
    """Yield the names of pictures; append a digest of each picture's version to `versions`."""
    for path, size, tag in root.listing():
        if _is_picture(name := path.encode()):
            versions.append(int.from_bytes(hashlib.blake2b(f"{size} {tag}".encode(), digest_size=8).digest()))
            yield name


def _is_picture(name: bytes) -> bool:
    return os.path.splitext(name)[1].lower().decode("ascii", "replace") in SUFFIXES


def _refuse(error: OSError) -> None:
    raise SourceError(f"{error.filename!r} cannot be listed: {error.strerror}; fix its permissions or move it away")
