"""The checkpoint that a person asks for by name, and what else there is where it cannot be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint import LATEST, CheckpointInfo, checkpoints_in, latest_checkpoint, load_checkpoint
from .errors import RunError
from .run_directory import RunDirectory


def find_checkpoint(run: RunDirectory, at: str) -> Path:
    """The checkpoint `latest` or step-N. Raises RunError where there is none, naming those that there are."""
    if at == LATEST:
        if (latest := latest_checkpoint(run.checkpoints)) is None:
            raise RunError(f"{run.path} has no checkpoint yet; wait for its first one")
        at = latest.name
    names = _names_in(run.checkpoints)
    if at not in names:
        raise RunError(f"{run.path} has no checkpoint {at!r}; there are: {', '.join(names) or 'none yet'}")
    return run.checkpoints / at


def load_found(checkpoint: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    """Read a checkpoint as load_checkpoint does. Raises RunError where it is damaged, naming the others."""
    try:
        return load_checkpoint(checkpoint)
    except RunError as error:
        others = [name for name in _names_in(checkpoint.parent) if name != checkpoint.name]
        if not others:
            raise
        raise RunError(f"{error} Take another with --at: {', '.join(others)}") from error


def _names_in(checkpoints: Path) -> list[str]:
    return [path.name for _, path in sorted(checkpoints_in(checkpoints).items()) if path.is_dir()]
