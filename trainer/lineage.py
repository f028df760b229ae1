"""A run's id, and the runs that it was forked from, in RUN/run.json, which is written once, when the run is made."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from secrets import token_hex
from typing import Annotated

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..storage.place import Place
from ..storage.sealed_json import DamagedJSONError, seal_document, unseal

_Id = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
_CHECKED = ConfigDict(extra="forbid")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, config=_CHECKED)
class Origin:
    """A run that was forked, as it was then."""

    run: str
    """Its place."""
    id: _Id | None
    """None if an earlier version made it."""
    step: NonNegativeInt
    """The step at which the fork goes on: 0 begins again."""
    changed: list[str]
    """What the fork changed, such as `epochs: 20 → 40`."""


@dataclass(frozen=True, config=_CHECKED)
class Lineage:
    """Content of run.json."""

    id: _Id
    origins: Annotated[list[Origin], Field(max_length=1000)]
    """From the first run, which is no fork, to the run that was forked last."""

    def lines(self) -> list[str]:
        """Return a tree, a line for each run, this one last; empty unless it is a fork."""
        if not self.origins:
            return []
        first = self.origins[0]
        lines = [_named(first.run, first.id)]
        later = [_named(each.run, each.id) for each in self.origins[1:]] + [_named("this run", self.id)]
        for depth, (origin, run) in enumerate(zip(self.origins, later, strict=True)):
            changed = "; ".join(origin.changed) or "nothing changed"
            lines.append(f"{'   ' * depth}└─ step {origin.step:,}: {run}: {changed}")
        return lines


def sealed_lineage(origins: Sequence[Origin]) -> bytes:
    """Return run.json of a new run, with an id of its own."""
    return seal_document(asdict(Lineage(token_hex(8), [*origins])))


def read_lineage(file: Place) -> Lineage | None:
    """Return a run's lineage; None if an earlier version made it, and, with a warning, if the file is damaged."""
    try:
        return TypeAdapter(Lineage).validate_python(unseal(file.read_bytes()))
    except FileNotFoundError:
        return None
    except (DamagedJSONError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        _log.warning("%s is damaged, so the run's origin is unknown: %s", file, reason)
        return None


def _named(run: str, run_id: str | None) -> str:
    return f"{run} ({run_id})" if run_id else run
