"""Make pairs of public-domain drawings and their titles: FOLDER/pairs.csv, which `thermopile convert csv` reads.

The drawings are those of Debian's packages openclipart-png and openclipart-svg, 156 MB, which are fetched into FOLDER
once. A caption is the title of a drawing's SVG and up to six of its keywords; a class is the folder that it is in.
"""

from __future__ import annotations

import csv
import math
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import click
from PIL import Image

PACKAGES = ("openclipart-png", "openclipart-svg")
ROOT = Path("usr/share/openclipart")
KEYWORDS, LETTERS = 6, 3
"""Keywords in a caption, at most; letters, at least."""
CROWD = "shapes/stars"
"""1,350 stars that differ in their number of points and colour."""
SMALL = 128
PIXELS = 50_000_000
"""At most: a dozen drawings have more than a conversion reads."""
NAMES = {
    "cc": "http://web.resource.org/cc/",
    "dc": "http://purl.org/dc/elements/1.1/",
    "rdf": "http://www.w3.org/1999/02/22-rdf-syntax-ns#",
}


class Pair(NamedTuple):
    """A drawing and its caption."""

    filepath: str
    """From FOLDER."""
    title: str
    folder: str
    """Its class."""


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
@click.option("--crowd", is_flag=True, help="Also the 1,350 stars, which crowd out what else there is.")
@click.option(
    "--small",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Write the pairs to this folder as well, of {SMALL} pixels at most.",
)
def main(folder: Path, crowd: bool, small: Path | None) -> None:
    found = make(folder, crowd=crowd)
    if small is not None:
        write_small(folder, found, small)
    click.echo(f"{len(found):,} pairs in {len({pair.folder for pair in found})} folders\nnext: thermopile convert csv "
               f"{folder}/pairs.csv OUT --group folder")  # fmt: skip


def make(folder: Path, *, crowd: bool = False) -> list[Pair]:
    """Write pairs.csv; return its rows, in its order."""
    fetch(folder, PACKAGES)
    found = sorted(pairs(folder, crowd=crowd))
    write_pairs(folder, found)
    return found


def write_pairs(folder: Path, pairs: Sequence[NamedTuple], name: str = "pairs.csv") -> Path:
    """Write a csv of pairs, at least one; return its path."""
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(pairs[0]._fields)
        lines.writerows(pairs)
    return folder / name


def write_small(folder: Path, pairs: Sequence[Pair], to: Path) -> None:
    """Write pairs.csv, and the drawings as JPEGs on white, to a folder that may be there."""
    to.mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(pairs):
        with Image.open(folder / pair.filepath) as drawing:
            drawn = drawing.convert("RGBA")
        drawn.thumbnail((SMALL, SMALL))
        picture = Image.new("RGB", drawn.size, "white")
        picture.paste(drawn, mask=drawn)
        picture.save(to / f"{number}.jpg", quality=90)
    write_pairs(to, [pair._replace(filepath=f"{number}.jpg") for number, pair in enumerate(pairs)])


def fetch(folder: Path, packages: Sequence[str]) -> None:
    """Fetch and unpack Debian's packages, if they are not there."""
    for package in packages:
        if (folder / package).exists():
            continue
        click.echo(f"fetching {package}", err=True)
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
        (archive,) = folder.glob(f"{package}_*.deb")
        partial = folder / f".{package}"
        subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
        partial.rename(folder / package)
        archive.unlink()


def pairs(folder: Path, *, crowd: bool = False) -> Iterator[Pair]:
    """Yield the drawings that have a caption: none twice, no icons of themes, the crowd only if wanted."""
    png, svg = (folder / package / ROOT / package.rpartition("-")[2] for package in PACKAGES)
    for picture in png.rglob("*.png"):
        inside = picture.relative_to(png)
        drawing = svg / inside.with_suffix(".svg")
        is_link = picture.is_symlink() or drawing.is_symlink()
        is_left_out = "theme" in str(inside) or (inside.parent == Path(CROWD) and not crowd)
        if is_link or is_left_out or not drawing.is_file() or math.prod(size(picture)) > PIXELS:
            continue
        caption = caption_of(drawing)
        if sum(map(str.isalpha, caption)) >= LETTERS:
            yield Pair(str(picture.relative_to(folder)), caption, str(inside.parent))


def size(picture: Path) -> tuple[int, int]:
    """Return the width and height that a PNG begins with."""
    with picture.open("rb") as file:
        width, height = struct.unpack(">16xII", file.read(24))
    return width, height


def caption_of(drawing: Path) -> str:
    """Return a drawing's title and keywords; empty where its XML is broken."""
    try:
        work = ElementTree.parse(drawing).find(".//cc:Work", NAMES)
    except ElementTree.ParseError:
        return ""
    if work is None:
        return ""
    title = work.findtext("dc:title", "", NAMES)
    keywords = [item.text or "" for item in work.findall("dc:subject/rdf:Bag/rdf:li", NAMES)]
    words = [" ".join(word.split()) for word in [title, *keywords[:KEYWORDS]]]
    return ", ".join(word for word in words if word)


if __name__ == "__main__":
    main()
