"""The files of a run directory. docs/formats.md describes each."""

import hashlib
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..files import open_own, own_directory, remove_leftovers
from ..lock import FileLock
from ..objects import Address, Lease, MissingBucketError, Place, delete_all
from ..places import local_folder, made_local_folder, read, write
from .checkpoint import LATEST, CheckpointInfo, checkpoints_in, latest_checkpoint, load_checkpoint, read_info
from .config import TrainConfig, load_config, to_toml
from .config.layers import MAX_BYTES, parse_toml
from .errors import ConfigError, DamagedCheckpointError, RunError, RunExistsError
from .log_parts import LogParts, LogReader
from .world import SEEN_BY_RANKS

_SEAL = re.compile(rb'# sha256 = "([0-9a-f]{64})"\n\Z')
"""The last line of config.toml: the digest of everything before it."""

_log = logging.getLogger(__name__)


class RunDirectory:
    """The paths of a run.

    A run in a bucket has a folder on this machine, `local`, for files that grow or are working copies; its logs go from
    there to the bucket in parts.
    """

    def __init__(self, path: Place) -> None:
        self.path, self.local = path, local_folder(path)
        self.config_file = path / "config.toml"
        self.state, self.selection, self.checkpoints = path / "state", path / "selection", path / "checkpoints"
        self.state_lock = path / "state.lock"
        self.metrics_file = self.local / "metrics.jsonl"
        self.warnings_file = self.local / "warnings.log"
        self.tensorboard = self.local / "tensorboard"
        self.state_working = self.local / "state.working"
        self.report = path / "report" if isinstance(path, Path) else Path(f"report-{path.name or path.bucket}")
        self._metrics_parts, self._warnings_parts = path / "metrics", path / "warnings"

    def under(self, lock: FileLock | Lease | None) -> "RunDirectory":
        """Return the run as the holder of its lock changes it; itself on a disk, and for those without the lock."""
        if isinstance(self.path, Path) or isinstance(lock, FileLock | None):
            return self
        return RunDirectory(replace(self.path, lease=lock))

    def exists(self) -> bool:
        if isinstance(self.config_file, Address):
            return self.config_file.exists()
        return self.config_file.exists() or self.config_file.is_symlink()

    @property
    def has_state(self) -> bool:
        if isinstance(self.state, Path):
            return self.state.exists()
        from ..state_store.history import is_there

        return is_there(self.state)

    @property
    def metrics(self) -> Path | LogReader:
        """Where the metrics are read from, by another process."""
        return LogReader(self._metrics_parts) if isinstance(self._metrics_parts, Address) else self.metrics_file

    @property
    def warnings(self) -> Path | LogReader:
        return LogReader(self._warnings_parts) if isinstance(self._warnings_parts, Address) else self.warnings_file

    def log_parts(self) -> tuple[LogParts, LogParts] | None:
        """Return the writers of the parts of metrics and warnings, for the run's own writer; None without a bucket."""
        if isinstance(self._metrics_parts, Path) or isinstance(self._warnings_parts, Path):
            return None
        made_local_folder(self.path)
        return LogParts(self._metrics_parts, self.metrics_file), LogParts(self._warnings_parts, self.warnings_file)

    def refuse_unusable(self) -> None:
        """Raise NotRegularFileError if a run would write through a link or overwrite a foreign file.

        The directory may come from someone else. It may itself be reached through a link. Raises ConfigError for a path
        that icechunk cannot serialise.
        """
        if isinstance(self.path, Path) and (path := str(self.path.absolute())).encode(errors="ignore").decode() != path:
            raise ConfigError(f"{path} is not valid UTF-8, so no checkpoint can be written there; choose another --out")
        for folder in (self.state, self.state_working, self.selection, self.checkpoints, self.tensorboard):
            if isinstance(folder, Path) and os.path.lexists(folder):
                own_directory(folder)
        for file in (self.state_lock, self.metrics_file, self.warnings_file):
            if isinstance(file, Path) and os.path.lexists(file):
                os.close(open_own(file, os.O_RDONLY))

    def remove_leftovers(self) -> None:
        """Remove temporary files of killed writers. Only for the holder of the state's lock."""
        for folder in (self.local, self.checkpoints):
            if isinstance(folder, Path):
                remove_leftovers(folder)
        if isinstance(self.path, Address):
            seen = self.path / SEEN_BY_RANKS
            delete_all([seen / name for name, _ in seen.objects()])

    def refuse_existing(self) -> None:
        """Raise RunExistsError if the directory already has content."""
        content = None
        if isinstance(self.path, Address):
            own = (".", "selection/", "state.lock")
            if any(not name.startswith(own) for name, _ in islice(self.path.objects(), 100)):
                content = "has objects below it; choose another address"
        elif self.path.exists() and (not self.path.is_dir() or any(map(self._is_of_something, self.path.iterdir()))):
            content = "is not empty; choose another directory"
        if self.exists():  # asked last: what was found may be of a run that another start has just made
            raise self.taken()
        if content:
            raise RunExistsError(f"{self.path} {content} with --out")

    def create(self, config: TrainConfig, fill: Callable[[], None] = lambda: None) -> None:
        """Create the directory and write the resolved settings, after `fill` has written what belongs to them.

        Raises RunExistsError as `refuse_existing`.
        """
        self.refuse_existing()
        if isinstance(self.path, Path):
            self.path.mkdir(parents=True, exist_ok=True)
        fill()
        if isinstance(self.config_file, Path):
            self.record(config)
            return
        try:
            self.config_file.create(_sealed(config, self.path))
        except FileExistsError:  # by another that began at the same time
            raise self.taken() from None

    def taken(self) -> RunExistsError:
        """Return the error for a directory that holds a run, or where another start is just making one."""
        return RunExistsError(f"{self.path} holds a run; continue it with --resume, or choose another --out")

    def _is_of_something(self, path: Path) -> bool:
        # What a kill during creation leaves, and early warnings, do not make a run.
        return path.name[0] != "." and path not in (self.warnings_file, self.selection, self.state_lock)

    def record(self, config: TrainConfig) -> None:
        """Replace the recorded settings."""
        write(self.config_file, _sealed(config, self.path))

    def config(self) -> TrainConfig:
        """Return the run's settings; warns if config.toml is not what `record` wrote.

        Raises RunError if the directory is not a run or the file has no settings.
        """
        text = self._config_text()
        if not _is_as_written(text):
            _log.warning("%s was edited by hand or is damaged; its current content is used", self.config_file)
        return self._parsed(text)

    def config_to_resume(self, *, accept_edits: bool) -> TrainConfig:
        """Return the settings to train with, as `config` does, but raise RunError instead of warning.

        accept_edits: the file was edited by hand; use it as it is.
        """
        text = self._config_text()
        if not (accept_edits or _is_as_written(text)):
            if (latest := latest_checkpoint(self.checkpoints)) is not None:
                with suppress(DamagedCheckpointError):
                    read_info(latest)  # reports a run of another version
            raise RunError(
                f"{self.config_file} is damaged or was edited by hand: it does not match the sha256 in its last line. "
                "If you edited it, resume with --accept-config; if not, each checkpoint's settings are in its "
                "checkpoint.json"
            )
        return self._parsed(text)

    def _config_text(self) -> bytes:
        try:
            return read(self.config_file, MAX_BYTES)
        except MissingBucketError as error:
            raise RunError(str(error)) from None
        except FileNotFoundError:
            raise RunError(
                f"{self.path} is not a run: it has no {self.config_file.name}. Start one with `thermopile train`."
            ) from None

    def _parsed(self, text: bytes) -> TrainConfig:
        try:
            return load_config(parse_toml(text, self.config_file))
        except ConfigError as error:
            raise RunError(f"{self.config_file} is damaged: {error}") from error


