"""What parts found on a machine, kept in a folder: where a command ends after some minutes, the next one goes on."""

import json
from pathlib import Path
from typing import Any

from thermopile.storage.files import write_atomically

from .parts import PARTS, Part
from .running import Outcome, missing


class Earlier:
    """The outcomes of parts that ran to their end on a machine, and missed no figure."""

    def __init__(self, folder: Path, machine: dict[str, Any], *how: Any) -> None:
        """folder: made if it is not there. machine: as machine.describe returns it. how: what else must be alike.

        Exits with a line if the folder is of another machine, or cannot be made.
        """
        self._folder, of_machine = folder, folder / "machine.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"Nothing was measured. --found {folder}: {error.strerror}") from None
        lacking = missing(sorted({module for part in PARTS for module in part.needs}))
        # The memory that a machine reports differs a little from one start to the next.
        alike = json.dumps([machine | {"ram_bytes": None}, lacking, *how])
        if not of_machine.exists():
            write_atomically(of_machine, alike.encode())
        elif of_machine.read_text("utf-8") != alike:
            why = "it is of another machine, or of other versions; name another folder"
            raise SystemExit(f"Nothing was measured. --found {folder}: {why}")

    def outcome(self, part: Part) -> Outcome | None:
        """Return how a part went, if it is kept."""
        file = self._folder / f"{part.name}.json"
        if not file.exists():
            return None
        kept = json.loads(file.read_text("utf-8"))
        return Outcome(part, kept["seconds"], "", kept["found"])

    def keep(self, outcome: Outcome) -> None:
        """Keep an outcome unless the part was ended early, or missed a figure: that one is measured again."""
        if not outcome.problem and all(check["held"] for check in outcome.found.get("checks", [])):
            kept = {"seconds": outcome.seconds, "found": outcome.found}
            write_atomically(self._folder / f"{outcome.part.name}.json", json.dumps(kept).encode())
