"""A conversion of webdataset tars, beside a plain loop of processes that read, decode and write the same.

\b
kept     JPEGs are verified and kept byte for byte
encoded  pictures are reduced to a short side of 224 pixels and encoded again
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from PIL import Image

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.conversion.images import decodes
from thermopile.pipeline.cores import cores
from thermopile.pipeline.dataset.index import ImagePolicy
from thermopile.pipeline.sources.webdataset import WebDatasetSource

from .harness import Figure, Measured, Part, script, take_turns, timed
from .photographs import HEIGHT, WIDTH, jpegs


@dataclass(frozen=True)
class Sizes:
    """Photographs of 400 × 300 pixels in webdataset tars."""

    max_size: int
    """Longest short side that is not reduced: above 300, JPEGs are kept byte for byte."""
    images: int = 5_000
    tars: int = 10
    rounds: int = 7


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Convert the tars, and copy them plainly, once a round each; reading a sample of the tars counts too."""
    policy, workers, out = ImagePolicy(max_size=sizes.max_size), cores(), directory / "out"
    tars, few = write_tars(directory / "tars", sizes.images, sizes.tars), write_tars(directory / "few", 2, 1)

    def converted(paths: list[Path]) -> Callable[[int], float]:
        settings = ConvertSettings(image=policy)
        return _seconds_of(out, lambda: convert(WebDatasetSource(paths), out, settings, workers=workers))

    cold, warm = (converted(few)(start) for start in range(2))
    plainly = _seconds_of(out, lambda: copy_tars(tars, out, policy, workers))
    seconds = take_turns("convert", {"convert": converted(tars), "plain": plainly}, sizes.rounds)
    rates = {name: [sizes.images / of_round for of_round in times] for name, times in seconds.items()}
    kept = sizes.max_size >= min(HEIGHT, WIDTH)
    what = "JPEGs kept" if kept else f"reduced to {sizes.max_size} pixels and encoded again"
    return Measured(
        f"{sizes.images:,} photographs of {WIDTH}×{HEIGHT} in {sizes.tars} tars, {what}, {workers} processes; medians "
        f"of {sizes.rounds} rounds",
        f"the same processes that only read the tars, {'decode' if kept else 'decode, reduce and encode with Pillow'} "
        "and write one file for each tar",
        (
            Figure.of_rounds("images_per_second", "converted", "/s", rates["convert"], rates["plain"],
                             more_is_better=True, ratio_at_least=0.8),
            Figure("start_up_seconds", "import of what workers need", "s", max(0.0, cold - warm)),
        ),
        notes=["Imports, once in a process, count for neither; starting the workers counts for both."],
    )  # fmt: skip


def _seconds_of(out: Path, work: Callable[[], object]) -> Callable[[int], float]:
    """Seconds of each call, after which `out` is removed."""

    def seconds(number: int) -> float:
        os.sync()  # what was written before is nobody's
        took = timed(work)
        shutil.rmtree(out)
        return took

    return seconds


def write_tars(folder: Path, images: int, tars: int) -> list[Path]:
    """Share photographs out evenly over the tars, each with a class beside it; return the tars in order."""
    folder.mkdir()
    pictures, paths = jpegs(images), [folder / f"{number:05d}.tar" for number in range(tars)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for place in range(number * images // tars, (number + 1) * images // tars):
                for name, data in ((f"{place:08d}.jpg", next(pictures)), (f"{place:08d}.cls", b"%d" % (place % 10))):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


def copy_tars(tars: list[Path], out: Path, policy: ImagePolicy, workers: int) -> int:
    """Write one file for each tar into `out`, on disk at the end, and return the number of pictures.

    Pictures are verified by decoding them and copied, where the policy keeps them, else reduced and encoded again. No
    listing, no permutation, no table, nothing to look a sample up by. The processes start as those of a conversion do.
    """
    out.mkdir()
    with ProcessPoolExecutor(workers, get_context("forkserver")) as pool:
        return sum(pool.map(partial(_copy_tar, out, policy), tars))


def _copy_tar(out: Path, policy: ImagePolicy, path: Path) -> int:
    kept, copied = min(HEIGHT, WIDTH) <= policy.max_size, 0
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


PARTS = {
    "kept": Part(measure, Sizes(512), Sizes(512, images=16, tars=2, rounds=1)),
    "encoded": Part(measure, Sizes(224, rounds=5), Sizes(224, images=16, tars=2, rounds=1)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "ffcv", "pillow")()
