"""What the parts of a command have found out, or why they could not: printed as tables, or as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from .measured import Measured


class Outcome(NamedTuple):
    """Of one part."""

    found: Measured | str
    """What it found out, or why it could not."""
    sizes: Any
    """A dataclass: how much it measured."""
    judged: bool
    """Whether the sizes are those for which figures are asked."""


def found_or_problem(measure: Callable[[], Measured]) -> Measured | str:
    """What the part found out, or why it could not: the figures of the other parts took long, and are not lost."""
    from ...pipeline.errors import DatasetError, SourceError
    from ...state_store.errors import StateStoreError
    from .isolated import EndedWithoutAWordError
    from .measuring import NoRoomError

    try:
        return measure()
    except (
        NoRoomError, EndedWithoutAWordError, StateStoreError, DatasetError, SourceError, OSError, RuntimeError,
        ValueError,
    ) as error:  # fmt: skip
        return str(error)


def print_outcomes(outcomes: Mapping[str, Outcome], machine: dict[str, Any], *, as_json: bool) -> None:
    """Print what each part found out. Raises ClickException, after that, where a part could not be measured."""
    if as_json:
        shown = {part: _to_json(outcome) for part, outcome in outcomes.items()}
        click.echo(json.dumps({"machine": machine, "parts": shown}, allow_nan=False))
    else:
        print_machine(machine)
        _print_parts(outcomes)
    if problems := [part for part, outcome in outcomes.items() if isinstance(outcome.found, str)]:
        raise click.ClickException(f"not measured: {', '.join(problems)}")


def print_machine(machine: dict[str, Any]) -> None:
    """Print, in a line, what describe_machine found out."""
    about = ("cpu", "cores", "ram_bytes", "gpu")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name not in about)
    click.echo(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_bytes'] / 1e9:,.0f} GB, "
        f"GPU: {machine['gpu'] or 'none'}; {versions}"
    )


def _to_json(outcome: Outcome) -> dict[str, Any]:
    found = outcome.found
    if isinstance(found, str):
        return {"sizes": asdict(outcome.sizes), "problem": found}
    return {
        "title": found.title,
        "sizes": asdict(outcome.sizes),
        "seconds": found.seconds,
        "peak_memory_bytes": found.peak_bytes,
        "versus": found.versus,
        "figures": {figure.name: figure.to_json(judged=outcome.judged) for figure in found.figures},
        "notes": list(found.notes),
    }


def _print_parts(outcomes: Mapping[str, Outcome]) -> None:
    from .table import print_part

    for part, outcome in outcomes.items():
        if isinstance(outcome.found, str):
            click.echo(f"\n{part}: not measured: {outcome.found}")
        else:
            print_part(part, outcome.found, judged=outcome.judged)
