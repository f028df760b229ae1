"""Shared by listings: names and captions as text, classes, and a digest that reveals changes.

Names are one pyarrow array, not Python objects, since 10⁷ of them are sent to every worker.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ..errors import BadSampleError
from . import Groups

MAX_TEXT_BYTES = 1 << 20
"""Larger captions, classes and JSON members are refused."""


def as_text(name: bytes) -> str:
    """Decode a file name, which need not be UTF-8, for parquet and JSON, which must be."""
    return name.decode("utf-8", "backslashreplace")


def caption_text(raw: bytes | str | None) -> str:
    """Return a caption without surrounding white space.

    Raises BadSampleError if there is none, it is not UTF-8, or it exceeds MAX_TEXT_BYTES.
    """
    if raw is not None and len(raw) > MAX_TEXT_BYTES:
        raise BadSampleError(f"a caption of {len(raw):,} bytes, above {MAX_TEXT_BYTES:,}")
    try:
        text = raw.decode("utf-8-sig") if isinstance(raw, bytes) else raw or ""
        text.encode()  # fails for half of a surrogate pair, which JSON can hold
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise BadSampleError(f"the caption is not UTF-8: {error.reason} at {error.start:,}") from error
    if not (text := text.strip()):
        raise BadSampleError("no caption")
    return text


def names_below_common_folder(files: Sequence[Path]) -> list[str]:
    """Return file names relative to the deepest common folder."""
    common = os.path.commonpath([file.parent.absolute() for file in files])
    return [as_text(os.fsencode(os.path.relpath(file.absolute(), common))) for file in files]


def groups_by_name(names: pa.LargeBinaryArray) -> Groups | None:
    """Return the classes by these names; empty names mean no class. None if all are empty."""
    encoded = names.dictionary_encode()
    texts = [as_text(name) for name in encoded.dictionary.to_pylist()]
    if texts in ([], [""]):
        return None
    numbers = all(text.isascii() and text.isdigit() and len(text) < 19 for text in texts if text)
    order = sorted(range(len(texts)), key=lambda i: (int(texts[i] or -1) if numbers else 0, texts[i]))
    place = np.empty(len(texts), np.int32)
    place[order] = np.arange(len(texts), dtype=np.int32)
    return Groups(tuple(texts[i] for i in order), place[encoded.indices.to_numpy()])


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
