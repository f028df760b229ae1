"""Compile functions with numba, whose code is kept on disk for later processes where that is possible."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])
_njit: Any = njit  # its types, where numba ships some, know no options in a dict
_NOTHING_KEPT = "numba cannot keep compiled code, so starting takes longer; set NUMBA_CACHE_DIR to a writable directory"
_say_once = cache(print)


def kernel(*signature: str, **options: Any) -> Callable[[F], F]:
    """Return a decorator that compiles a function to run without the GIL. options: numba's.

    signature: types to compile for at import; without it, those of each call when they first occur.
    """

    def compiled(function: F) -> F:
        try:
            return cast(F, _njit(*signature, cache=True, nogil=True, **options)(function))
        except RuntimeError:  # no directory for the cache; any other error is raised again
            _say_once(_NOTHING_KEPT, file=sys.stderr)
            return cast(F, _njit(*signature, nogil=True, **options)(function))

    return compiled
