"""Group the members of a tar into samples, by WebDataset's rules."""

import json
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Self

from ..errors import BadSampleError, SourceError
from .tar_members import BrokenTarError, TarMember, members_of

_UNPACKED_BY = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}


MAX_MEMBER_BYTES = 256 << 20
"""Larger members are no photographs and no captions; a worker would hold the file and its unpacked picture."""


MAX_NAMED = 20


class SampleMember(NamedTuple):
    """A member of a sample."""

    at: TarMember
    data: bytes | None
    """None if it is not wanted, or above MAX_MEMBER_BYTES."""


class TarPart(NamedTuple):
    """Selects the member of a sample that holds its picture, caption or class."""

    suffixes: tuple[bytes, ...]
    field: str | None

    @classmethod
    def of(cls, option: str | None) -> Self:
        if option is not None and option.startswith("json:"):
            return cls((b"json",), option.removeprefix("json:"))
        return cls(tuple(suffix.lower().encode() for suffix in (option or "").split(";") if suffix), None)

    def member(self, members: dict[bytes, SampleMember]) -> SampleMember | None:
        return next((members[suffix] for suffix in self.suffixes if suffix in members), None)

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

    def fields_of(self, members: dict[bytes, SampleMember]) -> str:
        """Return words that name the fields of the sample's .json member; "" if it has none."""
        member = self.member(members)
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            if self.field is not None and member is not None:
                names = [*json.loads(member.data or b"")][:MAX_NAMED]
                return f"; the fields of its .json member: {', '.join(map(repr, names))}"
        return ""

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


def samples_of(
    read_at: Callable[[int, int], bytes],
    size: int,
    name: object,
    wanted: Container[bytes],
    start: int = 0,
    stop: int | None = None,
    *,
    last_dot: bool = False,
) -> Iterator[dict[bytes, SampleMember]]:
    """Yield the members by suffix of each sample of a tar of `size` bytes, reading it once and forward.

    name: the tar's, in errors. wanted: suffixes of the members to read. start, stop: begin and end there, both starts
    of samples. last_dot: as for key_and_suffix. Raises BrokenTarError after the samples before the damage, SourceError
    if the tar is compressed.
    """
    if not size:
        raise BrokenTarError("the file is empty")
    if not start:
        beginning = read_at(0, 8)
        for mark, cure in _UNPACKED_BY.items():
            if beginning.startswith(mark):
                raise SourceError(
                    f"{name} is compressed, so its members cannot be read one by one; run {cure} on it first"
                )

    def read(member: TarMember, suffix: bytes) -> SampleMember:
        is_read = suffix in wanted and member.size <= MAX_MEMBER_BYTES
        return SampleMember(member, read_at(member.offset, member.size) if is_read else None)

    return _samples(members_of(read_at, size, start, stop), read, last_dot)


def key_and_suffix(name: bytes, *, last_dot: bool = False) -> tuple[bytes, bytes]:
    """Split by WebDataset's rule: the key ends at the first dot of the base name. No suffix: not part of a sample.

    last_dot: it ends at the last one instead.
    """
    folder, slash, base = name.rpartition(b"/")
    stem, dot, suffix = base.rpartition(b".") if last_dot else base.partition(b".")
    stem, suffix = (stem, suffix) if dot else (base, b"")
    return folder + slash + stem, suffix.lower() if stem else b""


def _samples(
    members: Iterable[TarMember], read: Callable[[TarMember, bytes], SampleMember], last_dot: bool
) -> Iterator[dict[bytes, SampleMember]]:
    """Yield the members of each sample by suffix: consecutive members with the same key.

    A repeated suffix starts a new sample, even under the same key.
    """
    key, sample, broken = b"", dict[bytes, SampleMember](), None
    try:
        for member in members:
            prefix, suffix = key_and_suffix(member.name, last_dot=last_dot)
            top = member.name.partition(b"/")[0]
            if not suffix or (top.startswith(b"__") and top.endswith(b"__")):  # WebDataset's own metadata
                continue
            if sample and (prefix != key or suffix in sample):
                yield sample
                sample = {}
            key = prefix
            sample[suffix] = read(member, suffix)
    except BrokenTarError as error:
        broken = error
    if sample:
        yield sample
    if broken:
        raise broken
