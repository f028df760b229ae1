"""A run's id, and the runs that it was forked from, in RUN/run.json, which is written once, when the run is made."""

import logging
from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from ..storage.bucket_errors import is_away
from ..storage.place import Place
from ..storage.sealed_json import DamagedJSONError, seal_document, unseal
from .errors import one_line

_Id = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger(__name__)


class Origin(BaseModel, frozen=True, extra="forbid"):
    """A run that was forked: its place, its id, None if an earlier version made it, the step, and what was changed."""

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


def sealed_lineage(origins: Sequence[Origin]) -> bytes:
    """Return run.json of a new run, with an id of its own."""
    return seal_document(Lineage(id=token_hex(8), origins=[*origins]).model_dump())


def read_lineage(file: Place) -> Lineage | None:
    return read_facts(file, Lineage, "the run's origin is unknown")


def read_facts(file: Place, kind: type[M], lost: str) -> M | None:
    """Return a run's facts; None if an earlier version made it, and, with a warning, if the file is damaged.

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
