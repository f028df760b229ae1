"""Draw text with Pillow or matplotlib, each character in a font that has it, or as its code point if none has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Self

from PIL import ImageDraw, ImageFont

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLAIN_NOTO = "NotoSans", "-Regular"
"""How names of the first fonts to try begin and end: one for every script, in one style."""
_NOT_FOR_READING = ("lastresort", "adobeblank")
"""Fonts that map every character to a placeholder."""


@dataclass(frozen=True)
class Lettering:
    """Letters of DejaVu, which comes with matplotlib, and of system fonts for what it lacks."""

    size: int
    """Pixels."""
    bold: bool
    fallback: Mapping[str, str]
    """Character that DejaVu lacks → system font file that has it."""

    @classmethod
    def covering(cls, texts: Iterable[str], size: int) -> Self:
        """Find system fonts for the characters of `texts` that DejaVu lacks."""
        missing = {character for text in texts for character in text if ord(character) not in _dejavu_characters()}
        return cls(size, False, _found_in(_system_fonts(), missing) if missing else {})

    def drawable(self, text: str) -> str:
        """Return `text` with characters that no font has written as [U+65E5 U+672C]."""
        runs = groupby(text, lambda one: ord(one) in _dejavu_characters() or one in self.fallback)
        return "".join(
            "".join(run) if known else f"[{' '.join(f'U+{ord(one):04X}' for one in run)}]" for known, run in runs
        )

    def length(self, text: str) -> float:
        """Return the width of a line in pixels."""
        return sum(font.getlength(run) for font, run in self._runs(text))

    def draw(self, onto: ImageDraw.ImageDraw, at: tuple[int, int], text: str, colour: str) -> None:
        """Draw a line with its top left corner at `at`."""
        left, baseline = float(at[0]), at[1] + self._font(None).getmetrics()[0]
        for font, run in self._runs(text):
            onto.text((left, baseline), run, colour, font, anchor="ls")
            left += font.getlength(run)

    def wrapped(self, text: str, width: int, lines: int) -> list[str]:
        """Wrap `text` into at most `lines` lines of `width` pixels, at spaces if possible; cut with an ellipsis."""
        broken: list[str] = []
        while text and len(broken) < lines:
            if self.length(text) <= width:
                return [*broken, text]
            last, mark = len(broken) == lines - 1, "…"
            fits = next(n for n in range(len(text) - 1, -1, -1) if n <= 1 or self.length(text[:n] + mark) <= width)
            space = text.rfind(" ", 1, fits + 1)
            end = fits if last or space < 0 else space
            broken.append(text[:end].rstrip() + (mark if last else ""))
            text = text[end:].lstrip()
        return broken

    def _runs(self, text: str) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
        for file, run in groupby(text, self.fallback.get):
            yield self._font(file), "".join(run)

    def _font(self, file: str | None) -> ImageFont.FreeTypeFont:
        return _font(file or _dejavu("DejaVuSans-Bold.ttf" if self.bold else "DejaVuSans.ttf"), self.size)


def _found_in(files: Iterable[str], missing: set[str]) -> dict[str, str]:
    """Map each character to the first of these font files that can draw it."""
    from matplotlib.ft2font import FT2Font

    found: dict[str, str] = {}
    for file in files:
        try:
            font = FT2Font(file)
        except (OSError, RuntimeError):  # damaged, or unknown to FreeType
            continue
        if font.scalable:  # Pillow cannot scale colour bitmap fonts, as most emoji fonts are
            found |= {character: file for character in missing - found.keys() if font.get_char_index(ord(character))}
        if len(found) == len(missing):
            break
    return found


def letter(figure: Figure) -> None:
    """Draw the characters of a figure's texts that DejaVu lacks as a Lettering does."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        words = text.get_text()
        if all(ord(one) in _dejavu_characters() for one in words):
            continue
        letters = Lettering.covering([words], 0)
        files = dict.fromkeys(letters.fallback.values())
        for file in files.keys() - {entry.fname for entry in fontManager.ttflist}:
            fontManager.addfont(file)  # installed after matplotlib made its list
        text.set_text(letters.drawable(words))
        text.set_fontfamily(["DejaVu Sans", *(FT2Font(file).family_name for file in files)])


def _system_fonts() -> list[str]:
    """Return font files in the order to try them: Noto's plain ones first, as in Debian's fonts-noto packages."""
    from matplotlib.font_manager import findSystemFonts

    def is_other(file: str) -> bool:
        begin, end = _PLAIN_NOTO
        return not (Path(file).name.startswith(begin) and Path(file).stem.endswith(end))

    files = sorted(findSystemFonts(), key=lambda file: (is_other(file), file))
    return [file for file in files if not re.sub(r"\W", "", Path(file).stem).lower().startswith(_NOT_FOR_READING)]


@cache
def _dejavu_characters() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_dejavu("DejaVuSans.ttf")).get_charmap())


def _dejavu(name: str) -> str:
    import matplotlib

    return str(Path(matplotlib.get_data_path(), "fonts", "ttf", name))


@cache
def _font(file: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size)
