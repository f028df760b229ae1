"""Checkpoints on disk: the model's part. The snapshot that a checkpoint names holds the samples' state.

checkpoints/step-N/ holds `tensors.safetensors`, `training.json`, which gives each tensor's place, and
`checkpoint.json`, with the digests of both and its own checksum. checkpoints/latest names the newest checkpoint.

A checkpoint appears whole. In a bucket, writing checkpoint.json completes it, and its name ends in the writer's term.
"""

import errno
import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, NonNegativeInt

from ...storage.bucket_errors import is_away
from ...storage.files import read_regular, sha256_of, write_atomically
from ...storage.place import Place, duplicate, steps_in
from ...storage.sealed_json import DamagedJSONError, parse, seal_document, unseal
from ...storage.step_folders import step_of
from ..errors import DamagedCheckpointError, RunError, one_line

FORMAT: Final = 2
LATEST = "latest"
INFO, _TENSORS, _REST = "checkpoint.json", "tensors.safetensors", "training.json"
_FILES = (_TENSORS, _REST, INFO)

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, None}
"""Errors that mean a missing or wrong file; others, such as a network disk's, may be temporary."""

_log = logging.getLogger(__name__)


class FileDigest(BaseModel, frozen=True, extra="forbid"):
    """Size and digest of a file when it was written."""

    bytes: NonNegativeInt
    sha256: str


class CheckpointInfo(BaseModel, frozen=True, extra="forbid"):
    """Content of checkpoint.json."""

    format: Literal[2] = FORMAT
    step: NonNegativeInt
    """Steps completed at the checkpoint."""
    snapshot: str
    """Id of the state snapshot taken at the same step boundary."""
    order_version: int
    """Version of the sample order that the step numbers refer to."""
    dataset_fingerprint: str
    settings: dict[str, Any]
    """The run's resolved settings at that step, as in config.toml."""
    files: dict[str, FileDigest] = {}
    """Digests of the other files by name, filled in by `save_checkpoint`."""


def save_checkpoint(folder: Place, info: CheckpointInfo, training: dict[str, Any]) -> Place:
    """Write checkpoints/step-N atomically, then update `latest`. Replaces an existing checkpoint of that step.

    training: CPU tensors and plain values, as a tensor tree. Raises OSError, and then leaves nothing on disk.
    """
    final = steps_in(folder, _FILES).save(info.step, lambda building: _write(building, info, training))
    (folder / LATEST).rewrite(f"{final.name}\n".encode())
    return final


def _write(building: Path, info: CheckpointInfo, training: dict[str, Any]) -> None:
    from .tensors import save_tensors, take_apart

    tensors, rest = take_apart(training)
    save_tensors(building / _TENSORS, tensors)
    write_atomically(building / _REST, json.dumps(rest, indent=1, allow_nan=False).encode())
    made = building / _TENSORS, building / _REST
    files = {each.name: FileDigest(bytes=each.stat().st_size, sha256=sha256_of(each)) for each in made}
    write_atomically(building / INFO, seal_document(info.model_copy(update={"files": files}).model_dump()))


def fork_checkpoint(path: Place, info: CheckpointInfo, settings: dict[str, Any], folder: Place) -> Place:
    """Make another run's checkpoint the first one of a run with these settings, in its `checkpoints`, and return it.

    Tensors and their tree are linked where they can be, since nothing changes them in place. Raises OSError.
    """
    made = folder / f"step-{info.step}"
    made.make()
    for name in (_TENSORS, _REST):
        duplicate(path / name, made / name)
    (made / INFO).rewrite(seal_document(info.model_copy(update={"settings": settings}).model_dump()))
    (folder / LATEST).rewrite(f"{made.name}\n".encode())
    return made


def load_checkpoint(path: Place) -> tuple[CheckpointInfo, dict[str, Any]]:
    """Read a checkpoint, with its tensors on the CPU. Verifies each digest before parsing.

    Raises DamagedCheckpointError, and RunError as `read_info`.
    """
    from .tensors import join, load_tensors

    info = read_info(path)
    with _damage_of(path), path.on_this_machine((_TENSORS, _REST)) as local:
        for name in (_TENSORS, _REST):
            if (written := info.files.get(name)) is None:
                raise ValueError(f"{INFO} does not list {name}")
            if (have := (local / name).stat().st_size) != written.bytes:
                raise ValueError(f"{name} has {have:,} bytes, but {written.bytes:,} were written")
            if sha256_of(local / name) != written.sha256:
                raise ValueError(f"{name} does not match its checksum")
        training = join(load_tensors(local / _TENSORS), parse(read_regular(local / _REST)))
        if not isinstance(training, dict):
            raise ValueError(f"{_REST} is not a JSON object")
    return info, training


