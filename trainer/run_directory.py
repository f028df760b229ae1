"""The files of a run directory. docs/run_files.md describes each."""

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike
from secrets import token_hex
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from ..pipeline.dataset.index import TOKENIZER_FILE
from ..storage.bucket import Address
from ..storage.bucket_errors import MissingBucketError, is_away
from ..storage.files import may_make
from ..storage.place import Lock, Place, leased, log_at, place_of
from ..storage.sealed_json import DamagedJSONError, seal_document, unseal
from .checkpoints import checkpoint_files
from .config import TrainConfig, load_recorded, to_toml
from .config.layers import MAX_BYTES, parse_toml
from .errors import ConfigError, DamagedCheckpointError, RunError, RunExistsError, one_line

_SEAL = re.compile(rb'# sha256 = "([0-9a-f]{64})"\n\Z')
"""The last line of config.toml: the digest of everything before it."""
_COPIES = "each checkpoint's settings are in its checkpoint.json"
_Id = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger(__name__)


class Origin(BaseModel, frozen=True, extra="forbid"):
    """A run that was forked: its place, its id, None if its run.json is lost, the step, and what was changed."""

    run: str
    id: _Id | None
    step: NonNegativeInt
    changed: list[str]


class Lineage(BaseModel, frozen=True, extra="forbid"):
    """Content of run.json. origins: from the first run, which is no fork, to the one that was forked last."""

    id: _Id
    origins: Annotated[list[Origin], Field(max_length=1000)]

    def lines(self) -> list[str]:
        """Return a tree, a line for each run, this one last; empty unless it is a fork."""
        runs = [f"{each.run} ({each.id or 'no id'})" for each in self.origins] + [f"this run ({self.id})"]
        lines = runs[:1] if self.origins else []
        for depth, origin in enumerate(self.origins):
            changed = "; ".join(origin.changed) or "nothing changed"
            lines.append(f"└─{'──' * depth} step {origin.step:,}: {runs[depth + 1]}: {changed}")
        return lines


def read_lineage(file: Place) -> Lineage | None:
    return read_facts(file, Lineage, "the run's origin is unknown")


