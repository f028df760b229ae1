"""The embedded example: a long-tailed image-caption dataset with known classes, drawn without any download.

It has 100 characters in the DejaVu fonts shipped with matplotlib. Class sizes fall exponentially from 500 to 5, as in
CIFAR100-LT with imbalance 100: 10,847 samples. The balanced test set has 20 samples per class.
"""

import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from . import Groups, Sample, Source

# No two that differ only in size (o, O), nor look-alikes of different scripts (Latin B, Greek Β): drawings vary in
# size and shift, so such pairs would be one class under two names.
CHARACTERS = "23456789ABCDEFGHJKLMNPQRSTUVWXYZabdefghqrtyΓΔΛΞΠΣΦΨΩαβγδεζηθλμξπςστφψωБДЖИЛЦШЫЭЮЯ?!#$%&@€£¥§∂±÷√∫≈≠∞"
FONTS = tuple(
    f"DejaVu{family}{style}.ttf"
    for family, slant in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slant}", f"-Bold{slant}")
)
IMAGE_SIZE = 32
LARGEST_CLASS = 500
IMBALANCE = 100
TEST_PER_CLASS = 20


def class_sizes() -> NDArray[np.int64]:
    """Return samples per class, int64 [100], from the most frequent to the rarest."""
    rank = np.arange(len(CHARACTERS)) / (len(CHARACTERS) - 1)
    return np.floor(LARGEST_CLASS * IMBALANCE**-rank + 1e-9).astype(np.int64)


class GlyphSource(Source):
    """Class frequencies and all drawings depend only on the seed."""

    mode = "pairs"

    def __init__(self, seed: int, *, test: bool = False) -> None:
        self.seed = seed
        self.test = test
        by_rank = np.random.default_rng([seed, 0]).permutation(len(CHARACTERS))
        sizes = np.full(len(CHARACTERS), TEST_PER_CLASS) if test else class_sizes()
        self._characters: NDArray[np.int64] = np.repeat(by_rank, sizes)

    def __len__(self) -> int:
        return len(self._characters)

    def describe(self) -> dict[str, Any]:
        return {"kind": "glyphs", "seed": self.seed, "split": "test" if self.test else "train"}

    def groups(self) -> Groups:
        return Groups(tuple(unicodedata.name(character) for character in CHARACTERS), self._characters.astype(np.int32))

    def captions(self, indices: NDArray[np.int64]) -> Iterator[str]:
        for index in indices.tolist():
            yield _caption(CHARACTERS[self._characters[index]], self._font_of(index))

    def stored_bytes(self) -> int:
        return len(self) * IMAGE_SIZE**2 * 3

    def __getitem__(self, index: int) -> Sample:
        character, font = CHARACTERS[self._characters[index]], self._font_of(index)
        picture = _draw(character, font, np.random.default_rng([self.seed, 2 + self.test, index]))
        caption = _caption(character, font)
        return Sample(self.uri(index), self.key(index), picture, caption, group=unicodedata.name(character))

    def uri(self, index: int) -> str:
        return f"glyphs:U+{ord(CHARACTERS[self._characters[index]]):04X}/{index}"

    def key(self, index: int) -> str:
        return f"{index:08d}"

    def _font_of(self, index: int) -> str:
        """Draw the font from its own generator, so that a caption does not need the picture."""
        return FONTS[np.random.default_rng([self.seed, 4 + self.test, index]).integers(len(FONTS))]


def _caption(character: str, font: str) -> str:
    family, style = _font(font, IMAGE_SIZE).getname()
    return f"the character {unicodedata.name(character).lower()} in {family} {style}"


def _draw(character: str, font: str, rng: np.random.Generator) -> Image.Image:
    """Draw a light glyph on a dark ground with random size, shift, rotation (±15°) and noise, 32×32."""
    size = int(rng.integers(18, 27))
    shift = rng.uniform(-3, 3, size=2) + IMAGE_SIZE / 2
    glyph = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE))
    ImageDraw.Draw(glyph).text((shift[0], shift[1]), character, fill=255, font=_font(font, size), anchor="mm")
    turned = glyph.rotate(rng.uniform(-15, 15), resample=Image.Resampling.BILINEAR)
    ink, ground = rng.uniform(170, 255), rng.uniform(0, 60)
    clean = ground + np.asarray(turned)[..., None] / 255 * (ink - ground)
    pixels = clean + rng.normal(0, 12, (IMAGE_SIZE, IMAGE_SIZE, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)
