"""Compile functions with numba, whose code is kept on disk for later processes where that is possible."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])
_njit: Any = njit  # its types, where numba ships some, know no options in a dict


def kernel(*signature: str, **options: Any) -> Callable[[F], F]:
    """Return a decorator that compiles a function to run without the GIL.

    signature: types to compile for at import; by default, the function is compiled for each call's types when they
    first occur. options: numba's. If no directory for compiled code is writable, a line on stderr says so.
    """

    def compiled(function: F) -> F:
        try:
            return cast(F, _njit(*signature, cache=True, nogil=True, **options)(function))
        except RuntimeError:  # no directory for the cache; any other error is raised again
            _say_that_nothing_is_kept()
            return cast(F, _njit(*signature, nogil=True, **options)(function))

    return compiled


@cache
def _say_that_nothing_is_kept() -> None:
    """Print once that starting takes longer."""
    print("Neither the installation nor the home directory is writable, so numba compiles again at every start, which "
          "takes longer; set NUMBA_CACHE_DIR to a writable directory", file=sys.stderr, flush=True)  # fmt: skip
