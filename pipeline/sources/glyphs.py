"""The embedded example: a long-tailed image-caption dataset with known classes, drawn without any download.

It has 100 characters in the DejaVu fonts shipped with matplotlib. Class sizes fall exponentially from 500 to 5, as in
CIFAR100-LT with imbalance 100: 10,847 samples. The balanced test set has 20 samples per class. On request some captions
are swapped and near-duplicates added, to test whether they are found.
"""

import io
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ...storage.arrays import Int64s
from ..errors import SourceError
from . import ClassGroups, Sample, Source
from .splits import swapped_between_classes

# No characters that differ only in size (o, O), nor look-alikes of different scripts (Latin B, Greek Β): drawings vary
# in size and shift, so such pairs would be one class under two names.
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


def class_sizes() -> Int64s:
    """Return samples per class, int64 [100], from the most frequent to the rarest."""
    rank = np.arange(len(CHARACTERS)) / (len(CHARACTERS) - 1)
    return np.floor(LARGEST_CLASS * IMBALANCE**-rank + 1e-9).astype(np.int64)


class GlyphSource(Source):
    """The seed alone determines class frequencies, all drawings and all alterations.

    swap: share of training samples that get the caption of a sample of another class. duplicate: share whose picture
    is added once more, magnified by 2 to 5 % and encoded at another quality, with another caption of its class.
    No sample is both. The test set is never altered. Raises SourceError if the shares exceed 1, or too few to swap.
    """

    mode = "pairs"

    def __init__(self, seed: int, *, test: bool = False, swap: float = 0.0, duplicate: float = 0.0) -> None:
        self.seed = seed
        self.test = test
        self._shares = {} if test else {name: of for name, of in (("swap", swap), ("duplicate", duplicate)) if of}
        self.alters = bool(self._shares)
        by_rank = np.random.default_rng([seed, 0]).permutation(len(CHARACTERS))
        sizes = np.full(len(CHARACTERS), TEST_PER_CLASS) if test else class_sizes()
        drawn: Int64s = np.repeat(by_rank, sizes)
        if not sum(self._shares.values()) <= 1:  # also refuses NaN
            raise SourceError("--swap and --duplicate alter different samples: their shares may add up to 1 at most")
        swap, duplicate = (round(self._shares.get(name, 0.0) * len(drawn)) for name in ("swap", "duplicate"))
        chosen = np.random.default_rng([seed, 6]).permutation(len(drawn))
        swapped, duplicated = chosen[:swap], chosen[swap : swap + duplicate]
        self._caption_of = np.arange(len(drawn) + len(duplicated))
        """int64 [n]: index of the sample that gives each its caption."""
        self._caption_of[swapped] = swapped_between_classes(swapped, drawn[swapped], np.random.default_rng([seed, 8]))
        self._picture_of = np.append(np.arange(len(drawn)), duplicated)
        """int64 [n]: index of the sample that gives each its picture."""
        self._characters = drawn[self._picture_of]

    def __len__(self) -> int:
        return len(self._characters)

    def describe(self) -> dict[str, Any]:
        return {"kind": "glyphs", "seed": self.seed, "split": "test" if self.test else "train", **self._shares}

    def groups(self) -> ClassGroups:
        return ClassGroups(tuple(map(unicodedata.name, CHARACTERS)), self._characters.astype(np.int32))

    def captions(self, indices: Int64s) -> Iterator[str]:
        return map(self._caption, indices.tolist())

    def stored_bytes(self) -> int:
        return len(self) * IMAGE_SIZE**2 * 3

    def __getitem__(self, index: int) -> Sample:
        original = int(self._picture_of[index])
        rng = np.random.default_rng([self.seed, 2 + self.test, original])
        picture: Image.Image | bytes = (drawn := _draw(self._character(original), self._font_of(original), rng))
        altered = "swapped" if self._caption_of[index] != index else None
        if original != index:
            # The middle, enlarged by 2 to 5 % to the same size, at a quality of 50 to 80.
            rng, encoded = np.random.default_rng([self.seed, 7, index]), io.BytesIO()
            margin = (1 - 1 / rng.uniform(1.02, 1.05)) * IMAGE_SIZE / 2
            box = (margin, margin, IMAGE_SIZE - margin, IMAGE_SIZE - margin)
            larger = drawn.resize(drawn.size, Image.Resampling.BICUBIC, box)
            larger.save(encoded, "JPEG", quality=int(rng.integers(50, 81)))
            picture = encoded.getvalue()
            altered = f"duplicate of {self.key(original)}"
        group = unicodedata.name(self._character(index))
        return Sample(self.uri(index), self.key(index), picture, self._caption(index), group, altered=altered)

    def uri(self, index: int) -> str:
        return f"glyphs:U+{ord(self._character(index)):04X}/{index}"

    def key(self, index: int) -> str:
        return f"{index:08d}"

    def _character(self, index: int) -> str:
        return CHARACTERS[self._characters[index]]

    def _caption(self, index: int) -> str:
        shown = int(self._caption_of[index])
        family, style = _font(self._font_of(shown), IMAGE_SIZE).getname()
        return f"the character {unicodedata.name(self._character(shown)).lower()} in {family} {style}"

    def _font_of(self, index: int) -> str:
        """Draw the font from its own generator, so that a caption does not need the picture."""
        original = int(self._picture_of[index])
        fonts = FONTS if original == index else tuple(font for font in FONTS if font != self._font_of(original))
        return fonts[np.random.default_rng([self.seed, 4 + self.test, index]).integers(len(fonts))]


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
