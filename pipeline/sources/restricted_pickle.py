"""Read a pickle of plain values and numpy arrays, such as CIFAR's, without running any function that it names.

A pickle is a program that names functions and calls them. Every name except those needed for arrays is refused, and
those are replaced by plain records, so that hostile values do not even reach numpy's code.
"""

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from ...storage.arrays import Uint8s

MAX_OPCODES = 2_000_000
"""Objects outnumber the opcodes that create them; the longest file, CIFAR-100's training set, has 300,000."""
MAX_CONTAINERS = 1000
"""Also bounds nesting: Python hashes a tuple by unbounded recursion in C."""

_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_CONTAINERS = frozenset({"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "EMPTY_DICT",
                         "DICT", "EMPTY_SET", "FROZENSET", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"})  # fmt: skip
_LEAVES = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
                     "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "INT", "LONG", "LONG1", "LONG4", "FLOAT",
                     "GLOBAL", "STACK_GLOBAL"})  # fmt: skip
"""Memo entries made by these opcodes contain no other object. Numbers of up to four bytes are never memoised."""


def load_restricted(data: bytes) -> Any:
    """Return the value, with Python 2 strings read as latin-1 and a PickledArray for every array.

    Raises pickle.UnpicklingError for any other pickle.
    """
    try:
        _refuse_unlike_cifar(data)
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a hostile pickle can fail in nearly any way
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


class PickledArray:
    """A pickle's description of a numpy array."""

    def __init__(self, *ignored: object) -> None:
        self._state: object = None

    def __setstate__(self, state: object) -> None:
        self._state = state

    def uint8(self) -> Uint8s:
        """Return the array. Raises ValueError unless it is uint8 in C order."""
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
        """Ignore byte order and padding, which do not apply to single bytes."""


class _Latin1:
    """Python 3's encoding of an array's bytes in pickles that Python 2 can read."""

    def __new__(cls, text: str, encoding: str) -> bytes:  # type: ignore[misc]
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"encodes as {encoding!r}")
        return text.encode("latin1")

    def __setstate__(self, state: object) -> None:
        """Fail when called on the class: without this, a pickle could set attributes on it."""


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
    """Refuse pickles whose few bytes demand unbounded memory, recursion or time."""
    containers, before = 0, ""
    memo: dict[int, bool] = {}
    """Memo index → whether it holds a leaf."""
    for count, (opcode, number, _) in enumerate(pickletools.genops(data), start=1):
        containers += opcode.name in _CONTAINERS
        if count > MAX_OPCODES or containers > MAX_CONTAINERS:
            raise pickle.UnpicklingError(f"it makes more than {MAX_OPCODES:,} objects or {MAX_CONTAINERS:,} containers")
        if opcode.name in _PUTS:
            index = len(memo) if number is None else number
            # The unpickler's memo is as long as its largest index: ten bytes could demand 64 GB.
            if not 0 <= index <= len(data):
                raise pickle.UnpicklingError(f"it uses memo index {index:,} in {len(data):,} bytes")
            memo[index] = before in _LEAVES
        # A tuple of the same tuple twice, nested forty times, would take hours to hash.
        elif opcode.name == "DUP" or (opcode.name in _GETS and not memo.get(number or 0, True)):
            raise pickle.UnpicklingError("it uses one container in two places")
        before = opcode.name
