"""WebDataset tar shards, such as img2dataset's: consecutive members with the same key are a sample.

The tars are scanned once, header by header; members are then read by offset. Nothing is unpacked to disk.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...storage.place import AnyPlace, Place, place_of
from ..errors import BadSampleError, SourceError
from . import Groups, Sample, Source, marks_of
from .listing import (
    MAX_CAPTION_BYTES,
    MAX_PICTURE_BYTES,
    as_text,
    binary_arrays,
    caption_texts,
    groups_by_name,
    listing_digest,
    locate,
    names_below_common_folder,
    real_root,
    says_nothing_about_the_file,
)
from .source_file import SourceFile, Version
from .tar_samples import TarPart, joined_places, key_and_suffix, scan_shard

OPEN_SHARDS = 64
_IMAGE, _CAPTION, _GROUP = range(3)


class WebDatasetSource(Source):
    """Lists the samples of all shards, in the order of the shards and of each tar.

    image: suffixes of pictures; a sample's first match is used. caption: suffixes of a text with one caption per line,
    or json:FIELD for a field of the .json member, a text or a list of texts; None for images only, which also applies
    if no sample has such a member. group: likewise; a sample without such a member has no class. A damaged or
    truncated shard gives the samples before the damage, plus one unreadable sample that says why. Calls on_progress
    with the number of shards scanned.
    Raises SourceError if there is no sample at all, and for a compressed tar.
    """

    def __init__(
        self,
        shards: Sequence[AnyPlace],
        *,
        image: str = "jpg;jpeg;png;webp",
        caption: str | None = "txt",
        group: str | None = "cls",
        on_progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        if not shards:
            raise SourceError("there are no tar files to read")
        self.shards = tuple(map(place_of, shards))
        self._options = {"image": image, "caption": caption, "group": group}
        self._parts = [TarPart.of(option) for option in (image, caption, group)]
        scans = []
        for done, shard in enumerate(self.shards, 1):
            scans.append(scan_shard(shard, self._parts))
            on_progress(done)
        self._names = pa.concat_arrays([scan.names for scan in scans])
        self._first = np.cumsum([0] + [len(scan.names) for scan in scans])
        self._places = [joined_places([scan.places[part] for scan in scans]) for part in (_IMAGE, _CAPTION, _GROUP)]
        self._broken = {int(self._first[i + 1]) - 1: scan.broken for i, scan in enumerate(scans) if scan.broken}
        if len(self) == len(self._broken):
            reason = next(iter(self._broken.values()), "it is empty")
            raise SourceError(f"no sample in {len(shards):,} tars; the first, {shards[0]}: {reason}")
        self.mode = "images" if self._places[_CAPTION] is None else "pairs"
        self._shard_names = names_below_common_folder(self.shards)
        self._files = _OpenFiles(self.shards, tuple(scan.version for scan in scans))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Sample:
        if index in self._broken:
            raise BadSampleError(self._broken[index])
        picture = self._member(_IMAGE, index, MAX_PICTURE_BYTES)
        if picture is None:
            raise BadSampleError(f"no picture: no member of this key ends in {self._options['image']}")
        caption, *further = self._captions_of(index) if self.mode == "pairs" else (None,)
        return Sample(self.uri(index), self.key(index), picture, caption, self._group_of(index) or None, tuple(further))

    def uri(self, index: int) -> str:
        shard = self._shard_names[locate(self._first, index)[0]]
        return shard if index in self._broken else f"{shard}/{as_text(self._names[index].as_py())}"

    def key(self, index: int) -> str:
        return as_text(key_and_suffix(self._names[index].as_py())[0])

    def groups(self) -> Groups | None:
        if self._places[_GROUP] is None:
            return None
        return groups_by_name(binary_arrays(self._group_or_none(index) for index in range(len(self))))

    def captions(self, indices: NDArray[np.int64]) -> Iterator[str]:
        if self.mode != "pairs":
            return
        for index in np.sort(indices).tolist():  # in tar order
            try:
                yield from self._captions_of(index)
            except BadSampleError:
                continue

    def stored_bytes(self) -> int:
        pictures = self._places[_IMAGE]
        return 0 if pictures is None else int(pictures["size"].sum(dtype=np.int64))

    def describe(self) -> dict[str, Any]:
        places = [places for places in self._places if places is not None]
        return {
            "kind": "webdataset",
            "root": real_root(self.shards),
            "shards": len(self.shards),
            **self._options,
            "listing": listing_digest(self._names, self._first, *places),
        }

    def marks(self) -> dict[str, str]:
        return marks_of(self._shard_names.__getitem__, self._files.versions)

    def _member(self, part: int, index: int, most: int) -> bytes | None:
        """Return the bytes of a part's member; None if the sample has none."""
        places = self._places[part]
        if places is None or places[index]["offset"] < 0:
            return None
        offset, size = places[index].tolist()
        if size > most:
            raise BadSampleError(f"a member of {size:,} bytes, above {most:,}")
        return self._files.read(locate(self._first, index)[0], offset, size)

    def _captions_of(self, index: int) -> tuple[str, ...]:
        raw = self._member(_CAPTION, index, MAX_CAPTION_BYTES)
        return caption_texts([] if raw is None else self._parts[_CAPTION].texts(raw))

    def _group_of(self, index: int) -> str:
        """Return the class, empty if the sample has none."""
        raw = self._member(_GROUP, index, MAX_CAPTION_BYTES)
        text = "" if raw is None else self._parts[_GROUP].text(raw)
        return (as_text(text) if isinstance(text, bytes) else text).strip()

    def _group_or_none(self, index: int) -> bytes:
        try:
            return self._group_of(index).encode()
        except BadSampleError:
            return b""


class _OpenFiles:
    """Random reads from many files; each process keeps the most recently used files open."""

    def __init__(self, paths: tuple[Place, ...], versions: tuple[Version | None, ...]) -> None:
        self._paths, self.versions = paths, versions
        self._open: OrderedDict[int, SourceFile] = OrderedDict()

    def read(self, file: int, offset: int, size: int) -> bytes:
        try:
            if file not in self._open:
                self._open[file] = SourceFile(self._paths[file], self.versions[file])
            self._open.move_to_end(file)
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
            return self._open[file].read(offset, size)
        except OSError as error:
            if says_nothing_about_the_file(error):
                self._open.pop(file, None)  # a retry needs a new descriptor
                raise
            raise BadSampleError(f"the archive cannot be read: {error.strerror or error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _OpenFiles, (self._paths, self.versions)
