"""Read a sample's stored bytes and verify them: all readers of pictures and tokens go through here.

Compiled, so that waiting for a disk does not hold the GIL. The copy that is returned is the one that was verified, so
a file that changes meanwhile does no harm.
"""

import numpy as np
from numpy.typing import NDArray

from .checksum import xxh64
from .descriptor import read_at
from .jpeg_size import size_in_header
from .rng import compiled

SOUND, UNREADABLE, CHANGED, OTHER_SIZE, TOKENS_CHANGED, NO_TOKEN, UNDECODABLE = range(7)
REASONS = {
    UNREADABLE: "cannot be read: its shard was cut short or the disk is failing",
    CHANGED: "changed after its conversion: the checksum of its picture does not match",
    OTHER_SIZE: "changed after its conversion: its JPEG header has another height or width",
    TOKENS_CHANGED: "changed after its conversion: the checksum of its tokens does not match",
    NO_TOKEN: "changed after its conversion: it has a token beyond the vocabulary",
    UNDECODABLE: "does not decode: the file was damaged after its conversion",
}
"""Fault -> message, to follow the sample's name."""

_SEED = np.uint64(0)


@compiled
def checksum(data: NDArray[np.uint8]) -> np.uint64:
    """Return the checksum that a record stores for JPEG or token bytes, uint8 [any]."""
    return xxh64(data, _SEED)


@compiled
def fetch_jpeg(
    file: int, at: np.uint64, height: int | np.int64, width: int | np.int64, stored: np.uint64, verified: bool,
    jpeg: NDArray[np.uint8],
) -> int:  # fmt: skip
    """Read a JPEG of this height and width into `jpeg`, uint8 [bytes]. Returns SOUND or the fault.

    file: descriptor of the .beton. at: offset in it. stored: the checksum, if verified. If SOUND is returned, height
    and width are not 0 and equal those in the JPEG's header.
    """
    if not read_at(file, np.int64(at), jpeg):
        return UNREADABLE
    if verified and checksum(jpeg) != stored:
        return CHANGED
    found_height, found_width = size_in_header(jpeg)
    if found_height == 0 or found_width == 0 or found_height != height or found_width != width:
        return OTHER_SIZE
    return SOUND


@compiled
def fetch_tokens(
    file: int, at: np.uint64, captions: int | np.int64, stored: np.uint64, verified: bool, vocab_size: int,
    tokens: NDArray[np.int32],
) -> int:  # fmt: skip
    """Read the tokens of a sample's first caption, int32 [L]. Returns SOUND or the fault; otherwise as fetch_jpeg."""
    if len(tokens) == 0:
        return SOUND
    all_tokens = np.empty(captions * len(tokens), np.int32)
    data = all_tokens.view(np.uint8)
    if not read_at(file, np.int64(at), data):
        return UNREADABLE
    if verified and checksum(data) != stored:
        return TOKENS_CHANGED
    for place in range(len(tokens)):
        if not 0 <= all_tokens[place] < vocab_size:
            return NO_TOKEN
        tokens[place] = all_tokens[place]
    return SOUND


# For callers that are not compiled. When both kinds of callers shared a function, numba (0.68) once failed to find a
# signature in its own table while compiling a third one.


@compiled
def read_jpeg(
    file: int, at: np.uint64, height: int, width: int, stored: np.uint64, verified: bool, jpeg: NDArray[np.uint8]
) -> int:  # fmt: skip
    """fetch_jpeg for uncompiled callers."""
    return fetch_jpeg(file, at, np.int64(height), np.int64(width), stored, verified, jpeg)


@compiled
def read_tokens(
    file: int, at: np.uint64, captions: int, stored: np.uint64, verified: bool, vocab_size: int,
    tokens: NDArray[np.int32],
) -> int:  # fmt: skip
    """fetch_tokens for uncompiled callers."""
    return fetch_tokens(file, at, np.int64(captions), stored, verified, vocab_size, tokens)
