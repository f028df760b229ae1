"""A csv or tsv file of image paths and captions, such as CC3M's lists after the download.

The list is kept in an Arrow file in TMPDIR, so that memory does not grow with it. A worker receives the rows of its
shard and never sees the list.
"""

import os
import unicodedata
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from ...storage.arrays import Int64s
from ...storage.files import NotRegularFileError
from ...storage.place import AnyPlace, Place, place_of
from ..errors import BadSampleError, SourceError
from . import NEVER, Account, BadSample, ClassGroups, Read, Sample, Source, Work
from .csv_rows import SCHEMA, Quoting, read_list
from .listing import OBJECT, as_text, caption_texts, estimated_bytes, groups_by_name, read_picture, resolved_text
from .source_file import SourceFile

_TRIED_PICTURES = 100
_WEB = (b"http://", b"https://")


class CsvSource(Source):
    """Rows are numbered from 0 below the header; rows with a wrong number of columns come last, as unreadable samples.

    The first line names the columns. separator: None for a tab if the file is a .tsv or its header has one, else a
    comma. quoting: "csv" or "none"; None decides by the whole file, and `notes` says what else it could mean. Paths are
    relative to root, by default the file's folder, or begin with file:// or ~; a file that is not found is looked for
    with slashes in place of backslashes, without surrounding blanks, and in Unicode's forms NFC and NFD.
    caption None: images only.
    Raises SourceError if the file is missing or empty, is no csv, lacks a column, has an unclosed quote or a row above
    MAX_ROW_BYTES, or too many rows are malformed.
    """

    kind = "csv"

    def __init__(
        self,
        file: AnyPlace,
        *,
        image: str = "filepath",
        caption: str | None = "title",
        group: str | None = None,
        separator: str | None = None,
        quoting: Quoting | None = None,
        root: AnyPlace | None = None,
    ) -> None:
        self.file = place_of(file)
        self.root = place_of(root or self.file.parent)
        self.mode = "images" if caption is None else "pairs"
        self._names = {"image": image, "caption": caption, "group": group}
        listing = read_list(opened_list(self.file), self._names, separator, quoting)
        self._rows, self._digest, self._quoting, self.notes, others = listing
        self.unused = Account()
        free = [f"--{option} NAME" for option in ("caption", "group") if not self._names[option]]
        self.unused.add("columns", ", ".join(others), " or ".join(free), len(others))
        self._sound = self._rows["problem"].null_count
        if not len(self):
            raise SourceError(f"{file} has a header but no rows")

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rows": SCHEMA.empty_table()}  # a worker gets those of its shard

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(index, self._row(index), NEVER)

    def _row(self, index: int) -> dict[str, bytes | None]:
        return dict(self._rows.slice(index, 1).to_pylist()[0])

    def _sample(self, index: int, row: dict[str, bytes | None], unchanged_since: int) -> Sample:
        if row["problem"] is not None:
            raise BadSampleError(row["problem"].decode())
        captions = self._captions(row["caption"]) if self.mode == "pairs" else (None,)
        picture, group = self._picture(row["image"] or b"", unchanged_since), as_text(row["group"] or b"") or None
        return Sample(as_text(row["image"] or b""), str(index), picture, captions[0], group, captions[1:])

    def _captions(self, raw: bytes | None) -> tuple[str, ...]:
        return caption_texts([raw])

    def _picture(self, name: bytes, unchanged_since: int) -> bytes:
        try:
            return read_picture(self.root, name, unchanged_since)
        except BadSampleError as error:
            if name.lstrip().lower().startswith(_WEB):
                raise BadSampleError("an address on the web; download the pictures with img2dataset first") from None
            if (other := self._on_disk(name)) == name:
                raise BadSampleError(f"{error}{self._near(name)}") from error
            return read_picture(self.root, other, unchanged_since)

    def _on_disk(self, name: bytes) -> bytes:
        """Return how the path is spelled on disk, or the path itself if it is not there or in an object store."""
        if self.root.is_remote or name.startswith(OBJECT):
            return name
        return next((each for each in _spellings(name) if self._is_there(each)), name)

    def _is_there(self, name: bytes) -> bool:
        return os.path.lexists(os.path.join(os.fsencode(str(self.root)), name))

    def _near(self, name: bytes) -> str:
        """Say what may be wrong with a path that is not there: not read is a file whose suffix differs in case, as it
        may be another picture."""
        stem, suffix = os.path.splitext(name)
        for other in (suffix.upper(), suffix.lower()):
            if other != suffix and not self.root.is_remote and self._is_there(stem + other):
                return f"; {as_text(stem + other)} exists: write the suffix in the list as it is on disk"
        return "; nor with slashes in place of its backslashes" if b"\\" in name else ""

    def _taken(self, indices: Int64s, columns: list[str] | None = None) -> pa.Table:
        """Return rows in the order of the indices. A table's own `take` would first copy the whole list."""
        from pyarrow.dataset import dataset  # late, since it imports pandas

        return dataset(self._rows).take(indices, columns=columns)

    def uri(self, index: int) -> str:
        return as_text(self._row(index)["image"] or b"")

    def work(self, indices: Int64s, unchanged_since: int = NEVER) -> Work:
        return Work(indices, unchanged_since, self._taken(indices))

    def read(self, work: Work) -> Iterator[Read]:
        for index, row in zip(work.indices.tolist(), work.rows.to_pylist(), strict=True):
            try:
                yield Read(index, self._sample(index, row, work.unchanged_since))
            except BadSampleError as error:
                yield Read(index, BadSample(as_text(row["image"]), str(index), str(error)))

    def groups(self) -> ClassGroups | None:
        return groups_by_name(self._rows["group"].chunks) if self._names["group"] else None

    def captions(self, indices: Int64s) -> Iterator[str]:
        if self.mode == "images":
            return
        for caption in self._taken(indices, ["caption"])["caption"].to_pylist():
            try:
                yield from self._captions(caption)
            except BadSampleError:
                continue

    def refuse_wrong_root(self) -> None:
        """Raise SourceError if none of some evenly spread pictures exists; in an object store, nothing is asked."""
        names = [self._path(index) for index in range(0, self._sound, max(1, self._sound // _TRIED_PICTURES))]
        if not names or any(name.startswith(OBJECT) for name in names):
            return
        if all(name.lower().startswith(_WEB) for name in names):
            listed = f"{self.file} lists addresses on the web, such as {as_text(names[0])}"
            cure = "first, and convert its tars with `thermopile convert webdataset`"
            raise SourceError(f"{listed}. Download the pictures with img2dataset {cure}")
        if not self.root.is_remote and not any(map(self._is_there, names)):
            path = os.fsdecode(os.path.join(os.fsencode(str(self.root)), names[0]))
            cure = f"paths in {self.file} are relative to its folder, or to the folder given by --root"
            tried = f"{len(names):,} pictures tried exists, such as {path}{self._near(names[0])}"
            raise SourceError(f"none of {tried}; {cure}")

    def stored_bytes(self) -> int | None:
        return estimated_bytes(self.root, self._path, self._sound) if self._sound else 0

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "file": resolved_text(self.file),
            "root": resolved_text(self.root),
            **self._names,
            **({"quoting": "none"} if self._quoting == "none" else {}),
            "listing": self._digest,
        }

    def marks(self) -> dict[str, str]:
        return {as_text(self.file.name): self._digest}

    def _path(self, index: int) -> bytes:
        """Return the path of a picture as it is spelled on disk."""
        return self._on_disk(self._row(index)["image"] or b"")


def _spellings(name: bytes) -> Iterator[bytes]:
    """Yield ways to spell a listed path, the first as it is listed."""
    yield name
    text = os.fsdecode(name).strip()
    if text.startswith(("file:///", "file://localhost/", "file:/")):
        text = unquote(urlsplit(text).path, errors="surrogateescape")
    for slashes in (text, text.replace("\\", "/")):
        path = os.path.expanduser(slashes)
        for spelling in (path, unicodedata.normalize("NFC", path), unicodedata.normalize("NFD", path)):
            yield os.fsencode(spelling)


def opened_list(file: Place) -> SourceFile:
    try:
        return SourceFile(file)
    except (NotRegularFileError, FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{file} is not a file; pass the csv or tsv file that lists the images") from None
