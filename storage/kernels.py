"""Compile functions with numba, and keep their machine code on disk for later processes.

numba's own cache is not used (0.68): two processes that compile two signatures of a function at the same moment may
give both the same file, and from then on every process runs the code of one for the other; it does not see that a
called function has changed; and it unpickles files of any owner. Here a file's name is a digest of all that its code
depends on, and only files that nobody else can have written are read.
"""

import hashlib
import os
import pickle
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from .files import user_cache

F = TypeVar("F", bound=Callable[..., object])
_njit: Any = numba.njit  # its types, where numba ships some, know no options in a dict
_VERSIONS = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
_MAX_BYTES = 64 << 20
_MAX_FILES = 1000
"""A conversion and a training of pictures leave 64 files. Of more than this, the oldest half goes."""
_TOLD_AFTER_SECONDS = 2.0
_said = set[str]()


def kernel(*signature: str, **options: Any) -> Callable[[F], F]:
    """Return a decorator that compiles a function to run without the GIL. options: numba's.

    signature: types to compile for at import; without it, those of each call when they first occur.
    The function may name numbers, arrays, other kernels, C functions and modules of other packages.
    """

    def compiled(function: F) -> F:
        dispatcher = _njit(nogil=True, **options)(function)
        dispatcher._cache = _KeptCode(dispatcher)
        for types in signature:
            dispatcher.compile(types)
        dispatcher.disable_compile(bool(signature))
        return cast(F, dispatcher)

    return compiled


class _KeptCode(NullCache):  # type: ignore[misc]
    """The machine code of one function on disk, a file for each signature."""

    _seconds, _now = 0.0, 0.0
    """What compiling has taken this process, and when numba last called one of these; it holds a lock meanwhile."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def load_overload(self, sig: Any, target_context: Any) -> CompileResult | None:
        """Return the kept code for a signature; None if there is none, or none that can be trusted."""
        target_context.refresh()
        with suppress(Exception):  # whatever is wrong with a file, its function can be compiled
            parts = pickle.loads(_read(self._name(sig, target_context)))
            # One of FFCV's classes changes types that all functions share (ffcv/memory_managers/os_cache.py); what was
            # compiled in such a process has other types than its name says.
            if parts[3].args == normalize_signature(sig)[0]:
                return CompileResult._rebuild(target_context, *parts)
        _KeptCode._now = time.monotonic()
        return None

    def save_overload(self, sig: Any, data: CompileResult) -> None:
        """Keep the code of a signature, unless it holds addresses of this process."""
        before, _KeptCode._now = self._now, time.monotonic()
        _KeptCode._seconds += self._now - before
        if self._seconds > _TOLD_AFTER_SECONDS:
            _say_once("Compiling kernels, once on this machine.")
        if data.library.has_dynamic_globals:
            return
        try:
            _write(self._name(sig, data.target_context), dumps(data._reduce()))
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            _say_once(
                "Compiled kernels cannot be kept, so each start takes longer; set NUMBA_CACHE_DIR to a folder that "
                "only you can write to",
                f": {error}",
            )

    def _name(self, sig: Any, target_context: Any) -> str:
        types, result = normalize_signature(sig)
        facts = [_VERSIONS, target_context.codegen().magic_tuple(), result, *map(_type_facts, types)]
        digest = hashlib.sha256(repr([*facts, _code_facts(self._dispatcher)]).encode())
        return f"{self._dispatcher.py_func.__name__}-{digest.hexdigest()}"


def _type_facts(kind: Any) -> list[Any]:
    """Describe a type: its name, and for a named tuple also its class, the names of its fields, and their types."""
    named = getattr(kind, "instance_class", None)
    return [str(kind), named, getattr(named, "_fields", None), *map(_type_facts, getattr(kind, "types", ()))]


def _code_facts(dispatcher: Dispatcher) -> list[Any]:
    """Describe a function and all that it calls: options, code, and the values of the globals that each names."""
    facts, left = dict[Dispatcher, list[Any]](), [dispatcher]
    while left:
        each = left.pop()
        if each not in facts:
            function, code = each.py_func, each.py_func.__code__
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            values = [*(function.__globals__[name] for name in code.co_names if name in function.__globals__), *cells]
            left += [value for value in values if isinstance(value, Dispatcher)]
            facts[each] = [function.__module__, function.__qualname__, each.targetoptions, code.co_code, code.co_consts]
            facts[each] += [code.co_names, code.co_varnames, *map(_value_facts, values)]
    return list(facts.values())


def _value_facts(value: Any) -> Any:
    """Describe the value of a global exactly, and equally in each process."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, Dispatcher):
        return value.py_func.__module__, value.py_func.__qualname__
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    return getattr(value, "key", value), getattr(value, "_fields", None)  # key: numba's description of a C function


def _read(name: str) -> bytes:
    """Return what was kept under a name. Raises OSError unless only this user, or root, can have written it."""
    with _folder() as folder:
        # O_NONBLOCK: opening a pipe that has no writer would block forever.
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(opened, "rb") as file:
        _refuse_foreign(opened, stat.S_IFREG, name)
        digest, data = file.read(32), file.read(_MAX_BYTES)
    if digest != _digest(name, data):
        raise OSError(f"{name} is damaged")
    return data


def _write(name: str, data: bytes) -> None:
    """Keep data under a name; readers see all of it or nothing. Raises OSError."""
    beside = f"{name}.{secrets.token_hex(8)}"
    with _folder() as folder:
        opened = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with os.fdopen(opened, "wb") as file:
                file.write(_digest(name, data) + data)
            os.replace(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(beside, dir_fd=folder)
            raise
        names = os.listdir(folder)
        if len(names) > _MAX_FILES:
            names.sort(key=lambda each: os.stat(each, dir_fd=folder, follow_symlinks=False).st_mtime)
            for old in names[: -_MAX_FILES // 2]:
                with suppress(FileNotFoundError):  # another process removes them too
                    os.unlink(old, dir_fd=folder)


def _digest(name: str, data: bytes) -> bytes:
    return hashlib.sha256(name.encode() + data).digest()


@contextmanager
def _folder() -> Iterator[int]:
    """Open this user's folder of kept code; make it if needed. Raises OSError, also if others may write to it."""
    path = Path(os.environ.get("NUMBA_CACHE_DIR") or user_cache()) / f"kernels-{os.geteuid()}"
    path.mkdir(0o700, parents=True, exist_ok=True)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_foreign(opened, stat.S_IFDIR, path)
        yield opened
    finally:
        os.close(opened)


def _refuse_foreign(opened: int, kind: int, name: object) -> None:
    """Raise PermissionError unless an open file is of this kind and nobody but this user, or root, can write to it."""
    found = os.fstat(opened)
    if stat.S_IFMT(found.st_mode) != kind or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise PermissionError(f"others can write to {name}")


def _say_once(text: str, why: str = "") -> None:
    """Print a line to stderr, for the first of the ranks on this machine, unless this process has done so."""
    if text not in _said and os.environ.get("LOCAL_RANK", "0") == "0":
        print(text + why, file=sys.stderr)
    _said.add(text)
