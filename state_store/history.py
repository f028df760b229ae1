"""The history of a store: a small index file that lists the snapshots and the files they need.

A snapshot exists from the moment an index that names it replaces the previous one. Only this replacement must be
atomic: a rename on a local disk, a conditional put on an object store. Every other file has a unique name and is
written earlier.
"""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ..files import read_regular, write_atomically
from ..sealed_json import seal_document, unseal
from .errors import StoreNotFoundError
from .icechunk_files import is_damage
from .schema import Description, Schema

FORMAT_VERSION = 3
INDEX = "thermopile.json"
COPY = "thermopile.copy.json"
"""A second copy of the index, so that one flipped bit does not cost the whole history."""


@dataclass(frozen=True)
class Snapshot:
    """One committed state of all samples, after every put up to `step`."""

    id: str
    """icechunk's snapshot id."""
    step: int
    epoch: int
    config_hash: str
    written_at: datetime
    """Time of the commit, in UTC."""
    dataset_fingerprint: str
    bytes_written: int
    """Size of the rows written for it, those changed since the previous snapshot."""
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Files that it needs besides chunks: path relative to the state directory -> sha256, in hexadecimal."""

    @property
    def tag(self) -> str:
        return f"step-{self.step}"


@dataclass(frozen=True)
class UnreadableSnapshot:
    """A snapshot of which a file is damaged or missing."""

    tag: str
    id: str
    file: str
    """Path relative to the state directory."""
    reason: str

    def __str__(self) -> str:
        return f"snapshot {self.tag} cannot be read: {self.file} in the state directory: {self.reason}"


@dataclass(frozen=True)
class History:
    """Content of the index. snapshots: oldest first, with increasing steps."""

    description: Description
    snapshots: tuple[Snapshot, ...]


def load(state: Path) -> tuple[History, str | None]:
    """Return the history of the store at `state`, and the damage to the index if its copy had to be used.

    Raises StoreNotFoundError if there is no store, no readable index, or another format; OSError.
    """
    damage: list[str] = []
    for name in (INDEX, COPY):
        try:
            found = _parse(read_regular(state / name), state)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not is_damage(error):
                raise  # such as no descriptor left, which says nothing about the file
            damage.append(f"{name}: {'it is missing' if isinstance(error, FileNotFoundError) else error}")
        else:
            return found, f"{state}: {damage[0]}; the history was read from {COPY}" if damage else None
    raise _no_history(state, damage)


def copy_is_sound(state: Path, history: History) -> bool:
    """Return whether the copy of the index matches `history`. Raises OSError if the disk fails."""
    try:
        return _parse(read_regular(state / COPY), state) == history
    except (OSError, ValueError, StoreNotFoundError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        return False


def replace(state: Path, history: History) -> None:
    """Replace the store's history; durable on return. If OSError is raised, either version may be in place.

    The copy is written first, so it is never older than the index and using it loses no snapshot.
    """
    text = seal_document(_to_tree(history))
    for name in (COPY, INDEX):
        write_atomically(state / name, text)


def _no_history(state: Path, damage: list[str]) -> StoreNotFoundError:
    if any((state / name).exists() for name in (INDEX, COPY)):
        return StoreNotFoundError(
            f"{state}: the index and its copy are damaged ({'; '.join(damage)}). Restore one of them from a copy of "
            "the run; the snapshots themselves may be intact"
        )
    if any((state / "refs").glob("tag.*")):
        return StoreNotFoundError(
            f"{state}: the state has format version 1 or 2, but this version of thermopile reads {FORMAT_VERSION}; use "
            "version 0.1.0"
        )
    return StoreNotFoundError(f"{state} holds no state store; check the path of the run")


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_FilePath = Annotated[str, Field(pattern="^(snapshots|manifests)/[0-9A-Z]{20}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Entry(_Strict):
    id: Annotated[str, Field(pattern="^[0-9A-Z]{20}$")]
    step: _Count
    epoch: _Count
    config_hash: str
    written_at: Annotated[AwareDatetime, Field(strict=False)]
    dataset_fingerprint: str
    bytes_written: _Count
    files: dict[_FilePath, _Sha256]


class _Index(_Strict):
    format_version: Literal[3]
    samples: _Count
    fields: dict[str, float | Literal["inf", "-inf"]]
    block_rows: _Count
    dataset_fingerprint: str
    snapshots: Annotated[list[_Entry], Field(min_length=1)]


def _parse(text: bytes, state: Path) -> History:
    """Parse an index. Raises ValueError if it is invalid, StoreNotFoundError if it has another format."""
    tree = unseal(text)
    if isinstance(version := tree.get("format_version"), int) and version != FORMAT_VERSION:
        raise StoreNotFoundError(
            f"{state}: the state has format version {version}, but this version of thermopile reads {FORMAT_VERSION}; "
            "use the version that wrote it"
        )
    try:
        index = _Index.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    snapshots = tuple(Snapshot(**entry.model_dump()) for entry in index.snapshots)
    if any(later.step <= earlier.step for earlier, later in itertools.pairwise(snapshots)):
        raise ValueError("its snapshots are not ordered by step")
    if lacking := [snapshot.tag for snapshot in snapshots if f"snapshots/{snapshot.id}" not in snapshot.files]:
        raise ValueError(f"{lacking[0]} does not list its own file")
    schema = Schema.from_json(index.fields)
    return History(Description(index.samples, schema, index.block_rows, index.dataset_fingerprint), snapshots)


def _to_tree(history: History) -> dict[str, Any]:
    description = history.description
    return {
        "format_version": FORMAT_VERSION,
        "samples": description.samples,
        "fields": description.schema.to_json(),
        "block_rows": description.block_rows,
        "dataset_fingerprint": description.dataset_fingerprint,
        "snapshots": [
            {**asdict(snapshot), "written_at": snapshot.written_at.isoformat()} for snapshot in history.snapshots
        ],
    }
