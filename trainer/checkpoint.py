"""The model's half of a checkpoint. Its other half, the samples' state, is the snapshot that it names.

checkpoints/step-N/ holds `training.pt` (tensors only: read without executing anything) and `checkpoint.json`;
checkpoints/latest names the newest whole one.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import re
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ValidationError

from ..files import read_regular, sync, write_atomically
from ..sealed_json import parse
from .errors import RunError

LATEST = "latest"
_INFO, _TENSORS = "checkpoint.json", "training.pt"
_NAME = re.compile(r"step-[0-9]+")

_log = logging.getLogger(__name__)


class CheckpointInfo(BaseModel, frozen=True, extra="forbid"):
    """checkpoint.json."""

    format: Literal[1] = 1
    step: int
    """Steps made when it was taken."""
    snapshot: str
    """Id of the snapshot of the samples' state taken at the same step boundary."""
    order_version: int
    """Version of the sample order that the step numbers refer to."""
    dataset_fingerprint: str


def save_checkpoint(folder: Path, info: CheckpointInfo, training: dict[str, Any]) -> Path:
    """Write checkpoints/step-N whole, then let `latest` name it. Replaces a directory of that name.

    Raises OSError where it cannot be written, and then leaves nothing of it on the disk.
    """
    final, building = folder / f"step-{info.step}", folder / f".step-{info.step}.partial"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    buffer = io.BytesIO()
    torch.save(training, buffer)
    try:
        write_atomically(building / _TENSORS, buffer.getvalue())
        write_atomically(building / _INFO, info.model_dump_json(indent=1).encode())
    except OSError:
        shutil.rmtree(building, ignore_errors=True)  # what filled the disk must not stay
        raise
    if final.exists():  # left by a run that was killed before `latest` named it
        _discard(final)
    os.rename(building, final)
    sync(folder)
    write_atomically(folder / LATEST, f"{final.name}\n".encode())
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    """The directory that `latest` names, without it the newest one, or None before the first checkpoint."""
    try:
        name = read_regular(folder / LATEST).decode(errors="replace").strip()
    except FileNotFoundError:
        # A kill before the first checkpoint was named, or a copy that missed the file: every step-N is whole.
        whole = checkpoints_in(folder)
        return whole[max(whole)] if whole else None
    if not _NAME.fullmatch(name):
        raise RunError(
            f"{folder / LATEST} says {name[:40]!r}, not step-N: write the name of a directory beside it there"
        )
    return folder / name


Loaded = tuple[Path, CheckpointInfo, dict[str, Any]]
"""A checkpoint's directory and what it holds."""


def load_latest(folder: Path, *, before: Path | None = None) -> Loaded | None:
    """The checkpoint that `latest` names, or the newest one before another, and what it holds; None where none is.

    Where it is damaged, a warning says so, and the newest one before it that is not is taken: its snapshot of the state
    is kept as long. Raises RunError, of the newest, where all are damaged.
    """
    newest = latest_checkpoint(folder) if before is None else _newest_before(folder, before)
    if newest is None:
        return None
    try:
        return newest, *load_checkpoint(newest)
    except RunError as error:
        try:
            found = load_latest(folder, before=newest)
        except RunError:
            found = None
        if found is None:
            raise RunError(f"{error} There is none before it that is whole; start anew, with another --out") from error
        _log.warning("%s Going on from step %d, the newest checkpoint that is whole.", error, found[1].step)
        return found


def _newest_before(folder: Path, other: Path) -> Path | None:
    earlier = {step: path for step, path in checkpoints_in(folder).items() if step < _step_of(other)}
    return earlier[max(earlier)] if earlier else None


def retained_steps(steps: Iterable[int], keep_last: int, keep_every: int) -> set[int]:
    """Of the steps of all snapshots those to keep: the newest `keep_last`, and those that `keep_every` divides."""
    ascending = sorted(steps)
    return {*ascending[-keep_last:], *(step for step in ascending if keep_every and step % keep_every == 0)}


def remove_checkpoints(folder: Path, *, keep: Container[int]) -> None:
    """Remove the checkpoints of steps not in `keep`, and what interrupted savings and removals left behind."""
    for step, path in checkpoints_in(folder).items():
        if step not in keep:
            _discard(path)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step → directory of every whole checkpoint, in no order."""
    return {_step_of(path): path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)}


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _discard(path: Path) -> None:
    """Remove a checkpoint, out of sight first: at no moment does half of one look whole."""
    hidden = path.with_name(f".{path.name}.discarded")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def load_checkpoint(path: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    """Read a checkpoint, its tensors on the CPU. Raises RunError where it is damaged."""
    try:
        info = CheckpointInfo.model_validate(parse(read_regular(path / _INFO)))
        training = torch.load(path / _TENSORS, map_location="cpu", weights_only=True)
    # Of the system's errors those that mean a hole; another, as of a network disk, may pass and is raised as it is.
    except (
        FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, ValidationError, RuntimeError, EOFError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise RunError(f"{path} is damaged ({reason}).") from error
    return info, training
