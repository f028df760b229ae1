"""One part of a command, measured in its own process and directory, if the machine has room for it."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from .isolated import run_isolated
from .machine import free_disk, free_memory, peak_memory
from .measured import Measured

_SPARE_MEMORY = 10**9
"""Bytes for torch and the rest of the process, beside what is measured."""
_SPARE_DISK = 10**8


class NoRoomError(Exception):
    """The machine has too little memory or disk left for a part."""


class PartSizes(Protocol):
    """How much a part measures."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def disk_bytes(self) -> int: ...


def measure_part(module: str, sizes: PartSizes, directory: Path | None, *, cure: str) -> Measured:
    """Call `measure(sizes, temporary)` of a module of this package; `temporary`, in `directory` if given, is gone
    when this returns or is interrupted.

    cure: how the caller can ask for less. Raises NoRoomError, EndedWithoutAWordError, and what the part raises.
    """
    with TemporaryDirectory(prefix="thermopile-bench-", dir=directory) as temporary:
        check_room(sizes, memory=free_memory(), disk=free_disk(Path(temporary)), cure=cure)
        return run_isolated(_measure_here, module, sizes, Path(temporary))


def check_room(sizes: PartSizes, *, memory: int, disk: int, cure: str) -> None:
    """Raise NoRoomError, with what is needed and what is left, where the part would not fit."""
    for what, needed, left in (
        ("memory", sizes.memory_bytes + _SPARE_MEMORY, memory),
        ("disk", sizes.disk_bytes + _SPARE_DISK, disk),
    ):
        if needed > left:
            raise NoRoomError(
                f"it needs {needed / 1e9:,.1f} GB of {what}, but {left / 1e9:,.1f} GB are free; {cure}"
                + (", or choose another --dir" if what == "disk" else "")
            )


def _measure_here(module: str, sizes: PartSizes, directory: Path) -> Measured:
    began = time.monotonic()
    measured: Measured = import_module(f".{module}", __package__).measure(sizes, directory)
    return replace(measured, seconds=time.monotonic() - began, peak_bytes=peak_memory())
