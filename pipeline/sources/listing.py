"""Shared by sources: names and captions as text, classes, a digest that reveals changes, files with untrusted names.

Names are one pyarrow array, not Python objects, since 10⁷ names are sent to every worker.
"""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ...storage.arrays import Int64s
from ...storage.bucket import Address
from ...storage.bucket_errors import AddressError, ObjectStoreError, ObjectTooLargeError
from ...storage.files import NotRegularFileError, open_regular
from ...storage.place import AnyPlace, Place, common_folder, place_of
from ..errors import BadSampleError, SourceChangedError
from . import NEVER, Account, ClassGroups

MAX_CAPTION_BYTES = 1 << 20
"""Larger captions, classes and JSON members are refused."""
MAX_CAPTIONS = 64
"""More captions are refused: a run shows one per epoch, and such a long list is hardly one of captions."""
WHOLE = r"^(-?[0-9]+)\.0+$"
"""A whole number as pandas writes it in a column with gaps."""
BETWEEN_CAPTIONS = b"\xff"
"""Separates the captions of a picture in one value: a byte that UTF-8 never has."""
MAX_PICTURE_BYTES = 256 << 20
"""Larger files are no photographs; a worker would hold the file and its unpacked picture in memory."""
OBJECT = (b"s3://", b"gs://", b"az://")
"""How the address of an object begins."""
_SYSTEM = frozenset({b"@eaDir", b"__MACOSX", b"Thumbs.db", b"desktop.ini", b"$RECYCLE.BIN"})
"""Besides names that begin with a dot: what systems and tools leave in people's folders."""
_PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst")
_NETWORK_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""EIO is the error of a network disk mounted as "soft" while its server is unreachable."""


def says_nothing_about_the_file(error: Exception) -> bool:
    """Return whether a store or a network disk failed, or a store refused access: the file itself may be sound."""
    if isinstance(error, PermissionError):
        return error.errno is None  # a store's refusal; a local file's permissions concern that file alone
    is_ours = isinstance(error, OSError) and error.errno in _NETWORK_ERRORS | _OWN_LIMITS
    return is_ours or isinstance(error, ObjectStoreError)


def as_text(name: bytes | str | Path) -> str:
    """Decode a file name, which need not be UTF-8, for parquet and JSON, which require it."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def resolved_text(place: Place) -> str:
    """Return an absolute path without links, or an address."""
    return as_text(str(place.resolve()))


def caption_texts(raw: Sequence[bytes | str | None]) -> tuple[str, ...]:
    """Return the captions of a sample without surrounding white space, and without blank ones.

    Raises BadSampleError if no caption is left, there are more than MAX_CAPTIONS, or a caption is not UTF-8 or exceeds
    MAX_CAPTION_BYTES.
    """
    texts = tuple(text for text in map(_stripped, raw) if text)
    if not texts:
        raise BadSampleError("no caption; add one, or remove the sample")
    if len(texts) > MAX_CAPTIONS:
        raise BadSampleError(f"{len(texts):,} captions, above {MAX_CAPTIONS}; keep the best {MAX_CAPTIONS}")
    return texts


def _stripped(raw: bytes | str | None) -> str:
    if raw is not None and len(raw) > MAX_CAPTION_BYTES:
        raise BadSampleError(f"a caption or class of {len(raw):,} bytes, above {MAX_CAPTION_BYTES:,}")
    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw or ""
        text.encode()  # fails for half of a surrogate pair, which JSON can hold
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadSampleError(f"the caption or class is not UTF-8: {error.reason} at {error.start:,}") from error
    return text.strip()


def class_name(value: Any) -> str | None:
    """Return a class: text or a number, a whole one also as a float, which pandas makes it; alone or in a list of one.

    None if it is missing, NaN or empty, or a list of several. Raises BadSampleError for anything else.
    """
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if one is None or isinstance(one, list) or one != one:
        return None
    if isinstance(one, float | Decimal):  # 0.1 of 32 bits is "0.1", as csv has it
        one = int(one) if one % 1 == 0 else str(short if (short := np.float32(one)) == one else one)
    if not isinstance(one, str | int):
        kind = type(one).__name__
        raise BadSampleError(f"its class is a {kind}, not one text or number; --group '' leaves classes out")
    return re.sub(WHOLE, r"\1", _stripped(str(one))) or None


def if_any(class_of: Callable[..., str | None], *of: Any) -> str:
    """Return the class that `class_of` finds; empty if there is none, or it is refused."""
    with suppress(BadSampleError):
        return class_of(*of) or ""
    return ""


def is_hidden(name: bytes) -> bool:
    return name.startswith(b".") or name in _SYSTEM


def files_ending(names: Iterable[str], end: str, unused: Account) -> Iterator[str]:
    """Yield the names of a folder's files that end so; count the others, and hidden ones."""
    for name in names:
        suffix = os.path.splitext(name)[1].lower()
        if any(map(is_hidden, os.fsencode(name).split(b"/"))):
            unused.add("hidden files", as_text(name))
        elif suffix == end:
            yield name
        else:
            kind = f"files that end in {as_text(suffix)}" if suffix else "files or links without a suffix"
            unused.add(kind, as_text(name), "unpack them" if end == ".tar" and suffix in _PACKED else "")


def files_in(given: Iterable[AnyPlace], end: str, unused: Account) -> list[Place]:
    """Return the given files and those in the given folders that end so, sorted; count the folders' others."""
    found = set[Place]()
    for place in map(place_of, given):
        is_file = place.name.endswith(end) if place.is_remote else not place.is_folder()
        found |= {place} if is_file else {place / name for name in files_ending(place.files(), end, unused)}
    return sorted(found, key=str)


