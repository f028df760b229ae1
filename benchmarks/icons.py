"""Make pairs of icons and their names: FOLDER/icons.parquet, or icons-N-SEED.parquet, which is left if it is there.

The icons are those of npm's package @iconify/json, 104 MB, which is fetched into FOLDER once; they are drawn at 48
pixels, black on white where they have no colour. A caption is an icon's name in words, a class the title of its set.
Sets whose licence forbids derived or commercial works are left out; --licences lists all. The drawing needs resvg:

\b
  pip install --no-deps --target build/resvg resvg-py
  PYTHONPATH=build/resvg python -m benchmarks.icons FOLDER               # all: about five minutes on two cores
  PYTHONPATH=build/resvg python -m benchmarks.icons FOLDER --icons 40000
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .markdown import table

VERSION = "2.2.535"
PACKAGE = f"@iconify/json@{VERSION}"
ARCHIVE = f"iconify-json-{VERSION}.tgz"
FORBIDDING = {"NC", "ND"}
"""Parts of a licence's SPDX name that forbid commercial use (NC) or derived works (ND)."""
PIXELS, EDGE = 48, 16
"""A drawing's side, and an icon's where its set does not say."""
PROCESSES, TOGETHER, ROWS = 2, 500, 10_000
"""Icons that a process is given at a time, and rows of a part of the file."""
HELD_OUT, TESTED = 10, 0.02
"""Sets that are held out of training whole, and the share of the other icons that are in a test set."""
MIDDLE = 1 / 800, 1 / 200
"""Shares of all icons between which the size of a set is that may be held out."""


class Split(NamedTuple):
    """Which icons are for what: their places in the file, ascending, int64."""

    train: NDArray[np.int64]
    development: NDArray[np.int64]
    """The test set of searches."""
    at_random: NDArray[np.int64]
    held_out: NDArray[np.int64]
    """All icons of some sets, whose style no other part has."""


class Icon(NamedTuple):
    """An icon, not yet drawn."""

    set: str
    """The title of its set."""
    name: str
    svg: str


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
@click.option("--icons", type=click.IntRange(1), help="Draw this many at random. Default: all.")
@click.option("--seed", default=0, show_default=True, help="Seed that draws them.")
@click.option("--licences", is_flag=True, help="List the sets with their licences instead.")
def main(folder: Path, icons: int | None, seed: int, licences: bool) -> None:
    if licences:
        click.echo(licence_table(fetch(folder)))
        return
    click.echo(f"next: thermopile convert parquet {make(folder, icons, seed)} OUT --group set")


def make(folder: Path, icons: int | None = None, seed: int = 0) -> Path:
    """Return the file of all icons, or of `icons` at random, without those that resvg refuses. Write it if missing."""
    path = folder / ("icons.parquet" if icons is None else f"icons-{icons}-{seed}.parquet")
    if path.exists():
        return path
    if find_spec("resvg_py") is None:
        raise click.ClickException("resvg is not installed; see python -m benchmarks.icons --help")
    found = chosen(sorted(listed(fetch(folder))), icons, seed)
    partial, drawn = path.with_name(f".{path.name}"), 0
    schema = pa.schema({"image": pa.binary(), "caption": pa.string(), "set": pa.string()})
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool, pq.ParquetWriter(partial, schema) as file:
        pictures = (png for some in pool.map(draw, chunks(found)) for png in some)
        pairs = ((png, icon.name.replace("-", " "), icon.set) for icon, png in zip(found, pictures, strict=True) if png)
        while rows := list(islice(pairs, ROWS)):
            drawn += len(rows)
            file.write_table(pa.table(list(zip(*rows, strict=True)), schema=schema))
            click.echo(f"{drawn:,} of {len(found):,}", err=True)
    partial.rename(path)
    return path