def read_facts(file: Place, kind: type[M], lost: str) -> M | None:
    """Return a run's facts; None if the file is missing, and, with a warning, if it is damaged.

    lost: what follows from damage.
    """
    try:
        return kind.model_validate(unseal(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, DamagedJSONError, ValidationError) as error:
        if isinstance(error, OSError) and is_away(error):
            raise
        _log.warning("%s is damaged, so %s: %s", file, lost, one_line(error))
        return None


class RunDirectory:
    """The paths of a run.

    A run in a bucket has a folder on this machine, `local`, for growing files and working copies; its logs go from
    there to the bucket in parts. On a disk, `local` is the run's own folder.
    """

    def __init__(self, path: str | PathLike[str] | Address) -> None:
        self.path = path = place_of(path)
        self.local = path.scratch
        self.config_file, self.lineage_file = path / "config.toml", path / "run.json"
        self.trained_on, self.tokenizer = path / "trained_on.json", path / TOKENIZER_FILE
        self.state, self.selection, self.checkpoints = path / "state", path / "selection", path / "checkpoints"
        self.state_lock = path / "state.lock"
        self.metrics_file = self.local / "metrics.jsonl"
        self.warnings_file = self.local / "warnings.log"
        self.tensorboard = self.local / "tensorboard"
        self.trackers_id = path / "trackers.id"
        self.state_working = self.local / "state.working"
        self.report = path.output("report")
        self.metrics = log_at(path / "metrics", self.metrics_file)
        self.warnings = log_at(path / "warnings", self.warnings_file)

    def under(self, lock: Lock | None) -> Self:
        """Return the run with its lock attached, for the holder to write; itself without a lock."""
        return self if lock is None else type(self)(leased(self.path, lock))

    def exists(self) -> bool:
        return self.config_file.is_present()

    @property
    def has_state(self) -> bool:
        """Whether there is a state, readable or not."""
        from ..state_store.history import INDEX

        return self.state.holds(INDEX)

    def refuse_unusable(self) -> None:
        """Raise NotRegularFileError if a run would write through a link or overwrite a foreign file.

        The directory may come from someone else. It may itself be reached through a link. Raises ConfigError for a path
        that icechunk cannot serialise.
        """
        if (path := str(self.path.absolute())).encode(errors="ignore").decode() != path:
            raise ConfigError(f"{path} is not valid UTF-8, so no checkpoint can be written there; choose another --out")
        for folder in (self.state, self.state_working, self.selection, self.checkpoints, self.tensorboard):
            folder.refuse_foreign_folder()
        for file in (self.state_lock, self.metrics_file, self.warnings_file):
            file.refuse_foreign_file()

    def remove_leftovers(self) -> None:
        """Remove temporary files of killed writers. Only for the holder of the state's lock."""
        for folder in {self.path, self.local, self.checkpoints}:
            folder.remove_leftovers()

    def refuse_existing(self) -> None:
        """Raise RunExistsError if it has content, RunError if it cannot be written, ConfigError if it is in a run."""
        # Leftovers of a kill during creation, and early warnings, do not make a run.
        own = {self.warnings_file.name, self.selection.name, self.state_lock.name, self.lineage_file.name}
        own |= {self.trained_on.name, self.tokenizer.name}
        is_file = self.path.is_present() and not self.path.is_folder()
        is_occupied = is_file or any(not name.startswith(".") and name not in own for name in self.path.content())
        if self.exists():  # asked last: the content may belong to a run that another start has just made
            raise self.taken()
        if is_occupied:
            raise RunExistsError(f"{self.path} {self.path.occupied} with --out")
        if not may_make(self.local):
            raise RunError(f"{self.local} cannot be written; choose another directory with --out")
        refuse_in_run(self.path)

    def create(self, config: TrainConfig, fill: Callable[[], None], origins: Sequence[Origin] = ()) -> None:
        """Create the directory and write the resolved settings, after `fill` has written the files that belong to them.

        origins: of a fork, as in `Lineage`.
        Raises RunExistsError, as `refuse_existing` and if another start has created a run here meanwhile.
        """
        self.refuse_existing()
        self.path.make()
        self.lineage_file.rewrite(seal_document(Lineage(id=token_hex(8), origins=[*origins]).model_dump()))
        fill()
        try:
            self.config_file.create(_sealed(config, self.path))
        except FileExistsError:  # another start began at the same time
            raise self.taken() from None

    def taken(self) -> RunExistsError:
        """Return the error for a directory that holds a run, or in which another start is creating a run."""
        return RunExistsError(f"{self.path} holds a run; continue it with --resume, or choose another --out")

    def record(self, config: TrainConfig) -> None:
        """Replace the recorded settings."""
        self.config_file.rewrite(_sealed(config, self.path))

    def config(self, *, edited: Literal["warn", "refuse", "accept"] = "warn") -> TrainConfig:
        """Return the run's settings.

        edited: what to do if config.toml is not what `record` wrote. Raises RunError if the directory is not a run or
        the file has no settings, or is to be refused.
        """
        file = self.config_file
        try:
            text = file.read_bytes(MAX_BYTES)
        except MissingBucketError as error:
            raise RunError(str(error)) from None
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run: it has no {file.name}; `thermopile train` starts one") from None
        seal = _SEAL.search(text)
        if not seal or hashlib.sha256(text[: seal.start()]).hexdigest() != seal[1].decode():
            if edited == "warn":
                _log.warning("%s was edited by hand or is damaged; its current content is used", file)
            if edited == "refuse":
                if (latest := checkpoint_files.latest_checkpoint(self.checkpoints)) is not None:
                    with suppress(DamagedCheckpointError):
                        checkpoint_files.read_info(latest)  # reports a run of another version
                raise RunError(
                    f"{file} is damaged or was edited by hand: it does not match the sha256 in its last line. "
                    f"If you edited it, resume with --accept-config; if not, {_COPIES}"
                )
        try:
            return load_recorded(parse_toml(text, file))
        except ConfigError as error:
            raise RunError(f"{file} is damaged: {error}; {_COPIES}") from error


def _sealed(config: TrainConfig, path: Place) -> bytes:
    text = to_toml(config).encode()
    if path.lease:  # so that no earlier writer's settings have the same version
        text += f"# written in term {path.lease.term}\n".encode()
    return text + f'# sha256 = "{hashlib.sha256(text).hexdigest()}"\n'.encode()


def refuse_in_run(place: Place, *, is_file: bool = False) -> None:
    """Raise ConfigError if a new folder would be in a run, or a file in a folder that its run clears or checks.

    Follows links. Raises OSError if the store fails.
    """
    below: Place = place.parent.resolve() / place.name if is_file else place.resolve()  # a file replaces a link
    while (folder := below.parent) != below:
        with suppress(PermissionError):  # of credentials for a part of the bucket
            run = RunDirectory(folder)
            of_run = {each.name for each in (run.state, run.state_working, run.checkpoints, run.selection)}
            if (not is_file or below.name in of_run) and run.lineage_file.is_present() and run.exists():
                raise ConfigError(f"{place} would be in the run {folder}, which may delete it; choose another place")
        below = folder


def find_checkpoint(run: RunDirectory, at: str) -> Place:
    """Return the checkpoint `latest` or step-N. Raises RunError if it does not exist, listing the existing ones."""
    if at == checkpoint_files.LATEST:
        if (latest := checkpoint_files.latest_checkpoint(run.checkpoints)) is None:
            raise RunError(f"{run.path} has no checkpoint yet; wait for its first one")
        return latest
    found = _by_name(run.checkpoints)
    if at not in found:
        raise RunError(f"{run.path} has no checkpoint {at!r}; available: {', '.join(found) or 'none yet'}")
    return found[at]


def load_found(checkpoint: Place) -> tuple[checkpoint_files.CheckpointInfo, dict[str, Any]]:
    """Read a checkpoint as load_checkpoint does. Raises RunError if it is damaged, listing the others."""
    try:
        return checkpoint_files.load_checkpoint(checkpoint)
    except DamagedCheckpointError as error:
        others = ", ".join(name for name, path in _by_name(checkpoint.parent).items() if path != checkpoint)
        cure = f"Choose another with --at: {others}" if others else "There is no other; start a new run"
        raise RunError(f"{error} {cure}") from error


def _by_name(checkpoints: Place) -> dict[str, Place]:
    return {f"step-{step}": path for step, path in sorted(checkpoint_files.checkpoints_in(checkpoints).items())}
