"""Group the members of a tar into samples and record their offsets."""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.lib import recfunctions as rf
from numpy.typing import NDArray

from ...storage.place import Place
from ..errors import BadSampleError, SourceError
from .listing import says_nothing_about_the_file
from .source_file import SourceFile, Version
from .tar_members import BrokenTarError, TarMember, regular_members

PLACE = np.dtype([("offset", "<i8"), ("size", "<i4")])
"""Location of a member in its tar; offset -1: the sample has none. Sizes are capped at 2 GB, which is too large."""
_UNPACKED_BY = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}


class TarPart(NamedTuple):
    """Selects the member of a sample that holds its picture, caption or class."""

    suffixes: tuple[bytes, ...]
    field: str | None

    @classmethod
    def of(cls, option: str | None) -> Self:
        if option is not None and option.startswith("json:"):
            return cls((b"json",), option.removeprefix("json:"))
        return cls(tuple(suffix.lower().encode() for suffix in (option or "").split(";") if suffix), None)

    def place(self, members: dict[bytes, TarMember]) -> tuple[int, int]:
        member = next((members[suffix] for suffix in self.suffixes if suffix in members), None)
        return (member.offset, min(member.size, 2**31 - 1)) if member else (-1, 0)

    def text(self, raw: bytes) -> bytes | str:
        """Return the member or its field, a list's first entry; empty if there is none."""
        if self.field is None:
            return raw
        value = self._field_of(raw)
        return self._as_text(value[0] if isinstance(value, list) and value else value)

    def texts(self, raw: bytes) -> list[bytes | str]:
        """Return the lines of the member, or the text or texts of its field."""
        if self.field is None:
            return [*raw.split(b"\n")]
        value = self._field_of(raw)
        if not isinstance(value, list):
            return [self._as_text(value)]
        for number, entry in enumerate(value, start=1):
            if entry is not None and not isinstance(entry, str):
                raise BadSampleError(
                    f"entry {number} of {self.field!r} of the .json member is a "
                    f"{type(entry).__name__}, not text; write it as a string"
                )
        return [entry or "" for entry in value]

    def _field_of(self, raw: bytes) -> Any:
        """Return the field's value, None if the member lacks it. Raises BadSampleError if the member is not JSON."""
        try:
            return json.loads(raw)[self.field]
        except (ValueError, TypeError, RecursionError) as error:
            raise BadSampleError(f"the .json member cannot be read: {error}") from error
        except KeyError:
            return None

    def _as_text(self, value: Any) -> str:
        if value is None or value == []:
            return ""
        if not isinstance(value, str | int):
            raise BadSampleError(f"{self.field!r} of the .json member is a {type(value).__name__}, not text")
        return str(value)


class Scan(NamedTuple):
    """The content of a tar shard; in a broken shard, the last sample represents the damage."""

    names: pa.LargeBinaryArray
    """Name of each sample's picture, or of its first member."""
    places: list[NDArray[np.void]]
    """PLACE [samples], for each part."""
    broken: str | None
    version: Version | None


def scan_shard(shard: Place, parts: Sequence[TarPart]) -> Scan:
    names: list[bytes] = []
    places = [array("q") for _ in parts]
    broken = version = None
    try:
        file = SourceFile(shard)
        version = file.version
        for members in _samples(_members(file)):
            found = [part.place(members) for part in parts]
            picture = (member.name for member in members.values() if member.offset == found[0][0])
            names.append(next(picture, next(iter(members.values())).name))
            for numbers, place in zip(places, found, strict=True):
                numbers.extend(place)
    except (BrokenTarError, OSError) as error:
        if says_nothing_about_the_file(error):
            raise
        broken = str(error)
        names.append(b"")
        for numbers in places:
            numbers.extend((-1, 0))
    found_at = [rf.unstructured_to_structured(np.array(part, np.int64).reshape(-1, 2), PLACE) for part in places]
    return Scan(pa.array(names, pa.large_binary()), found_at, broken, version)


def key_and_suffix(name: bytes) -> tuple[bytes, bytes]:
    """Split by WebDataset's rule: the key ends at the first dot of the base name. No suffix: not part of a sample."""
    folder, slash, base = name.rpartition(b"/")
    stem, _, suffix = base.partition(b".")
    return folder + slash + stem, suffix.lower() if stem else b""


def joined_places(places: list[NDArray[np.void]]) -> NDArray[np.void] | None:
    """Concatenate the places; None if no sample has this part."""
    joined = np.concatenate(places)
    return joined if (joined["offset"] >= 0).any() else None


def _members(file: SourceFile) -> Iterator[TarMember]:
    if not file.size:
        raise BrokenTarError("the file is empty")
    start = file.read(0, 8)
    for mark, cure in _UNPACKED_BY.items():
        if start.startswith(mark):
            raise SourceError(
                f"{file.place} is compressed, so its members cannot be read one by one; run {cure} on it first"
            )
    yield from regular_members(file.read, file.size)


def _samples(members: Iterable[TarMember]) -> Iterator[dict[bytes, TarMember]]:
    """Yield the members of each sample by suffix: consecutive members with the same key.

    A repeated suffix starts a new sample, even under the same key.
    """
    key, sample, broken = b"", dict[bytes, TarMember](), None
    try:
        for member in members:
            prefix, suffix = key_and_suffix(member.name)
            top = member.name.partition(b"/")[0]
            if not suffix or (top.startswith(b"__") and top.endswith(b"__")):  # WebDataset's own metadata
                continue
            if sample and (prefix != key or suffix in sample):
                yield sample
                sample = {}
            key = prefix
            sample[suffix] = member
    except BrokenTarError as error:
        broken = error
    if sample:
        yield sample
    if broken:
        raise broken
