"""The machine that a figure was measured on."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ...pipeline.cores import cores


def describe_machine(*packages: str) -> dict[str, Any]:
    """Return CPU model, cores this process may use, RAM in bytes, the GPU or None, and the versions of `packages`."""
    import torch

    return {
        "cpu": _lines("cpuinfo").get("model name", "unknown"),
        "cores": cores(),
        "ram_bytes": proc_bytes("meminfo", "MemTotal"),
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
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 1e9:,.0f} GB, "
        f"GPU: {machine['gpu'] or 'none'}; {', '.join(versions)}"
    )


def proc_bytes(file: str, key: str) -> int:
    """Return the value of `key` in /proc/`file`, which counts in kB."""
    return int(_lines(file)[key].removesuffix("kB")) * 1024


def _lines(file: str) -> dict[str, str]:
    """Return the lines `key: value` of a file of /proc; the first of a key counts."""
    lines = Path("/proc", file).read_text().splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
