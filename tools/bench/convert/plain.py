"""The same pictures without a dataset: a pool of processes that read tars, decode, and write what they have to one
file for each tar, on disk at the end. No listing, no permutation, no table, nothing to look a sample up by."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from PIL import Image

from ....pipeline.conversion.images import decodes
from ....pipeline.dataset_index import ImagePolicy
from ..isolated import end_with_parent_in_background
from ..photographs import HEIGHT, WIDTH


def copy_tars(tars: list[Path], out: Path, policy: ImagePolicy, workers: int) -> int:
    """Write `out` and return the number of pictures.

    Pictures are verified by decoding them and copied, where the policy keeps them, else reduced and encoded again.
    The processes start as those of a conversion do.
    """
    out.mkdir()
    with ProcessPoolExecutor(workers, get_context("forkserver"), end_with_parent_in_background) as pool:
        return sum(pool.map(partial(_copy_tar, out, policy), tars))


def _copy_tar(out: Path, policy: ImagePolicy, path: Path) -> int:
    kept = min(HEIGHT, WIDTH) <= policy.max_size
    copied = 0
    with (out / path.name).open("wb") as file:
        for jpeg in _pictures(path):
            file.write(_verified(jpeg) if kept else _reduced(jpeg, policy))
            copied += 1
        file.flush()
        os.fsync(file.fileno())
    return copied


def _pictures(path: Path) -> Iterator[bytes]:
    with tarfile.open(path, "r|") as tar:
        for member in tar:
            if member.name.endswith(".jpg") and (opened := tar.extractfile(member)):
                yield opened.read()


def _verified(jpeg: bytes) -> bytes:
    if not decodes(jpeg, HEIGHT, WIDTH):
        raise ValueError("a photograph does not decode")
    return jpeg


def _reduced(jpeg: bytes, policy: ImagePolicy) -> bytes:
    with Image.open(io.BytesIO(jpeg)) as image:
        scale = policy.max_size / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        reduced = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    buffer = io.BytesIO()
    reduced.save(buffer, "JPEG", quality=policy.quality)
    return buffer.getvalue()
