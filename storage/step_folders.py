"""Folders `step-N` below a place, on a disk or in a bucket; each appears and disappears as a whole.

On a disk a rename makes a folder appear. In a bucket its seal does: the file that is written last and deleted first.
There the writer's term follows in the name, step-N.TERM: a writer that was cut off shares no object with its
successor. From the first step of a later writer's folders, earlier writers' folders do not count.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from .bucket import Address
from .bucket_log import standing
from .files import own_directory, sync
from .local import LocalPath

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})(?:\.([0-9a-f]{8}))?")


def step_of(name: str) -> int:
    """Return the step in a folder's name; -1 if it is not a step folder's."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


class LocalSteps:
    """Step folders on a disk."""

    def __init__(self, folder: LocalPath) -> None:
        self._folder = folder

    def save(self, step: int, fill: Callable[[LocalPath], None]) -> LocalPath:
        """Write or replace the folder of a step, which `fill` fills. Leaves nothing if it fails."""
        final, building = self._folder / f"step-{step}", self._folder / f".step-{step}.partial"
        own_directory(self._folder)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            fill(building)
        except OSError:
            shutil.rmtree(building, ignore_errors=True)  # free a full disk
            raise
        if final.exists():  # left by a run that resumed from an earlier step
            self._discard(final)
        os.rename(building, final)
        sync(self._folder)
        return final

    def found(self) -> dict[int, LocalPath]:
        """Return step → folder for all complete folders, unordered; empty without the parent folder. Raises OSError."""
        try:
            with os.scandir(self._folder) as entries:
                matches = [_NAME.fullmatch(entry.name) for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return {}
        # Folders with a term were copied from a bucket; a run on a disk adds folders without.
        names = [(parts[2] or "~", int(parts[1]), parts[0]) for parts in matches if parts]
        return {step_of(name): self._folder / name for _, name in standing(names)}

    def remove(self, keep: Collection[int]) -> None:
        """Remove the folders of steps not in `keep`, and leftovers of interrupted writes and removals."""
        for step, path in self.found().items():
            if step not in keep:
                self._discard(self._folder / path.name)
        for leftover in self._folder.glob(".step-*"):
            _remove(leftover)

    def _discard(self, path: LocalPath) -> None:
        """Remove a folder; rename it first, so that a partial folder never looks complete."""
        hidden = path.with_name(f".{path.name}.discarded")
        _remove(hidden)
        os.rename(path, hidden)
        sync(self._folder)
        _remove(hidden)


class BucketSteps:
    """Step folders below an address. files: the names of a folder's files, its seal last."""

    def __init__(self, folder: Address, files: tuple[str, ...]) -> None:
        self._folder, self._files = folder, files
        self._object = re.compile(rf"({_NAME.pattern})/({'|'.join(map(re.escape, files))})")

    def save(self, step: int, fill: Callable[[LocalPath], None]) -> Address:
        """Write the folder of a step, which `fill` fills on this machine."""
        lease = self._folder.lease
        final = self._folder / (f"step-{step}.{lease.term}" if lease else f"step-{step}")
        building = self._folder.parent.made_scratch() / ".checkpoint.partial"
        _remove(building)
        building.mkdir()
        try:
            fill(building)
            for name in self._files:
                (final / name).write(building / name)
        finally:
            _remove(building)
        return final

    def found(self) -> dict[int, Address]:
        """Return step → folder for all complete folders that count, unordered."""
        found = (self._object.fullmatch(name) for name, _, _ in self._folder.listing())
        return {step: self._folder / name for step, name in self._standing(filter(None, found)).items()}

    def remove(self, keep: Collection[int]) -> None:
        """Remove the folders of steps not in `keep`, but nothing newer, which may be a later writer's."""
        found = {name: parts for name, _, _ in self._folder.listing() if (parts := self._object.fullmatch(name))}
        standing_ones = self._standing(found.values())
        kept = {standing_ones[step] for step in keep if step in standing_ones}
        newest = max(keep, default=-1)
        gone = [name for name, parts in found.items() if parts[1] not in kept and int(parts[2]) <= newest]
        for of_seals in (True, False):
            self._folder.remove(name for name in gone if name.endswith(self._files[-1]) is of_seals)

    def _standing(self, objects: Iterable[re.Match[str]]) -> dict[int, str]:
        """Return step → name of the folders that count, given all matches of object names."""
        sealed = [(parts[3] or "", int(parts[2]), parts) for parts in objects if parts[4] == self._files[-1]]
        return {int(parts[2]): parts[1] for _, parts in standing(sealed)}


def _remove(path: Path) -> None:
    """Remove a directory as far as possible; a link is only unlinked."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
