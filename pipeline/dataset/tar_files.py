"""The tars of a dataset in place, which hold its pictures: below one root, compared with the index at the start."""

import logging
import os
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from ...storage.bucket_errors import AddressError
from ...storage.local import LocalPath
from ...storage.place import AnyPlace, made_for, place_of
from ..errors import DatasetError
from .index import Tars

_log = logging.getLogger(__name__)


class TarFiles:
    """The tars' places, sizes and versions of today, by number."""

    def __init__(self, recorded: Tars, root: AnyPlace | None = None) -> None:
        """List the root once. root: the folder or address of the tars now; None: as recorded.

        Raises DatasetError for a tar that is missing, or another one; OSError.
        """
        try:
            before = place_of(recorded.root)
            self.root = place_of(root or before)
        except AddressError as error:
            raise DatasetError(f"the root of the tars: {error}") from None
        self.names, self.sizes = [tar.name for tar in recorded.files], [tar.size for tar in recorded.files]
        names = set(self.names)
        found: dict[str, tuple[int, int | str]] = made_for(
            self.root,
            partial(_on_disk, names=names),
            lambda root: {name: (size, version) for name, size, version in root.listing() if name in names},
        )
        may_differ = not self.root.is_remote or self.root != before  # a copy has its own ETag, or time
        others = 0
        for name, size, version in recorded.files:
            size_now, version_now = found.get(name, (None, ""))
            others += version_now != version
            if size_now != size or not (may_differ or version_now == version):
                what = (
                    "is missing, or a link"
                    if size_now is None
                    else "is not what was converted: its size or ETag differs"
                )
                raise DatasetError(
                    f"{self.root / name} {what}. If the tars were moved, name their place with --tars ROOT "
                    "(data.tars); if they were changed, convert them again"
                )
        self.versions = [str(found[name][1]) for name in self.names]
        if others:
            _log.warning("%d tars in %s have another time or ETag, but their size; pictures are verified when read",
                         others, self.root)  # fmt: skip

    def path(self, number: int) -> Path:
        """Return the path of a tar below a local root."""
        return Path(str(self.root), self.names[number])


def _on_disk(root: LocalPath, names: Collection[str]) -> dict[str, tuple[int, int | str]]:
    """Return size and time of change of the regular files that exist; no link is followed below the root."""
    found = dict[str, tuple[int, int | str]]()
    for folder in {os.path.dirname(name) for name in names}:
        if (root / folder).resolve() != root.resolve() / folder:
            continue
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / folder) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                if name in names and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found[name] = status.st_size, status.st_mtime_ns
    return found
