"""Read a file at random and checksum the bytes, also from compiled code, at memory speed, without the GIL.

XXH64 detects damage, not forgery. Source: Yann Collet, xxHash fast digest algorithm, version 0.1.1, section "XXH64".
"""

from typing import Any

import numpy as np
from numba import types

from ...storage.arrays import Uint8s
from ...storage.kernels import kernel

_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_S29, _S32, _S33 = np.uint64(29), np.uint64(32), np.uint64(33)

# The C library's pread returns an error if the file shrinks or the disk fails; a memory map would raise a signal that
# kills the process.
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uint64, types.uint64, types.int64))


def writable(data: bytes) -> Uint8s:
    """Copy bytes into a writable array, uint8 [n], the type that loaders pass to compiled functions.

    So each function is compiled for one type of array, which saves seconds of a first start.
    """
    return np.frombuffer(bytearray(data), np.uint8)


@kernel()
def read_at(file: int, at: int | np.int64, memory: Uint8s) -> bool:
    """Fill memory, uint8 [any], contiguous, with the file's bytes from `at`. Returns whether all were read."""
    done, refused = 0, 0
    while done < len(memory):
        rest = memory[done:]
        came = _pread(np.int32(file), np.uint64(rest.ctypes.data), np.uint64(len(rest)), np.int64(at + done))
        refused += came < 0
        if came == 0 or refused > 3:  # a signal may interrupt a read, above all on a network disk
            return False
        done += max(came, 0)
    return True


@kernel()
def xxh64(data: Uint8s, seed: np.uint64) -> np.uint64:
    """Return XXH64 of bytes, uint8 [any], contiguous in memory."""
    size = len(data)
    words = data[: size // 8 * 8].view(np.uint64)
    stripes = size // 32
    if stripes:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        for k in range(0, 4 * stripes, 4):
            a, b = _round(a, words[k]), _round(b, words[k + 1])
            c, d = _round(c, words[k + 2]), _round(d, words[k + 3])
        total = _turned(a, 1) + _turned(b, 7) + _turned(c, 12) + _turned(d, 18)
        for lane in (a, b, c, d):
            total = (total ^ _round(np.uint64(0), lane)) * _P1 + _P4
    else:
        total = seed + _P5
    total += np.uint64(size)
    for k in range(4 * stripes, len(words)):
        total = _turned(total ^ _round(np.uint64(0), words[k]), 27) * _P1 + _P4
    at = 8 * len(words)
    if size - at >= 4:
        half = np.uint64(0)
        for k in range(4):
            half |= np.uint64(data[at + k]) << np.uint64(8 * k)
        total = _turned(total ^ half * _P1, 23) * _P2 + _P3
        at += 4
    for k in range(at, size):
        total = _turned(total ^ np.uint64(data[k]) * _P5, 11) * _P1
    total = (total ^ (total >> _S33)) * _P2
    total = (total ^ (total >> _S29)) * _P3
    return total ^ (total >> _S32)


@kernel()
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _turned(lane + word * _P2, 31) * _P1


@kernel(inline="always")  # it would be compiled once for each number of bits
def _turned(x: np.uint64, by: int) -> np.uint64:
    return (x << np.uint64(by)) | (x >> np.uint64(64 - by))
