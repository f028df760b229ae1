"""Photographs in webdataset tars."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from ..photographs import jpegs


def write_tars(folder: Path, images: int, tars: int) -> list[Path]:
    """Share the images out evenly over the tars, each with a class beside it; returns the tars in order."""
    pictures = jpegs(images)
    paths = []
    for number in range(tars):
        paths.append(folder / f"{number:05d}.tar")
        with tarfile.open(paths[-1], "w") as tar:
            for place in range(number * images // tars, (number + 1) * images // tars):
                _add(tar, f"{place:08d}.jpg", next(pictures))
                _add(tar, f"{place:08d}.cls", b"%d" % (place % 10))
    return paths


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