def real_root(files: Sequence[Place]) -> str:
    """Return the deepest folder, without links, or address that holds all files."""
    return as_text(common_folder([file.parent.resolve() for file in files]))


def names_below_common_folder(files: Sequence[Place]) -> list[str]:
    """Return file names relative to the deepest common folder or address."""
    absolute = [file.absolute() for file in files]
    common = common_folder([file.parent for file in absolute])
    return [as_text(os.path.relpath(str(file), common)) for file in absolute]


def binary_array(names: Iterable[bytes]) -> pa.LargeBinaryArray:
    """Collect names in one array, without a list of them all."""
    return pa.concat_arrays([pa.array([], pa.large_binary()), *binary_arrays(names)])


def binary_arrays(names: Iterable[bytes]) -> Iterator[pa.LargeBinaryArray]:
    """Yield names in arrays of a few thousand."""
    left = iter(names)
    while some := list(islice(left, 1 << 16)):
        yield pa.array(some, pa.large_binary())


def locate(first: Int64s, index: int) -> tuple[int, int]:
    """Return the part that holds an index, and the place in that part; first: prefix sums of the parts' sizes."""
    part = int(np.searchsorted(first, index, side="right")) - 1
    return part, index - int(first[part])


def groups_by_name(parts: Iterable[pa.LargeBinaryArray]) -> ClassGroups | None:
    """Return the classes, given the samples' class names in parts; empty names mean no class. None if all are empty.

    Needs the memory of one part and four bytes a sample.
    """
    numbers, encoded = dict[bytes, int](), [np.empty(0, np.int32)]
    for part in parts:
        names = part.dictionary_encode()
        places = [numbers.setdefault(name, len(numbers)) for name in names.dictionary.to_pylist()]
        encoded.append(np.array(places, np.int32)[names.indices.to_numpy()])
    texts = [as_text(name) for name in numbers]
    if texts in ([], [""]):
        return None
    numeric = all(text.isascii() and text.isdigit() and len(text) < 19 for text in texts if text)
    order = sorted(range(len(texts)), key=lambda i: (int(texts[i] or -1) if numeric else 0, texts[i]))
    place = np.empty(len(texts), np.int32)
    place[order] = np.arange(len(texts), dtype=np.int32)
    for codes in encoded:
        codes[:] = place[codes]
    return ClassGroups(tuple(texts[i] for i in order), np.concatenate(encoded))


def listing_digest(*columns: pa.LargeBinaryArray | NDArray[Any]) -> str:
    """Return the sha256 of the columns' values, independent of how the columns were built."""
    digest = hashlib.sha256()
    for column in columns:
        if isinstance(column, np.ndarray):
            digest.update(np.ascontiguousarray(column).data)
            continue
        _, ends, data = column.buffers()
        offsets = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
        digest.update(np.diff(offsets).data)
        digest.update(memoryview(data or b"")[offsets[0] : offsets[-1]])
    return digest.hexdigest()


def read_regular_file(path: bytes, unchanged_since: int = NEVER) -> bytes:
    """Return the bytes of a regular file with an untrusted name; links are followed.

    Raises BadSampleError for anything else, for unreadable files, and above MAX_PICTURE_BYTES; SourceChangedError if
    the file has changed since, see Work; OSError if a disk fails.
    """
    try:
        with open_regular(os.fsdecode(path)) as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_PICTURE_BYTES:
                raise BadSampleError(f"{size:,} bytes, too large for a picture")
            data = file.read(size)
            # Not st_mtime: copying tools such as rsync or tar mostly set it to the original's.
            if os.fstat(file.fileno()).st_ctime_ns > unchanged_since:
                raise SourceChangedError(as_text(path))
            return data
    except OSError as error:
        if says_nothing_about_the_file(error):
            raise
        if isinstance(error, NotRegularFileError) or error.errno == errno.ENXIO:  # a socket cannot even be opened
            raise BadSampleError("not a regular file") from None
        raise BadSampleError(f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a name with a zero byte
        raise BadSampleError(f"not the name of a file: {error}") from error


def read_picture(root: Place, name: bytes, unchanged_since: int) -> bytes:
    """Return the bytes of a picture, given its path below a root, or its own absolute path or address.

    Raises as read_regular_file; OSError also if the object store cannot be used or refuses access.
    """
    if not root.is_remote and not name.startswith(OBJECT):
        return read_regular_file(os.path.join(os.fsencode(str(root)), name), unchanged_since)
    try:
        text = name.decode()
        address = Address.parse(text if name.startswith(OBJECT) else f"{root}/{text}")
        data, found = address.read_described(MAX_PICTURE_BYTES)
        if found["last_modified"].timestamp() * 1e9 > unchanged_since:
            raise SourceChangedError(address)
        return data
    except (AddressError, UnicodeDecodeError) as error:
        raise BadSampleError(f"not the name of an object: {error}") from None
    except ObjectTooLargeError as error:
        raise BadSampleError(f"too large for a picture: {error}") from None
    except FileNotFoundError as error:
        raise BadSampleError(f"cannot be read: {error}") from error


def estimated_bytes(root: Place, name_of: Callable[[int], bytes], files: int) -> int | None:
    """Estimate the total size of files below a root from a thousand: asking for all takes minutes on a network disk.

    None in an object store, where even a thousand take long.
    """
    if root.is_remote:
        return None
    asked = np.unique(np.linspace(0, files - 1, min(files, 1000)).astype(np.int64))
    names = [name_of(index) for index in asked.tolist()]
    if any(name.startswith(OBJECT) for name in names):
        return None
    return round(sum(_size(os.path.join(os.fsencode(str(root)), name)) for name in names) * files / len(asked))


def _size(path: bytes) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):
        return 0
