"""The machine that a figure was measured on."""

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...pipeline.cores import cores


def describe_machine(*packages: str) -> dict[str, Any]:
    """Return CPU model, cores this process may use, RAM in bytes, the GPU or None, and the versions of `packages`."""
    import torch

    cpu = re.search("model name.*:(.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1].strip() if cpu else "unknown",
        "cores": cores(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def words_of(machine: dict[str, Any]) -> str:
    """Return what describe_machine found, in one line."""
    versions = (f"{name} {machine[name]}" for name in machine if name not in ("cpu", "cores", "ram_bytes", "gpu"))
    host = f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 1e9:,.0f} GB"
    return f"{host}, GPU: {machine['gpu'] or 'none'}; {', '.join(versions)}"
