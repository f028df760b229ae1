"""A sample's bytes as conversion stored them, or why they are not: all readers of pictures and tokens go through here.

Compiled, so that a wait for a disk holds no lock. What is compared is the copy that is handed on: a file that changes
meanwhile changes nothing.
"""

import numpy as np
from numpy.typing import NDArray

from .checksum import xxh64
from .descriptor import read_at
from .jpeg_size import size_in_header
from .keyed import compiled

SOUND, UNREADABLE, CHANGED, OTHER_SIZE, TOKENS_CHANGED, NO_TOKEN, UNDECODABLE = range(7)
REASONS = {
    UNREADABLE: "cannot be read: its shard was cut short, or the disk fails",
    CHANGED: "changed after its conversion: the checksum of its picture does not match",
    OTHER_SIZE: "changed after its conversion: its JPEG's header says another height and width",
    TOKENS_CHANGED: "changed after its conversion: the checksum of its tokens does not match",
    NO_TOKEN: "changed after its conversion: it has a token beyond the vocabulary",
    UNDECODABLE: "does not decode: the file was damaged after its conversion",
}
"""What is wrong with a sample, in the words that follow its name."""

_SEED = np.uint64(0)


@compiled
def checksum(data: NDArray[np.uint8]) -> np.uint64:
    """What a record has for a JPEG's bytes or for those of its tokens, uint8 [any]."""
    return xxh64(data, _SEED)


@compiled
def fetch_jpeg(file: int, record: np.void, verified: bool, memory: NDArray[np.uint8]) -> int:
    """Read a JPEG into the beginning of `memory`, uint8 [record.jpeg_bytes or more]. Returns SOUND or what is wrong.

    file: descriptor of the .beton. record: one RECORD. verified: whether the record has checksums. Once it is SOUND,
    record.height and record.width, not 0, are those of the JPEG's own header.
    """
    jpeg = memory[: record.jpeg_bytes]
    if not read_at(file, np.int64(record.jpeg_at), jpeg):
        return UNREADABLE
    if verified and checksum(jpeg) != record.jpeg_checksum:
        return CHANGED
    height, width = size_in_header(jpeg)
    if height == 0 or width == 0 or height != record.height or width != record.width:
        return OTHER_SIZE
    return SOUND


@compiled
def fetch_tokens(
    file: int, record: np.void, verified: bool, vocab_size: int, tokens: NDArray[np.int32]
) -> int:  # fmt: skip
    """Read the tokens of a sample's first caption into int32 [L]. Returns SOUND or what is wrong; the rest as above."""
    if len(tokens) == 0:
        return SOUND
    all_tokens = np.empty((record.captions, len(tokens)), np.int32)
    data = all_tokens.reshape(-1).view(np.uint8)
    if not read_at(file, np.int64(record.tokens_at), data):
        return UNREADABLE
    if verified and checksum(data) != record.tokens_checksum:
        return TOKENS_CHANGED
    for place in range(len(tokens)):
        if not 0 <= all_tokens[0, place] < vocab_size:
            return NO_TOKEN
        tokens[place] = all_tokens[0, place]
    return SOUND


@compiled
def first_unsound(file: int, records: NDArray[np.void], vocab_size: int, context_length: int) -> tuple[int, int]:
    """Read every sample of RECORD [k]. Returns the first that is not as it was stored and what is wrong, or (k, SOUND).

    context_length: 0 without captions.
    """
    tokens = np.empty(context_length, np.int32)
    for row in range(len(records)):
        record = records[row]
        fault = fetch_jpeg(file, record, True, np.empty(record.jpeg_bytes, np.uint8))
        if fault == SOUND:
            fault = fetch_tokens(file, record, True, vocab_size, tokens)
        if fault != SOUND:
            return row, fault
    return len(records), SOUND
