"""The history of a store: a small index file that lists the snapshots and the files they need.

A snapshot exists from the moment an index that names it replaces the previous one. Only this replacement must be
atomic. Every other file has a unique name and is written earlier.

In a bucket the index also names its writer, and only a process that has read the current version may replace it: of
two processes that take themselves for the writer, one is refused.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ..storage.place import Place
from ..storage.sealed_json import seal_document, unseal
from .errors import DamagedFileError, StoreLockedError, StoreNotFoundError
from .icechunk_files import damage_to
from .schema import Description, Schema

INDEX = "thermopile.json"
"""A place that holds it has a store, readable or not."""
COPY = "thermopile.copy.json"
"""A second copy of the index, so that one flipped bit does not cost the whole history."""

_FORMAT_VERSION, _OF_SELECTION = 3, 4
"""The second format is for a store of selected samples, which readers of the first would take for the first ids."""
_Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_FilePath = Annotated[str, Field(pattern="^(snapshots|manifests)/[0-9A-Z]{20}$")]


@dataclass(frozen=True)
class Snapshot:
    """One committed state of all samples: every put up to `step`."""

    id: Annotated[str, Field(pattern="^[0-9A-Z]{20}$")]
    """icechunk's snapshot id."""
    step: _Count
    epoch: _Count
    config_hash: str
    written_at: AwareDatetime
    """Time of the commit, in UTC."""
    dataset_fingerprint: str
    bytes_written: _Count
    """Bytes written for it: the rows changed since the previous snapshot."""
    files: Mapping[_FilePath, _Sha256] = field(default_factory=dict, repr=False)
    """Required files besides chunks: path relative to the state directory -> sha256, in hexadecimal."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def tag(self) -> str:
        return f"step-{self.step}"


@dataclass(frozen=True)
class UnreadableSnapshot:
    """A snapshot with a damaged or missing file."""

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
    writer: str | None = field(default=None, compare=False)
    """In a bucket: the process that may replace the index."""
    version: str | None = field(default=None, compare=False)
    """In a bucket: version of the index object that was read; None: no object exists yet."""


class _Index(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format_version: Literal[3, 4]
    samples: _Count
    fields: dict[str, float | Literal["inf", "-inf"]]
    block_rows: _Count
    dataset_fingerprint: str
    selection: _Sha256 | None = None
    writer: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    snapshots: Annotated[list[Snapshot], Field(min_length=1)]


def retained_steps(steps: Iterable[int], keep_last: int, keep_every: int, keep_early: int = 0) -> set[int]:
    """Return the snapshots' steps to keep: the newest `keep_last`, multiples of `keep_every`, and `early_steps`."""
    ascending = sorted(steps)
    multiples = {step for step in ascending if keep_every and step % keep_every == 0}
    return {*ascending[-keep_last:]} | multiples | early_steps(ascending, keep_early)


def early_steps(steps: Iterable[int], keep_early: int) -> set[int]:
    """Return the early snapshots to keep: `keep_early`, 0 to 9, for each tenfold of steps; 0 keeps none.

    Keeps the first step above 0 in each range that begins at 10^(k / keep_early). So few are kept of any number of
    steps, and later steps never change the choice.
    """
    first = {len(str(step**keep_early)): step for step in sorted(steps, reverse=True) if step and keep_early}
    return set(first.values())


def last_writer(state: Place) -> str | None:
    """Return the writer that the index names; None if the index cannot be read."""
    try:
        return load(state)[0].writer
    except StoreNotFoundError:
        return None


def load(state: Place) -> tuple[History, str | None]:
    """Return the history of the store at `state`, and the damage to the index if its copy had to be used.

    Raises StoreNotFoundError if the store or a readable index is missing or has another format; OSError.
    """
    damage: list[str] = []
    for name in _copies(state):
        try:
            history = _read(state, name)
            return history, f"{state}: {damage[0]}; the history was read from {COPY}" if damage else None
        except (DamagedFileError, ValueError) as error:
            damage.append(f"{name}: {error.reason if isinstance(error, DamagedFileError) else error}")
    if any((state / name).exists() for name in _copies(state)):
        both = " is" if state.keeps_copies else " and its copy are"
        raise StoreNotFoundError(
            f"{state}: the index{both} damaged ({'; '.join(damage)}). Restore one of them from a copy of "
            "the run; the snapshots themselves may be intact"
        )
    raise StoreNotFoundError(f"{state} holds no state store; check the path of the run")


def copy_is_sound(state: Place, history: History) -> bool:
    """Return whether the copy of the index matches `history`. Raises OSError if the disk fails."""
    try:
        return _read(state, _copies(state)[-1]) == history
    except (DamagedFileError, ValueError, StoreNotFoundError):
        return False


def replace(state: Place, history: History) -> None:
    """Replace the store's history; durable on return. If OSError is raised, either version may be in place.

    The copy is written first, so it is never older than the index and using it loses no snapshot. In a bucket, only
    the version from which `history` was read is replaced. Raises StoreLockedError if the version differs.
    """
    description = history.description
    text = seal_document(
        {
            "format_version": _OF_SELECTION if description.selection else _FORMAT_VERSION,
            "samples": description.samples,
            "fields": description.schema.to_json(),
            "block_rows": description.block_rows,
            "dataset_fingerprint": description.dataset_fingerprint,
            **({"selection": description.selection} if description.selection else {}),
            **({"writer": history.writer} if history.writer else {}),
            "snapshots": [{**asdict(each), "written_at": each.written_at.isoformat()} for each in history.snapshots],
        }
    )
    try:
        for name in reversed(_copies(state)):
            (state / name).supersede(text, history.version)
    except FileExistsError as error:
        raise taken_over(state) from error


def taken_over(state: Place) -> StoreLockedError:
    """Return the error for a process that is no longer the writer."""
    return StoreLockedError(
        f"{state}: another process has begun to write this state, so this one must end; all snapshots that were "
        "announced are intact"
    )


def _copies(state: Place) -> tuple[str, ...]:
    """Return the names of the index, its copy last: a bucket needs no copy, for it keeps several itself."""
    return (INDEX,) if state.keeps_copies else (INDEX, COPY)


def _read(state: Place, name: str) -> History:
    """Read an index. Raises DamagedFileError, ValueError if it is invalid, StoreNotFoundError for another format."""
    with damage_to(name):
        text, version = (state / name).read_version()
    tree = unseal(text)
    if isinstance(format_ := tree.get("format_version"), int) and format_ not in (_FORMAT_VERSION, _OF_SELECTION):
        raise StoreNotFoundError(
            f"{state}: the state has format version {format_}, but this version of thermopile reads {_FORMAT_VERSION} "
            f"and {_OF_SELECTION}; use the version that wrote it"
        )
    try:
        index = _Index.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if any(later.step <= earlier.step for earlier, later in itertools.pairwise(index.snapshots)):
        raise ValueError("its snapshots are not ordered by step")
    if lacking := [snapshot.tag for snapshot in index.snapshots if f"snapshots/{snapshot.id}" not in snapshot.files]:
        raise ValueError(f"{lacking[0]} does not list its own file")
    if (index.format_version == _OF_SELECTION) != (index.selection is not None):
        raise ValueError(f"format version {index.format_version} with selection {index.selection}")
    schema = Schema.from_json(index.fields)
    description = Description(index.samples, schema, index.block_rows, index.dataset_fingerprint, index.selection)
    return History(description, tuple(index.snapshots), index.writer, version)
