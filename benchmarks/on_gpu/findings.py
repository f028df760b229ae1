"""What a part finds: tables, figures that were asked for, and remarks, in a file that is always whole."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Findings:
    """Collects what a part finds, and writes it after every step: what a part has found is kept if it is ended."""

    def __init__(self, part: str, folder: Path, device: str, small: bool, to_keep: Path | None = None) -> None:
        """folder: shared by all parts. device: cpu or cuda. small: sizes that take seconds on a CPU. to_keep: a folder
        that outlives the command, if the user named one."""
        self.folder, self.device, self.small, self._to_keep = folder, device, small, to_keep
        self._file = file_of(part, folder)
        self._found: dict[str, Any] = {"tables": [], "checks": [], "notes": [], "values": {}}

    def row(self, table: str, cells: Mapping[str, str], *, again: bool = False) -> None:
        """Add a row to the table of this title; the first one names its columns. again: in place of the last row."""
        tables = {each["title"]: each["rows"] for each in self._found["tables"]}
        if table not in tables:
            tables[table] = []
            self._found["tables"].append({"title": table, "heading": list(cells), "rows": tables[table]})
        if again:
            tables[table].pop()
        tables[table].append([str(cell) for cell in cells.values()])
        self.save()

    def check(self, what: str, asked: str, found: str, held: bool) -> None:
        """Add a figure that has a target."""
        self._found["checks"].append({"what": what, "asked": asked, "found": found, "held": bool(held)})
        self.save()

    def note(self, text: str) -> None:
        """Add a remark, once."""
        if text not in self._found["notes"]:
            self._found["notes"].append(text)
        self.save()

    def keep(self, name: str, value: Any) -> None:
        """Keep a value for a later part."""
        self._found["values"][name] = value
        self.save()

    def keep_folder(self, name: str, folder: Path) -> None:
        """Copy a folder for the user to look at, or say how to get it."""
        if self._to_keep is None:
            self.note(f"{name} was written, and is kept with `FOUND=folder`.")
            return
        shutil.copytree(folder, self._to_keep / name, dirs_exist_ok=True)
        self.note(f"{name} is in the folder of `FOUND`.")

    def kept(self, part: str, name: str, default: Any) -> Any:
        """Return what an earlier part kept."""
        return read(part, self.folder).get("values", {}).get(name, default)

    def save(self) -> None:
        """Write the file."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(self._found), "utf-8")
        os.replace(fresh, self._file)


def file_of(part: str, folder: Path) -> Path:
    """Return the file of what a part finds."""
    return folder / f"{part}.json"


def read(part: str, folder: Path) -> dict[str, Any]:
    """Return what a part has found; empty if it found nothing."""
    file = file_of(part, folder)
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found
