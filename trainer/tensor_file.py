"""Named tensors as a safetensors file that is whole and on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from ..files import open_regular, sync


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors of which no two share memory. Raises OSError where the disk does not take them."""
    try:
        save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes its files for their owner alone
    sync(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file into memory, on the CPU. Raises ValueError where it is no safetensors file, and OSError."""
    try:
        # Not mapped: a tensor would keep the bytes of a file that is removed on the disk.
        with open_regular(path) as file:
            return load(file.read())
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error
