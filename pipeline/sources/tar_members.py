"""Locate the regular files of a tar (ustar, pax and GNU headers) without unpacking it, and group them into samples.

Python's tarfile takes four times as long, which matters when converting a picture takes a millisecond. It also stops
silently at a damaged header and trusts headers on how much to read into memory. Samples follow WebDataset's rules.
"""

import json
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Self

from ..errors import BadSampleError, SourceError
from .listing import as_text, class_name

BLOCK = 512
_MAX_EXTENDED = 1 << 20
"""Limit in bytes of a long name or a pax header."""
_REGULAR, _LINKS = (b"0", b"\0", b"7"), (b"1", b"2")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices, folders and pipes, whatever size their header claims."""
_UNPACKED_BY = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
MAX_MEMBER_BYTES = 256 << 20
"""Larger members are no photographs and no captions; a worker would hold the file and its unpacked picture."""


class TarMember(NamedTuple):
    """A regular file in a tar, or a link. Its name is never used as a path."""

    name: bytes
    offset: int
    size: int
    start: int
    """Offset of the member's first header."""
    is_link: bool = False
    """Whether it is a hard or symbolic link, which has no bytes."""
    data: bytes | None = None
    """Its bytes, if it was read: not if nobody wants it, or above MAX_MEMBER_BYTES."""


Members = dict[bytes, TarMember]
"""The members of one sample, by suffix; then, by `/` and a number, those beside it that are part of no sample."""
ReadAt = Callable[[int, int], bytes]
"""Given an offset and a size, returns that part of the tar, fewer bytes at its end."""


class BrokenTarError(Exception):
    """The tar is truncated or damaged; the members yielded before are complete."""


