"""Read the stored bytes of samples and verify them: all readers of pictures and tokens go through here.

Compiled, so that waiting for a disk does not hold the GIL. The returned copy is the one verified, so a file that
changes meanwhile does no harm.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from ...storage.arrays import Int32s, Int64s, Records, Uint8s, Uint64s
from ...storage.files import RegularFile
from ...storage.kernels import kernel
from .raw_bytes import read_at, xxh64

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
Opener = Callable[[int, int], RegularFile]
"""Opens the file of a shard and a place."""

_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_RST0, _RST7 = 0xD0, 0xD7
_SOF0, _SOF15 = 0xC0, 0xCF
_DHT, _JPG, _DAC = 0xC4, 0xC8, 0xCC
"""In the range of frame markers, but not frames."""

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

    files: Int64s
    """int64 [b]: file with each sample's tokens. At first its place: -1 for the .beton, else a tar's number, or below
    -1 a block of the cache; `open` replaces it by a descriptor."""
    jpeg_files: Int64s
    """int64 [b]: file with each picture, likewise."""
    vocab_size: int
    """Vocabulary size; 0 without captions."""
    tokens: Int32s
    """int32 [b, L], filled when the samples are read; L is 0 without captions."""
    caption: Int64s
    """int64 [b]: index of the caption whose tokens these are, 0 … captions - 1."""
    jpeg_at: Uint64s
    """uint64 [b]: offset in the picture's file. The next fields are columns of RECORD, [b] each."""
    jpeg_bytes: Int64s
    height: Int64s
    width: Int64s
    jpeg_checksum: Uint64s
    tokens_at: Uint64s
    captions: Int64s
    tokens_checksum: Uint64s

    @classmethod
    def of(
        cls,
        records: Records,
        tars: Int64s | None = None,
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

    def open(self, shards: Sequence[int], file: Opener, start: int = 0) -> list[RegularFile]:
        """Replace the places of the samples from `start` on, of these shards, by descriptors; return files to keep."""
        files = dict[tuple[int, int], RegularFile]()
        for column in (self.files, self.jpeg_files):
            places = [*zip(shards, column[start : start + len(shards)].tolist(), strict=True)]
            files |= {place: file(*place) for place in {*places} - files.keys()}
            column[start : start + len(shards)] = [files[place].number for place in places]
        return [*files.values()]


@kernel()
def fetch(located: Located, row: int, jpeg: Uint8s) -> int:
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
def checksum(data: Uint8s) -> np.uint64:
    """Return the checksum that a record stores for JPEG or token bytes, uint8 [any]."""
    return xxh64(data, np.uint64(0))


@kernel()
def read_samples(located: Located, low: int, high: int, ends: Int64s, jpegs: Uint8s) -> tuple[int, int]:
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


@kernel()
def size_in_header(jpeg: Uint8s) -> tuple[int, int]:
    """Return height and width in pixels of a JPEG, uint8 [any]; (0, 0) without a readable frame header.

    Source: ITU-T T.81, annex B; markers are searched for as libjpeg does.
    """
    end = len(jpeg)
    if end < 4 or jpeg[0] != 0xFF or jpeg[1] != _SOI:
        return 0, 0
    at = 2
    while True:
        while at < end and jpeg[at] != 0xFF:
            at += 1
        while at < end and jpeg[at] == 0xFF:
            at += 1
        if at + 3 > end:
            return 0, 0
        marker = jpeg[at]
        at += 1
        if marker in (0, _TEM) or _RST0 <= marker <= _RST7:
            continue  # standalone markers
        if marker in (_SOI, _EOI, _SOS):
            return 0, 0
        if _SOF0 <= marker <= _SOF15 and marker not in (_DHT, _JPG, _DAC):
            return (_two_bytes(jpeg, at + 3), _two_bytes(jpeg, at + 5)) if at + 7 <= end else (0, 0)
        length = _two_bytes(jpeg, at)
        if length < 2:
            return 0, 0
        at += length


@kernel()
def _two_bytes(data: Uint8s, at: int) -> Any:
    return np.int64(data[at]) << 8 | np.int64(data[at + 1])
