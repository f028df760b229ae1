"""A folder of pictures, nested or flat; the first sub-folder on the way to a picture is its class."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import BadSampleError, SourceError
from .sources import Sample

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class FolderSource:
    """Lists the pictures once, in the order of their names' bytes, so that every machine numbers them alike.

    Raises SourceError where there is no folder, one below it cannot be listed, or there is no picture in it.
    Symbolic links to folders are not followed: they can form a circle.
    """

    mode = "images"

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise SourceError(f"{root} is not a folder; give the folder that holds the pictures")
        self.root = root
        self._paths = sorted(_pictures_below(os.fsencode(root)))
        if not self._paths:
            raise SourceError(f"{root} holds no picture: no file below it ends in {', '.join(sorted(SUFFIXES))}")

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        path = self._paths[index]
        try:
            file = Path(os.fsdecode(os.path.join(os.fsencode(self.root), path)))
            if file.exists() and not file.is_file():
                raise BadSampleError("not a regular file")  # reading a pipe would wait for ever
            data = file.read_bytes()
        except OSError as error:
            raise BadSampleError(f"cannot be read: {error.strerror or error}") from error
        folder, _, _ = path.partition(b"/")
        return Sample(
            uri=self.uri(index),
            key=self.key(index),
            picture=data,
            caption=None,
            group=_text(folder) if folder != path else None,
        )

    def uri(self, index: int) -> str:
        return _text(self._paths[index])

    def key(self, index: int) -> str:
        return self.uri(index)

    def captions(self) -> Iterable[str]:
        return ()

    def describe(self) -> dict[str, Any]:
        return {"kind": "folder", "root": _text(os.fsencode(self.root.resolve()))}


def _pictures_below(root: bytes) -> Iterator[bytes]:
    for folder, _, names in os.walk(root, onerror=_refuse):
        for name in names:
            if os.path.splitext(name)[1].lower().decode("ascii", "replace") in SUFFIXES:
                yield os.path.relpath(os.path.join(folder, name), root)


def _refuse(error: OSError) -> None:
    raise SourceError(f"{error.filename!r} cannot be listed: {error.strerror}; mend its permissions or move it away")


def _text(path: bytes) -> str:
    """Names need not be UTF-8; parquet and JSON must be."""
    return path.decode("utf-8", "backslashreplace")
