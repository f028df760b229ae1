"""Named tensors as a safetensors file that is whole and on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..files import sync


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
        # Copied: a tensor that is mapped would keep the bytes of a file that is removed on the disk.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error
