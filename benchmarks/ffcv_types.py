"""FFCV's own Loader, without its change to a type that all compiled functions of a process share."""

from typing import Any

import numba as nb
import numpy as np
from ffcv.memory_managers.os_cache import OSCacheManager
from ffcv.pipeline.compiler import Compiler

_READ_ONLY = nb.types.Array(nb.uint8, 1, "C", readonly=True)


def leave_shared_types() -> None:
    """Let FFCV's OS cache describe its read-only file by a type of its own.

    It sets `mutable = False` on numba's one instance of uint8[::1] (ffcv 1.0.2, memory_managers/os_cache.py). From then
    on that type has another hash than in the tables of all functions compiled before, so that compiling a caller of
    theirs ends with a KeyError, and what is compiled is for read-only arrays, whatever its signature says.
    """
    OSCacheManager.state_type = property(_state_type)
    OSCacheManager.compile_reader = _compile_reader


def _state_type(_: OSCacheManager) -> Any:
    return nb.types.Tuple([_READ_ONLY, nb.uint64[::1], nb.uint64[::1]])


def _compile_reader(manager: OSCacheManager) -> Any:
    def read(address: Any, state: Any) -> Any:
        size = state[2][np.searchsorted(state[1], address)]
        return state[0][address : address + size]

    return Compiler.compile(read, _READ_ONLY(nb.uint64, manager.state_type))
