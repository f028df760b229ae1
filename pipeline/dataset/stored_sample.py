"""Read the stored bytes of samples and verify them: all readers of pictures and tokens go through here.

Compiled, so that waiting for a disk does not hold the GIL. The returned copy is the one verified, so a file that
changes meanwhile does no harm.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...storage.kernels import kernel
from .jpeg_header import size_in_header
from .raw_bytes import Descriptor, read_at, xxh64

SOUND, UNREADABLE, CHANGED, OTHER_SIZE, TOKENS_CHANGED, NO_TOKEN, UNDECODABLE = range(7)
REASONS = {
    UNREADABLE: "cannot be read: its file was cut short or the disk is failing",
    CHANGED: "changed after its conversion: the checksum of its picture does not match",
    OTHER_SIZE: "changed after its conversion: its JPEG header has another height or width",
    TOKENS_CHANGED: "changed after its conversion: the checksum of its tokens does not match",
    NO_TOKEN: "changed after its conversion: it has a token beyond the vocabulary",
    UNDECODABLE: "does not decode: the file was damaged after its conversion",
}
"""Fault -> message, to follow the sample's name."""

_COLUMNS = {
    "jpeg_at": np.uint64,
    "jpeg_bytes": np.int64,
    "height": np.int64,
    "width": np.int64,
    "jpeg_checksum": np.uint64,
    "tokens_at": np.uint64,
    "captions": np.int64,
    "tokens_checksum": np.uint64,
}


class Located(NamedTuple):
    """Places of b stored samples, in a form that compiled code accepts."""

    files: NDArray[np.int64]
    """int64 [b]: file with each sample's tokens. At first its place: -1 for the .beton, else a tar's number, or below
    -1 a block of the cache; `open` replaces it by a descriptor."""
    jpeg_files: NDArray[np.int64]
    """int64 [b]: file with each picture, likewise."""
    vocab_size: int
    """Vocabulary size; 0 without captions."""
    tokens: NDArray[np.int32]
    """int32 [b, L], filled when the samples are read; L is 0 without captions."""
    caption: NDArray[np.int64]
    """int64 [b]: index of the caption whose tokens these are, 0 … captions - 1."""
    jpeg_at: NDArray[np.uint64]
    """uint64 [b]: offset in the picture's file. The next fields are columns of RECORD, [b] each."""
    jpeg_bytes: NDArray[np.int64]
    height: NDArray[np.int64]
    width: NDArray[np.int64]
    jpeg_checksum: NDArray[np.uint64]
    tokens_at: NDArray[np.uint64]
    captions: NDArray[np.int64]
    tokens_checksum: NDArray[np.uint64]

    @classmethod
    def of(
        cls,
        records: NDArray[np.void],
        tars: NDArray[np.int64] | None = None,
        *,
        file: int = -1,
        vocab_size: int = 0,
        context_length: int = 0,
    ) -> Self:
        """Return the places that RECORD [b] point to; the first captions' tokens are read if L > 0.

        tars: int64 [b], for the pictures; None if all is in `file`.
        """
        tokens, first = np.empty((len(records), context_length), np.int32), np.zeros(len(records), np.int64)
        columns: list[Any] = [records[name].astype(kind) for name, kind in _COLUMNS.items()]
        files = np.full(len(records), file)
        return cls(files, files.copy() if tars is None else tars, vocab_size, tokens, first, *columns)

    def open(self, shards: Sequence[int], file: Callable[[int, int], Descriptor], start: int = 0) -> list[Descriptor]:
        """Replace the places of the samples from `start` on, of these shards, by descriptors; return the files to keep.

        file: opens that of a shard and a place.
        """
        files = dict[tuple[int, int], Descriptor]()
        for column in (self.files, self.jpeg_files):
            places = [*zip(shards, column[start : start + len(shards)].tolist(), strict=True)]
            files |= {place: file(*place) for place in {*places} - files.keys()}
            column[start : start + len(shards)] = [files[place].number for place in places]
        return [*files.values()]


@kernel()
def fetch(located: Located, row: int, jpeg: NDArray[np.uint8]) -> int:
    """Read a sample's JPEG to the start of `jpeg`, uint8 [its bytes or more], and its tokens.

    Returns SOUND or the fault. If SOUND, height and width are not 0 and equal those in the JPEG's header.
    """
    jpeg = jpeg[: located.jpeg_bytes[row]]
    if not read_at(located.jpeg_files[row], np.int64(located.jpeg_at[row]), jpeg):
        return UNREADABLE
    if checksum(jpeg) != located.jpeg_checksum[row]:
        return CHANGED
    height, width = size_in_header(jpeg)
    if height == 0 or width == 0 or height != located.height[row] or width != located.width[row]:
        return OTHER_SIZE
    return _fetch_tokens(located, row)


@kernel()
def _fetch_tokens(located: Located, row: int) -> int:
    """Read the tokens of a sample's caption. Returns SOUND or the fault."""
    tokens = located.tokens[row]
    if len(tokens) == 0:
        return SOUND
    all_tokens = np.empty(located.captions[row] * len(tokens), np.int32)
    data = all_tokens.view(np.uint8)
    if not read_at(located.files[row], np.int64(located.tokens_at[row]), data):
        return UNREADABLE
    if checksum(data) != located.tokens_checksum[row]:
        return TOKENS_CHANGED
    first = located.caption[row] * len(tokens)
    for place in range(len(tokens)):
        if not 0 <= all_tokens[first + place] < located.vocab_size:
            return NO_TOKEN
        tokens[place] = all_tokens[first + place]
    return SOUND


@kernel()
def checksum(data: NDArray[np.uint8]) -> np.uint64:
    """Return the checksum that a record stores for JPEG or token bytes, uint8 [any]."""
    return xxh64(data, np.uint64(0))


@kernel()
def read_samples(
    located: Located, low: int, high: int, ends: NDArray[np.int64], jpegs: NDArray[np.uint8]
) -> tuple[int, int]:
    """Read the JPEGs of rows low … high - 1 into `jpegs`, uint8 [any], ending at `ends`, int64 [b], and their tokens.

    Returns the first damaged row and its fault, or (high, SOUND).
    """
    for row in range(low, high):
        fault = fetch(located, row, jpegs[ends[row] - located.jpeg_bytes[row] : ends[row]])
        if fault != SOUND:
            return row, fault
    return high, SOUND


@kernel()
def read_tokens(located: Located) -> tuple[int, int]:
    """Fill located.tokens. Returns the first damaged row and its fault, or (b, SOUND)."""
    for row in range(len(located.files)):
        fault = _fetch_tokens(located, row)
        if fault != SOUND:
            return row, fault
    return len(located.files), SOUND