def _sealed(config: TrainConfig, path: Place) -> bytes:
    text = to_toml(config).encode()
    if isinstance(path, Address) and path.lease:  # so that no earlier writer's settings have the same version
        text += f"# written in term {path.lease.term}\n".encode()
    return text + f'# sha256 = "{hashlib.sha256(text).hexdigest()}"\n'.encode()


def _is_as_written(text: bytes) -> bool:
    seal = _SEAL.search(text)
    return seal is not None and hashlib.sha256(text[: seal.start()]).hexdigest() == seal[1].decode()


def find_checkpoint(run: RunDirectory, at: str) -> Place:
    """Return the checkpoint `latest` or step-N. Raises RunError if there is none, listing the existing ones."""
    if at == LATEST:
        if (latest := latest_checkpoint(run.checkpoints)) is None:
            raise RunError(f"{run.path} has no checkpoint yet; wait for its first one")
        return latest
    found = _by_name(run.checkpoints)
    if at not in found:
        raise RunError(f"{run.path} has no checkpoint {at!r}; available: {', '.join(found) or 'none yet'}")
    return found[at]


def load_found(checkpoint: Place) -> tuple[CheckpointInfo, dict[str, Any]]:
    """Read a checkpoint as load_checkpoint does. Raises RunError if it is damaged, listing the others."""
    try:
        return load_checkpoint(checkpoint)
    except RunError as error:
        others = [name for name, path in _by_name(checkpoint.parent).items() if path != checkpoint]
        if not others:
            raise
        raise RunError(f"{error} Choose another with --at: {', '.join(others)}") from error


def _by_name(checkpoints: Place) -> dict[str, Place]:
    return {f"step-{step}": path for step, path in sorted(checkpoints_in(checkpoints).items())}
