"""A user's own code that a command imports: named before it runs, and refused where only a file names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from .plain_text import plain_text

if TYPE_CHECKING:
    from ..trainer.run_directory import RunDirectory

ALLOW = click.option("--allow-code", is_flag=True, help="Allow the run's settings to import code: `module:name`.")


def refuse_code(named: Mapping[str, str], where: str) -> None:
    """Raise ConfigError if there is any. named: setting → `module:name`; where: the file that names it."""
    from ..trainer.errors import ConfigError

    for key, code in named.items():
        raise ConfigError(f"{where} sets {key} = {code!r}, which imports that module and runs its code. "
                          "If you trust it, add --allow-code")  # fmt: skip


def announce(named: Mapping[str, str]) -> None:
    """Say on stderr what is about to be imported, and from where."""
    from ..plugins import place_of

    for key, code in named.items():
        click.echo(plain_text(f"imports {key} = {code} from {place_of(code) or 'a place that is not found'}"), err=True)


def admit_code_of_features(run: RunDirectory, *, allow_code: bool) -> None:
    """Announce the code that a run's features depend on. Raises ConfigError unless that is allowed; RunError."""
    from ..trainer.config_layers import CODE_OF_FEATURES, code_in

    named = code_in(run.config(), CODE_OF_FEATURES)
    if not allow_code:
        refuse_code(named, str(run.config_file))
    announce(named)
