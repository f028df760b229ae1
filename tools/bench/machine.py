"""The machine that a figure was measured on, and what it has left."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...pipeline.cores import cores


def describe_machine(*packages: str) -> dict[str, Any]:
    """CPU model, cores that this process may use, RAM in bytes, versions of these packages, and the GPU or none."""
    import torch

    return {
        "cpu": _lines("/proc/cpuinfo").get("model name", "unknown"),
        "cores": cores(),
        "ram_bytes": _kibibytes("/proc/meminfo", "MemTotal"),
        **{name: version(name) for name in packages},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def free_memory() -> int:
    """Bytes of RAM that can be had without swapping."""
    return _kibibytes("/proc/meminfo", "MemAvailable")


def free_disk(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def memory_in_use() -> int:
    """Bytes of RAM that this process has now: VmRSS."""
    return _kibibytes("/proc/self/status", "VmRSS")


def peak_memory() -> int:
    """Most bytes of RAM that this process ever had, or had since reset_peak_memory(): VmHWM."""
    return _kibibytes("/proc/self/status", "VmHWM")


def anonymous_memory() -> int:
    """Bytes of RAM that this process has now beside mapped files: RssAnon."""
    return _kibibytes("/proc/self/status", "RssAnon")


def peak_anonymous_memory() -> int:
    """Most bytes that this process had since reset_peak_memory(), less the mapped files that it has in RAM now."""
    return peak_memory() - memory_in_use() + anonymous_memory()


def reset_peak_memory() -> None:
    """Let peak_memory() count from what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")


def disk_used(directory: Path) -> int:
    """Bytes that the files below `directory` take up on the disk."""
    used = 0
    for folder, _, files in os.walk(directory):
        used += sum(os.stat(os.path.join(folder, name)).st_blocks * 512 for name in files)
    return used


def _kibibytes(file: str, key: str) -> int:
    return int(_lines(file)[key].removesuffix("kB")) * 1024


def _lines(file: str) -> dict[str, str]:
    """The lines `key: value` of a file of /proc; the first of a key counts."""
    pairs = (line.split(":", 1) for line in Path(file).read_text().splitlines() if ":" in line)
    found: dict[str, str] = {}
    for key, value in pairs:
        found.setdefault(key.strip(), value.strip())
    return found