def read_info(path: Place) -> CheckpointInfo:
    """Read and verify a checkpoint.json.

    Raises DamagedCheckpointError, and RunError if the checkpoint has another format.
    """
    with _damage_of(path):
        text = (path / INFO).read_bytes()
        try:
            tree = unseal(text)
        except DamagedJSONError as error:
            raise DamagedJSONError(f"{INFO}: {error}") from None
        if tree.get("format") != FORMAT:
            raise RunError(
                f"{path} has checkpoint format {tree.get('format')!r}, but this version of thermopile reads "
                f"format {FORMAT}; resume the run with the version that wrote it"
            )
        info = CheckpointInfo.model_validate(tree)
        if step_of(path.name) != info.step:
            raise ValueError(f"{INFO} is for step {info.step}")
    return info


@contextmanager
def _damage_of(path: Place) -> Iterator[None]:
    """Turn errors from a checkpoint's files into DamagedCheckpointError."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError includes pydantic's
        if isinstance(error, OSError) and (is_away(error) or error.errno not in _NOT_THERE):
            raise
        raise DamagedCheckpointError(f"{path} is damaged ({one_line(error)}).") from error


def latest_checkpoint(folder: Place) -> Place | None:
    """Return the directory of the newest checkpoint, unverified, or None if there is none.

    Goes by the directories, which appear atomically, while `latest` may be outdated after a kill or copy.
    """
    found = checkpoints_in(folder)
    return found[max(found)] if found else None


class Loaded(NamedTuple):
    """A checkpoint's directory and content."""

    path: Place
    info: CheckpointInfo
    training: dict[str, Any]
    newest: Place
    """The newest checkpoint at that time, which may be damaged."""


def load_latest(folder: Place, *, before: Place | None = None) -> Loaded | None:
    """Return the newest intact checkpoint, or the newest before another; None if there is no checkpoint at all.

    Warns about every newer damaged checkpoint, and about `latest` if it names another. Raises RunError about the newest
    if all are damaged, and if one has another format.
    """
    end = math.inf if before is None else step_of(before.name)
    found = {step: path for step, path in checkpoints_in(folder).items() if step < end}
    damages: list[DamagedCheckpointError] = []
    for step in sorted(found, reverse=True):
        try:
            loaded = Loaded(found[step], *load_checkpoint(found[step]), newest=found[max(found)])
        except DamagedCheckpointError as error:
            if checkpoints_in(folder).get(step) != found[step]:  # it was removed meanwhile, so there is a newer one
                return load_latest(folder, before=before)
            damages.append(error)
            continue
        for damage in damages:
            _log.warning("%s Resuming from step %d, the newest intact checkpoint.", damage, step)
        if before is None and (named := _named(folder)) != (newest := found[max(found)].name):
            outdated = "%s names %s, but the newest checkpoint is %s. Resuming from step %d, the newest intact one"
            _log.warning(outdated, folder / LATEST, named, newest, step)
        return loaded
    if damages:
        raise RunError(f"{damages[0]} No earlier checkpoint is intact; start a new run with another --out")
    return None


def _named(folder: Place) -> str:
    """Return the checkpoint that `latest` names, or a description if it names none."""
    try:
        name = (folder / LATEST).read_bytes(max_bytes=100).decode("ascii", "replace").strip()
    except OSError as error:
        return f"none ({error.strerror or error})"
    return name if step_of(name) >= 0 else f"{name[:40]!r}, which is not step-N,"


def remove_checkpoints(folder: Place, *, keep: Collection[int]) -> None:
    """Remove checkpoints of steps not in `keep`, and leftovers of interrupted writes and removals.

    In a bucket, keeps everything newer than the newest of `keep`: it may be a later writer's.
    """
    steps_in(folder, _FILES).remove(keep)


def checkpoints_in(folder: Place) -> Mapping[int, Place]:
    """Return step → directory of every complete checkpoint, unordered; empty without the folder. Raises OSError."""
    return steps_in(folder, _FILES).found()
