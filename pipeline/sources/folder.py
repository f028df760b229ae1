"""A folder of pictures, nested or flat; the first subfolder on the way to a picture is its class."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...storage.arrays import Int64s
from ...storage.bucket import Address
from ...storage.files import open_regular
from ...storage.local import LocalPath
from ...storage.place import AnyPlace, Place, made_for, place_of
from ..errors import BadSampleError, SourceError
from . import NEVER, Account, ClassGroups, Sample, Source, marks_of
from .listing import (
    BETWEEN_CAPTIONS,
    MAX_PICTURE_BYTES,
    as_text,
    binary_array,
    caption_texts,
    estimated_bytes,
    groups_by_name,
    is_hidden,
    listing_digest,
    read_picture,
    resolved_text,
)

PICTURES = frozenset({b".apng", b".avif", b".bmp", b".dib", b".gif", b".jfif", b".jpe", b".jpeg", b".jpg", b".pbm",
                      b".pgm", b".pnm", b".png", b".ppm", b".tif", b".tiff", b".webp"})  # fmt: skip
"""Suffixes of what conversion reads. A file without a suffix is a picture by its first bytes."""
HEIC = frozenset({b".heic", b".heif"})
PICTURES |= HEIC if find_spec("pillow_heif") else frozenset()
_UNREAD = frozenset({b".jxl", b".svg", b".psd", b".cr2", b".dng", b".nef"})
_TEXTS = frozenset({b".txt", b".caption"})
METADATA = "metadata"
_METADATA_FILES = (b"metadata.csv", b"metadata.jsonl")
_TEXT_COLUMNS = ("text", "caption", "captions", "prompt", "title")
_FIRST_BYTES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"II*\x00", b"MM\x00*", b"BM")


class FolderSource(Source):
    """Lists the pictures once, sorted by the bytes of their names, so that every machine numbers them alike.

    caption: a suffix, such as `txt`: x.txt beside x.jpg has a caption a line; or `metadata`, or `metadata:COLUMN`: of
    Hugging Face's metadata.csv or metadata.jsonl, found by the column file_name. None: images only.
    Links are followed, to a folder once: it is named, since a folder of another person's could lead anywhere.
    Raises SourceError if the folder is missing, a subfolder cannot be listed, or there are no pictures or captions.
    """

    def __init__(self, root: AnyPlace, *, caption: str | None = None) -> None:
        """root: a folder, or an address above the pictures' objects."""
        root = place_of(root)
        if not root.is_folder():
            raise SourceError(f"{root} is not a folder; pass the folder that holds the pictures")
        self.root, self._caption, self._links = root, caption, list[str]()
        self.mode = "images" if caption is None else "pairs"
        self.unused, versions = Account(), array("Q")
        below = made_for(root, self._files_below, lambda address: _objects_below(address, versions))
        beside = list[bytes]()
        paths = binary_array(self._pictures(below, beside))
        order = pc.array_sort_indices(paths).to_numpy()
        self._paths = paths.take(order)
        self._versions = np.array(versions, np.uint64)[order[: len(versions)]]
        if not len(self._paths):
            known = ", ".join(sorted(suffix.decode() for suffix in PICTURES))
            raise SourceError(f"{root} holds no picture: no file below it ends in {known}{self.unused}")
        self._texts = self._texts_of(beside) if caption else None
        self.notes = tuple(self._links)

    def __len__(self) -> int:
        return len(self._paths)

    def sample(self, index: int, unchanged_since: int) -> Sample:
        path = self._path(index)
        captions = self._captions_of(index, unchanged_since) if self._caption else (None,)
        data = read_picture(self.root, path, unchanged_since)
        folder, slash, _ = path.partition(b"/")
        group, uri = as_text(folder) if slash else None, as_text(path)
        return Sample(uri, uri, data, captions[0], group, captions[1:])

    def uri(self, index: int) -> str:
        return as_text(self._path(index))

    def key(self, index: int) -> str:
        return self.uri(index)

    def groups(self) -> ClassGroups | None:
        parts = pc.split_pattern(self._paths, "/", max_splits=1)
        flat = pc.equal(pc.list_value_length(parts), 1)
        return groups_by_name([pc.if_else(flat, pa.scalar(b"", pa.large_binary()), pc.list_element(parts, 0))])

    def captions(self, indices: Int64s) -> Iterator[str]:
        for index in indices.tolist() if self._caption else ():
            try:
                yield from self._captions_of(index, NEVER)
            except BadSampleError:
                continue

    def stored_bytes(self) -> int | None:
        return estimated_bytes(self.root, self._path, len(self))

    def describe(self) -> dict[str, Any]:
        listed = (self._paths,) if self._texts is None else (self._paths, pc.fill_null(self._texts, b""))
        about = {"kind": "folder", "root": resolved_text(self.root), "listing": listing_digest(*listed)}
        return about | ({"caption": self._caption} if self._caption else {})

    def marks(self) -> dict[str, str]:
        return marks_of(self.uri, memoryview(self._versions))  # its items are plain integers

    def _path(self, index: int) -> bytes:
        return bytes(self._paths[index].as_py())

    # Listing

    def _files_below(self, path: LocalPath) -> Iterator[bytes]:
        """Yield the files of a local folder. Links to folders come last, so that a folder keeps its own name."""
        root = os.fsencode(path)
        entered, pending, links = set[tuple[int, int]](), [b""], list[bytes]()
        while pending or links:
            below = pending.pop() if pending else links.pop(0)
            try:
                found = os.stat(os.path.join(root, below))
                if (here := (found.st_dev, found.st_ino)) in entered:
                    self.unused.add("links to folders that are listed already", as_text(below))
                    continue
                entered.add(here)
                with os.scandir(os.path.join(root, below)) as entries:
                    for entry in entries:
                        name, is_folder = os.path.join(below, entry.name), False
                        with suppress(OSError):  # a link to itself
                            is_folder = entry.is_dir()
                        if not is_folder:
                            yield name
                        elif is_hidden(entry.name):
                            self.unused.add("hidden folders", as_text(name))
                        else:
                            (links if entry.is_symlink() else pending).append(name)
            except OSError as error:
                raise SourceError(
                    f"{error.filename!r} cannot be listed: {error.strerror}; fix its permissions or move it away"
                ) from error
            links.sort()
            if below and os.path.islink(whole := os.path.join(root, below)):
                self._links.append(f"the folder {as_text(below)} is a link to {as_text(os.path.realpath(whole))}")

    def _pictures(self, files: Iterable[bytes], beside: list[bytes]) -> Iterator[bytes]:
        """Yield the pictures among files; note the others, those in `beside` that may hold captions."""
        wanted = b"." + (self._caption or "").encode()
        for name in files:
            base, suffix = os.path.basename(name), os.path.splitext(name)[1].lower()
            if any(map(is_hidden, name.split(b"/"))):
                self.unused.add("hidden files", as_text(name))
            elif suffix in PICTURES or (not suffix and self._begins_as_a_picture(name)):
                yield name
            elif self._caption and (base in _METADATA_FILES if self._of_metadata else suffix == wanted):
                beside.append(name)
            else:
                kind = f"files that end in {as_text(suffix)}" if suffix else "files without a suffix, and no pictures"
                self.unused.add(kind, as_text(name), _cure(base, suffix))

    def _begins_as_a_picture(self, name: bytes) -> bool:
        if self.root.is_remote:
            return False  # each would take a request
        try:
            with open_regular(os.path.join(str(self.root), os.fsdecode(name))) as file:
                start = file.read(12)
        except OSError:
            return False
        is_webp = (start[:4], start[8:]) == (b"RIFF", b"WEBP")
        return start.startswith(_FIRST_BYTES) or start[4:] == b"ftypavif" or is_webp

    # Captions

    @property
    def _of_metadata(self) -> bool:
        return (self._caption or "").partition(":")[0] == METADATA

    def _texts_of(self, beside: list[bytes]) -> pa.LargeBinaryArray | None:
        """Return each picture's caption in the metadata; None if it stands in a file beside the picture."""
        if not self._of_metadata:
            wanted = {os.path.splitext(path)[0] for path in self._paths.to_pylist()}
            alone = [name for name in sorted(beside) if os.path.splitext(name)[0] not in wanted]
            if len(alone) == len(beside):
                raise SourceError(f"no file below {self.root} that ends in .{self._caption} has a picture of its name")
            for name in alone:
                self.unused.add(f"files that end in .{self._caption} without a picture", as_text(name))
            return None
        texts = dict[bytes, bytes]()
        for name in sorted(beside):
            for path, captions in _metadata(self.root, name, (self._caption or "").partition(":")[2], self.unused):
                texts[path] = BETWEEN_CAPTIONS.join([texts[path], captions]) if path in texts else captions
        if not beside:
            raise SourceError(f"{self.root} has neither metadata.csv nor metadata.jsonl")
        found = [texts.pop(path, None) for path in self._paths.to_pylist()]
        self.unused.add("rows of metadata without a picture", as_text(next(iter(texts), b"")), number=len(texts))
        return pa.array(found, pa.large_binary())

    def _captions_of(self, index: int, unchanged_since: int) -> tuple[str, ...]:
        if self._texts is not None:
            return caption_texts((self._texts[index].as_py() or b"").split(BETWEEN_CAPTIONS))
        name = os.path.splitext(self._path(index))[0] + f".{self._caption}".encode()
        try:
            return caption_texts(_text(self.root, name, unchanged_since).split(b"\n"))
        except BadSampleError as error:
            raise BadSampleError(f"caption {as_text(name)}: {error}") from error


