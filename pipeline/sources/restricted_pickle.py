"""Reads a pickle of plain values and numpy arrays, as CIFAR's archives are, and runs nothing that the file names.

A pickle is a program: it names functions and calls them. Here every name but those of an array's parts is refused, and
those lead to records of what the file says, so that not even numpy's code meets a hostile value.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_OPCODES = 2_000_000
"""Objects are larger than the opcodes that make them; CIFAR-100's training set, the longest, has some 300,000."""
MAX_CONTAINERS = 1000
"""No value is nested more deeply than it has containers, and Python hashes a tuple by recursion in C, unbounded."""

_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_CONTAINERS = frozenset({
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "EMPTY_DICT", "DICT", "EMPTY_SET",
    "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST",
})  # fmt: skip
_LEAVES = frozenset({
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "GLOBAL", "STACK_GLOBAL",
})  # fmt: skip
"""What stands behind one of these in the memo holds nothing else. Numbers of up to four bytes are never there."""


def load_restricted(data: bytes) -> Any:
    """The value, with Python 2's strings read as latin-1 and a PickledArray for every array.

    Raises pickle.UnpicklingError for whatever is not such a pickle.
    """
    try:
        _refuse_unlike_cifar(data)
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a hostile pickle can make nearly anything fail
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


class PickledArray:
    """What a pickle says of a numpy array."""

    def __init__(self, *ignored: object) -> None:
        self._state: object = None

    def __setstate__(self, state: object) -> None:
        self._state = state

    def uint8(self) -> NDArray[np.uint8]:
        """The array. Raises ValueError where it is none of uint8 in C order."""
        match self._state:
            case (int(), tuple(shape), _PickledType(code="u1"), False | 0, bytes() | str() as data):
                raw = data.encode("latin1") if isinstance(data, str) else data
                if all(isinstance(side, int) for side in shape):
                    return np.frombuffer(raw, np.uint8).reshape(shape)
        raise ValueError("not an array of uint8 in C order")


class _PickledType:
    def __init__(self, code: object, *ignored: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and padding, which one byte does not have."""


class _Latin1:
    """Python 3 writes the bytes of an array so, where the pickle must be readable by Python 2."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"encodes as {encoding!r}")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        """Without it, a pickle could give this class attributes; with it, that fails for want of an object."""


_ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): _PickledType,
    ("_codecs", "encode"): _Latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed") from None


def _refuse_unlike_cifar(data: bytes) -> None:
    """Refuse what a few bytes could ask of the unpickler: memory without bound, endless recursion, endless time."""
    containers, before = 0, ""
    memo: dict[int, bool] = {}
    """Number → whether it is a leaf's."""
    for count, (opcode, number, _) in enumerate(pickletools.genops(data), start=1):
        containers += opcode.name in _CONTAINERS
        if count > MAX_OPCODES or containers > MAX_CONTAINERS:
            raise pickle.UnpicklingError(f"it makes more than {MAX_OPCODES:,} objects or {MAX_CONTAINERS:,} containers")
        if opcode.name in _PUTS:
            index = len(memo) if number is None else number
            # The unpickler's memo is as long as the largest number in it: ten bytes could ask for 64 GB.
            if not 0 <= index <= len(data):
                raise pickle.UnpicklingError(f"it uses memo index {index:,} in {len(data):,} bytes")
            memo[index] = before in _LEAVES
        # A tuple of twice the same tuple, forty times over, would be hashed for hours.
        elif opcode.name == "DUP" or (opcode.name in _GETS and not memo.get(number or 0, True)):
            raise pickle.UnpicklingError("it uses one container in two places")
        before = opcode.name
