"""Make pairs of emoji and their names: FOLDER/pairs.csv, which `thermopile convert csv` reads.

The pictures are those of Debian's package fonts-noto-color-emoji, 10 MB, which is fetched into FOLDER once, at 64
pixels. A caption is made of the Unicode names of an emoji's characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import click
from fontTools.ttLib import TTFont
from PIL import Image

from .openclipart import fetch, write_pairs

PACKAGE = "fonts-noto-color-emoji"
FONT = Path("usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
PIXELS = 64
JOINERS = "\u200d\ufe0f"
"""Characters that join others or choose their picture: they are not in the caption."""
SHORTER = {"emoji modifier fitzpatrick": "skin", "regional indicator symbol letter": "flag letter"}


class Pair(NamedTuple):
    """An emoji and its caption."""

    filepath: str
    """From FOLDER."""
    title: str


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    click.echo(f"{len(make(folder)):,} pairs\nnext: thermopile convert csv {folder}/pairs.csv OUT")


def make(folder: Path) -> list[Pair]:
    """Write the pictures and pairs.csv; return its rows, in its order."""
    fetch(folder, [PACKAGE])
    (folder / "pictures").mkdir(exist_ok=True)
    found = []
    for glyph, caption, png in sorted(emoji(folder / PACKAGE / FONT)):
        pair = Pair(f"pictures/{glyph}.png", caption)
        Image.open(BytesIO(png)).convert("RGBA").resize((PIXELS, PIXELS), Image.Resampling.LANCZOS).save(
            folder / pair.filepath
        )
        found.append(pair)
    write_pairs(folder, found)
    return found


def emoji(path: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield the glyph, caption and PNG of each emoji; no picture and no caption twice."""
    font = TTFont(path)
    captions: set[str] = set()
    pictures: set[bytes] = set()
    (strike,) = font["CBDT"].strikeData
    for glyph, text in sorted(texts(font).items()):
        names = [unicodedata.name(character, "") for character in text if character not in JOINERS]
        caption = ", ".join(filter(None, names)).lower()
        for long, short in SHORTER.items():
            caption = caption.replace(long, short)
        if caption and glyph in strike and caption not in captions and (png := strike[glyph].imageData) not in pictures:
            captions.add(caption)
            pictures.add(png)
            yield glyph, caption, png


def texts(font: TTFont) -> dict[str, str]:
    """Return the characters that each glyph stands for: one, or several that are drawn as one."""
    found = {glyph: chr(code) for code, glyph in font.getBestCmap().items()}
    single = dict(found)
    for lookup in font["GSUB"].table.LookupList.Lookup:
        for table in lookup.SubTable:
            for first, ligatures in getattr(table, "ligatures", {}).items():
                for ligature in ligatures:
                    parts = [first, *ligature.Component]
                    if all(part in single for part in parts):
                        found.setdefault(ligature.LigGlyph, "".join(single[part] for part in parts))
    return found


if __name__ == "__main__":
    main()
