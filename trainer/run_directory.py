"""Where a run keeps what. docs/formats.md describes each file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..files import open_own, own_directory, write_atomically
from .config import TrainConfig, load_config, read_toml, to_toml
from .errors import ConfigError, RunError, RunExistsError


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def warnings_file(self) -> Path:
        return self.path / "warnings.log"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def state_lock(self) -> Path:
        return self.path / "state.lock"

    @property
    def state_working(self) -> Path:
        return self.path / "state.working"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report"

    def exists(self) -> bool:
        return self.config_file.exists() or self.config_file.is_symlink()

    def refuse_links(self) -> None:
        """Raise NotRegularFileError where a run would write through a link, or over what is none of its own.

        Somebody may have sent the directory. It may itself be reached by a link.
        """
        for folder in (self.state, self.state_working, self.checkpoints, self.tensorboard):
            if os.path.lexists(folder):
                own_directory(folder)
        for file in (self.state_lock, self.metrics_file, self.warnings_file):
            if os.path.lexists(file):
                os.close(open_own(file, os.O_RDONLY))

    def create(self, config: TrainConfig) -> None:
        """Make the directory and write the resolved settings.

        Raises RunExistsError where there is something already.
        """
        if self.exists():
            raise RunExistsError(f"{self.path} holds a run; continue it with --resume, or choose another --out")
        if self.path.exists() and (not self.path.is_dir() or any(map(self._is_of_something, self.path.iterdir()))):
            raise RunExistsError(f"{self.path} is not empty; choose another directory with --out")
        self.path.mkdir(parents=True, exist_ok=True)
        self.record(config)

    def _is_of_something(self, path: Path) -> bool:
        # A kill while the settings were written leaves them under a hidden name, and warnings may come first: no run.
        return path.name[0] != "." and path != self.warnings_file

    def record(self, config: TrainConfig) -> None:
        """Write the settings, in place of those before."""
        write_atomically(self.config_file, to_toml(config).encode())

    def config(self) -> TrainConfig:
        """The settings the run was started with. Raises RunError where the directory is no run."""
        if not self.exists():
            raise RunError(
                f"{self.path} is no run: it has no {self.config_file.name}. Start one with `thermopile train`."
            )
        try:
            return load_config(read_toml(self.config_file))
        except ConfigError as error:
            raise RunError(f"{self.config_file} is damaged: {error}") from error