def fetch(folder: Path) -> Path:
    """Fetch the package if it is not there; return the archive."""
    if not (archive := folder / ARCHIVE).exists():
        click.echo(f"fetching {PACKAGE}", err=True)
        partial = folder / ".fetched"
        partial.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", PACKAGE], cwd=partial, check=True, capture_output=True)
        (partial / ARCHIVE).rename(archive)
        partial.rmdir()
    return archive


def sets(archive: Path) -> Iterator[dict[str, Any]]:
    """Yield the sets of icons, as their files have them."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith("package/json/") and (file := tar.extractfile(member)):
                yield json.load(file)


def is_free(info: Mapping[str, Any]) -> bool:
    """Return whether a set's licence lets anyone draw and pass on its icons. A set without an SPDX name is not."""
    spdx = info["license"].get("spdx", "")
    return bool(spdx) and FORBIDDING.isdisjoint(spdx.split("-"))


def licence_table(archive: Path) -> str:
    """Return a table of the sets with their licences."""
    rows = []
    for found in sets(archive):
        info = found["info"]
        left_out = "" if is_free(info) else "left out"
        rows.append((info["name"], info["license"].get("spdx", "none"), f"{len(found['icons']):,}", left_out))
    return table(("set", "licence", "icons", ""), sorted(rows))


def listed(archive: Path) -> Iterator[Icon]:
    """Yield the icons of the free sets that are shown."""
    for found in sets(archive):
        if not is_free(found["info"]):
            continue
        for name, icon in found["icons"].items():
            if not icon.get("hidden"):
                yield Icon(found["info"]["name"], name, svg_of(found | icon))


def svg_of(icon: Mapping[str, Any]) -> str:
    """Return the drawing of an icon that has its set's sizes where it has none of its own."""
    box = [icon.get("left", 0), icon.get("top", 0), icon.get("width", EDGE), icon.get("height", EDGE)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" color="#000" '
        f'width="{PIXELS}" height="{PIXELS}" viewBox="{" ".join(map(str, box))}">{icon["body"]}</svg>'
    )


def chosen(icons: list[Icon], number: int | None, seed: int) -> list[Icon]:
    """Return `number` of the icons at random, or all, in their order."""
    if number is None or number >= len(icons):
        return icons
    return [icons[place] for place in np.sort(np.random.default_rng(seed).permutation(len(icons))[:number])]


def split(sets: Sequence[str], seed: int = 0) -> Split:
    """Split icons, given the set of each: ten whole sets, and twice 2 % of the others at random."""
    rng, of_icon = np.random.default_rng(seed), np.unique(sets, return_inverse=True)[1]
    sizes = np.bincount(of_icon)
    low, high = (share * len(sets) for share in MIDDLE)
    is_out = np.isin(of_icon, rng.permutation(np.flatnonzero((sizes >= low) & (sizes <= high)))[:HELD_OUT])
    others = rng.permutation(np.flatnonzero(~is_out))
    count = round(TESTED * len(others))
    at_random, development, train = map(np.sort, np.split(others, [count, 2 * count]))
    return Split(train, development, at_random, np.flatnonzero(is_out))


def rarest_word_counts(captions: Sequence[str], among: Sequence[str]) -> NDArray[np.int64]:
    """Return for each caption, int64 [captions], how many of others have the word of it that fewest have."""
    counts = Counter(word for caption in among for word in {*caption.lower().split()})
    return np.array([min((counts[word] for word in caption.lower().split()), default=0) for caption in captions])


def chunks(icons: list[Icon]) -> list[list[str]]:
    return [[icon.svg for icon in icons[first : first + TOGETHER]] for first in range(0, len(icons), TOGETHER)]


def draw(svgs: list[str]) -> list[bytes | None]:
    """Return the PNGs of drawings on white; None where resvg refuses one."""
    from resvg_py import svg_to_bytes

    pictures: list[bytes | None] = []
    for svg in svgs:
        try:
            pictures.append(svg_to_bytes(svg_string=svg, background="#ffffff", skip_system_fonts=True))
        except ValueError:
            pictures.append(None)
    return pictures


if __name__ == "__main__":
    main()