def members_of(read_at: ReadAt, length: int, position: int = 0, stop: int | None = None) -> Iterator[TarMember]:
    """Yield the regular files and links of a tar of `length` bytes in order; sparse files are skipped.

    position, stop: where to begin, and where to end before the end mark; both are starts of members.
    Raises BrokenTarError if a header is damaged or the tar ends before its end mark.
    """
    start, extended = position, dict[bytes, bytes]()
    while position != stop and (header := read_at(position, BLOCK)) != bytes(BLOCK):
        size, kind = _size_and_kind(header, position)
        data = position + BLOCK
        if kind in (b"x", b"L"):
            extended |= _extended(kind, read_at(data, min(size, _MAX_EXTENDED)), size, position)
        elif kind not in (b"g", b"K"):
            size = int(extended.get(b"size", b"%d" % size)) if kind not in _WITHOUT_DATA else 0
            more = header[482:483] if kind == b"S" else b""
            while more not in (b"\0", b""):  # extra headers of GNU sparse files; each says whether another follows
                more = read_at(data, BLOCK)[504:505]
                data += BLOCK
            name = extended.get(b"path") or _name(header)
            if data + size > length:
                raise BrokenTarError(f"the archive is cut short after {length:,} bytes, in {name!r}")
            is_file = kind in _REGULAR and not name.endswith(b"/")
            if kind in _LINKS or (is_file and not any(key.startswith(b"GNU.sp") for key in extended)):
                yield TarMember(name, data, size, start, kind in _LINKS)
            extended = {}
        position = data + -(-size // BLOCK) * BLOCK
        start = start if extended else position


def _size_and_kind(header: bytes, position: int) -> tuple[int, bytes]:
    if len(header) < BLOCK:
        raise BrokenTarError(f"the archive is cut short after {position + len(header):,} bytes, without an end mark")
    try:
        told, size = _number(header[148:156]), _number(header[124:136])
    except ValueError:
        told, size = -1, -1
    if size < 0 or told != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise BrokenTarError(f"its header at byte {position:,} is damaged" if position else "not a tar archive")
    return size, header[156:157]


def _number(field: bytes) -> int:
    """Parse octal digits, or for large numbers a marker byte and a big-endian integer."""
    return int.from_bytes(field[1:]) if field[0] == 0x80 else int(field.partition(b"\0")[0].strip() or b"0", 8)


def _name(header: bytes) -> bytes:
    name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _extended(kind: bytes, text: bytes, size: int, position: int) -> dict[bytes, bytes]:
    """Parse an extended header, which describes the next member."""
    if len(text) < size:
        raise BrokenTarError(f"its header at byte {position:,} is cut short, or above {_MAX_EXTENDED:,} bytes")
    if kind == b"L":
        return {b"path": text.partition(b"\0")[0]}
    try:
        return dict(_pax_records(text))
    except ValueError as error:
        raise BrokenTarError(f"its header at byte {position:,} is damaged") from error


def _pax_records(text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield records of the form `length key=value` plus newline; the length counts all of it."""
    start = 0
    while start < len(text) and text[start]:
        space = text.index(b" ", start)
        end = start + int(text[start:space])
        key, _, value = text[space + 1 : end - 1].partition(b"=")
        if end <= space or (key == b"size" and not (value.isdigit() and len(value) < 20)):
            raise ValueError(f"record of {end - start} bytes")
        yield key, value
        start = end


class TarPart(NamedTuple):
    """Selects the member of a sample that holds its picture, caption or class."""

    suffixes: tuple[bytes, ...]
    field: str | None

    @classmethod
    def of(cls, option: str | None) -> Self:
        if option is not None and option.startswith("json:"):
            return cls((b"json",), option.removeprefix("json:"))
        return cls(tuple(suffix.lower().encode() for suffix in (option or "").split(";") if suffix), None)

    def member(self, members: Members) -> TarMember | None:
        return next((members[suffix] for suffix in self.suffixes if suffix in members), None)

    def class_name(self, raw: bytes) -> str | None:
        """Return the class that the member, or its field, names; None if there is none."""
        return class_name(as_text(raw) if self.field is None else self._field_of(raw))

    def texts(self, raw: bytes) -> list[bytes | str]:
        """Return the lines of the member, or the text or texts of its field."""
        if self.field is None:
            return [*raw.split(b"\n")]
        value = self._field_of(raw)
        entries = value if isinstance(value, list) else [str(value) if isinstance(value, int) else value]
        for number, entry in enumerate(entries, start=1):
            if entry is not None and not isinstance(entry, str):
                where, kind = f"entry {number} of {self.field!r} of the .json member", type(entry).__name__
                raise BadSampleError(f"{where} is a {kind}, not text; write it as a string")
        return [entry or "" for entry in entries]

    def fields_of(self, members: Members) -> str:
        """Return words that name the fields of the sample's .json member; "" if it has none."""
        member = self.member(members)
        with suppress(ValueError, TypeError, AttributeError, RecursionError):
            if self.field is not None and member is not None:
                names = [*json.loads(member.data or b"")][:20]
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


def key_and_suffix(name: bytes, *, last_dot: bool = False) -> tuple[bytes, bytes]:
    """Split by WebDataset's rule: the key ends at the first dot of the base name. No suffix: not part of a sample.

    last_dot: it ends at the last one instead. A name that begins with a dot has no suffix either way.
    """
    folder, slash, base = name.rpartition(b"/")
    stem, *suffix = base.rsplit(b".", 1) if last_dot else base.split(b".", 1)
    return folder + slash + stem, b"" if base.startswith(b".") else b"".join(suffix).lower()


def samples_of(
    read_at: ReadAt, size: int, name: object, wanted: Container[bytes], start: int, stop: int | None, *, last_dot: bool
) -> Iterator[Members]:
    """Yield the members by suffix of each sample of a tar of `size` bytes, reading it once and forward.

    A sample is consecutive members with the same key; a repeated suffix starts a new one, even under the same key.
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
                raise SourceError(f"{name} is compressed, so its members cannot be read one by one; run {cure} on it")

    key, sample, beside, broken = b"", Members(), Members(), None
    try:
        for member in members_of(read_at, size, start, stop):
            prefix, suffix = key_and_suffix(member.name, last_dot=last_dot)
            top = member.name.partition(b"/")[0]
            if top.startswith(b"__") and top.endswith(b"__"):  # WebDataset's own metadata
                continue
            if not suffix:
                beside[b"/%d" % len(beside)] = member
                continue
            if sample and (prefix != key or suffix in sample):
                yield sample | beside
                sample, beside = {}, {}
            key, is_read = prefix, suffix in wanted and member.size <= MAX_MEMBER_BYTES
            sample[suffix] = member._replace(data=read_at(member.offset, member.size)) if is_read else member
    except BrokenTarError as error:
        broken = error
    if sample:
        yield sample | beside
    if broken:
        raise broken
