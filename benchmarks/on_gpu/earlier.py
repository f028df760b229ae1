"""What parts found on a machine, kept in a folder: where a command ends after some minutes, the next one goes on."""

import json
from pathlib import Path
from typing import Any

from .parts import Part
from .running import Outcome


class Earlier:
    """The outcomes of parts that ran to their end on a machine."""

    def __init__(self, folder: Path, machine: dict[str, Any]) -> None:
        """folder: made if it is not there. machine: as machine.describe returns it. Exits if it is of another one."""
        self._folder, of_machine = folder, folder / "machine.json"
        folder.mkdir(parents=True, exist_ok=True)
        # The memory that a machine reports differs a little from one start to the next.
        alike = machine | {"ram_bytes": None}
        if not of_machine.exists():
            of_machine.write_text(json.dumps(alike), "utf-8")
        elif json.loads(of_machine.read_text("utf-8")) != alike:
            raise SystemExit(f"--found {folder} is of another machine or of other versions; name another folder")

    def outcome(self, part: Part) -> Outcome | None:
        """Return how a part went, if it ran to its end."""
        file = self._folder / f"{part.name}.json"
        if not file.exists():
            return None
        kept = json.loads(file.read_text("utf-8"))
        return Outcome(part, kept["seconds"], "", kept["found"])

    def keep(self, outcome: Outcome) -> None:
        """Keep an outcome, unless the part did not run to its end."""
        if not outcome.problem:
            kept = {"seconds": outcome.seconds, "found": outcome.found}
            (self._folder / f"{outcome.part.name}.json").write_text(json.dumps(kept), "utf-8")
