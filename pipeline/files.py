"""Files that are whole or absent, also after a power cut."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path`, flush to disk, then take its place."""
    beside = path.with_name(f".{path.name}.partial")
    beside.write_text(text, "utf-8")
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file's content to disk, or a directory's names: a rename is not durable before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(*files: Path) -> str:
    """sha256 of the files' bytes, one file after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