def _objects_below(root: Address, versions: array[int]) -> Iterator[bytes]:
    """Yield the names of objects; append a digest of each picture's version to `versions`."""
    for path, size, tag in root.listing():
        name = path.encode()
        if os.path.splitext(name)[1].lower() in PICTURES and not any(map(is_hidden, name.split(b"/"))):
            versions.append(int.from_bytes(hashlib.blake2b(f"{size} {tag}".encode(), digest_size=8).digest()))
        yield name


def _cure(base: bytes, suffix: bytes) -> str:
    if base in _METADATA_FILES or suffix in _TEXTS:
        return f"--caption {METADATA if base in _METADATA_FILES else as_text(suffix[1:])}"
    if suffix in HEIC:
        return "pip install 'thermopile[heic]'"
    return "convert them to JPEG first" if suffix in _UNREAD else ""


def _text(root: Place, name: bytes, unchanged_since: int) -> bytes:
    """Return a file of captions. A link is refused: it could bring any text of this machine into the dataset."""
    if not root.is_remote and os.path.islink(os.path.join(os.fsencode(str(root)), name)):
        raise BadSampleError("a link, and captions are not read through links; replace it with its target")
    return read_picture(root, name, unchanged_since)


def _metadata(root: Place, name: bytes, column: str, unused: Account) -> Iterator[tuple[bytes, bytes]]:
    """Yield path and captions of each row of a metadata file; count the other columns.

    Raises SourceError if it has no such columns, or a row is malformed.
    """
    place, limit = f"{root}/{as_text(name)}", csv.field_size_limit(MAX_PICTURE_BYTES)  # the file's own limit
    try:
        text = _text(root, name, NEVER).decode("utf-8-sig")
        lines = filter(str.strip, text.split("\n"))  # JSON's texts may hold Unicode's other line breaks
        is_json = name.endswith(b".jsonl")
        reader = csv.DictReader(() if is_json else io.StringIO(text), strict=True)
        rows = [*map(json.loads, lines)] if is_json else [*reader]
        columns = dict.fromkeys(each for row in rows for each in row)
        chosen = next((each for each in ([column] if column else _TEXT_COLUMNS) if each in columns), None)
        if chosen is None or "file_name" not in columns:
            there = ", ".join(map(repr, columns)) or "none"
            named = f"one of {', '.join(_TEXT_COLUMNS)}, or the one that --caption {METADATA}:COLUMN names"
            raise SourceError(f"{place} needs the columns file_name and {named}; it has {there}")
        if twice := [each for each in ("file_name", chosen) if [*(reader.fieldnames or ())].count(each) > 1]:
            raise SourceError(f"{place} has more than one column {twice[0]!r}; rename or remove one")
        if None in columns:
            wide = next(row for row in rows if None in row)
            what = f"the row of {wide['file_name']!r} has more columns than the first line"
            raise SourceError(f"{place}: {what}; quote texts with commas")
        others = [each for each in columns if each not in ("file_name", chosen)]
        unused.add("columns of metadata", ", ".join(others), f"--caption {METADATA}:COLUMN", len(others))
        for row in rows:
            texts = found if isinstance(found := row.get(chosen), list) else [found]
            if wrong := [each for each in texts if not isinstance(each, str | None)]:
                raise SourceError(f"{place}: {chosen!r} of {row['file_name']!r} is {wrong[0]!r}, and not text")
            path = os.path.join(os.path.dirname(name), os.fsencode(row["file_name"]))
            yield os.path.normpath(path), BETWEEN_CAPTIONS.join((each or "").encode() for each in texts)
    except (BadSampleError, csv.Error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SourceError(f"{place} cannot be read: {type(error).__name__}: {error}") from error
    finally:
        csv.field_size_limit(limit)
