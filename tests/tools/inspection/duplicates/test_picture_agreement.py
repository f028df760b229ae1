"""Which pairs of pictures count as the same: copies that were scaled, shifted and encoded again, and no others."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance

from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.tools.inspection.duplicates.same_pictures import (
    EDGE,
    MAX_DIFFERENCE,
    MIN_CORRELATION,
    agreement,
    prepare,
)

from support.pictures import draw, encoded, magnified


def prepared(*pictures):
    square = [picture.convert("RGB").resize((EDGE, EDGE), Image.Resampling.BOX) for picture in pictures]
    return prepare(np.stack([np.asarray(picture, np.float32).transpose(2, 0, 1) for picture in square]))


@pytest.fixture(scope="module")
def glyphs():
    source = GlyphSource(5)
    return [source[index].picture for index in range(0, len(source), 500)]


@pytest.mark.parametrize("by", [1.0, 1.02, 1.05])
@pytest.mark.parametrize("quality", [50, 95])
def test_a_picture_and_its_copy_of_another_scale_and_quality_agree(glyphs, by, quality):
    first = prepared(*(encoded(glyph, 90) for glyph in glyphs))
    second = prepared(*(encoded(magnified(glyph, by), quality) for glyph in glyphs))
    assert agreement(first, second).same.all()
    assert agreement(second, first).same.all()


@pytest.mark.parametrize("shift", [(0.7, -0.7), (-0.4, 0.5)])
def test_a_part_of_a_picture_agrees_with_it(glyphs, shift):
    second = prepared(*(encoded(magnified(glyph, 1.06, shift), 80) for glyph in glyphs))
    assert agreement(prepared(*glyphs), second).same.all()


def test_a_shift_of_two_pixels_is_found_in_fine_structure():
    coarse = np.random.default_rng(0).integers(0, 256, (8, 18, 18, 3), dtype=np.uint8)
    large = [Image.fromarray(one).resize((36, 36), Image.Resampling.BICUBIC) for one in coarse]
    first, second = (prepared(*(one.crop((x, x, x + 32, x + 32)) for one in large)) for x in (1, 3))
    assert agreement(first, second).same.all()


def test_brightness_and_contrast_do_not_count(glyphs):
    changed = [ImageEnhance.Contrast(ImageEnhance.Brightness(glyph).enhance(0.9)).enhance(0.9) for glyph in glyphs]
    assert agreement(prepared(*glyphs), prepared(*changed)).same.all()


def test_the_same_drawing_with_noise_of_its_own_does_not_agree():
    # The same character, font, size and pose: only the noise tells them apart.
    from thermopile.pipeline.sources import glyphs as module

    class Noise:
        """Draws as a generator that is seeded alike, but for the noise."""

        def __init__(self, seed):
            self._pose, self._noise = np.random.default_rng(0), np.random.default_rng(seed)

        def __getattr__(self, name):
            return getattr(self._noise if name == "normal" else self._pose, name)

    first, second = (prepared(*(module._draw(c, module.FONTS[0], Noise(seed)) for c in "AQ&ж8")) for seed in (1, 2))
    compared = agreement(first, second)
    assert (compared.correlation > MIN_CORRELATION).any()
    assert not compared.same.any()


def test_pictures_of_one_colour_agree_with_nothing(glyphs):
    grey = [Image.new("RGB", (32, 32), (level, level, level)) for level in (0, 128, 128, 255)]
    flat = prepared(*grey)
    with np.errstate(all="raise"):
        assert not agreement(flat, flat[::-1]).same.any()
        assert not agreement(flat, prepared(*glyphs[:4])).same.any()
        assert not agreement(prepared(*glyphs[:4]), flat).same.any()


def test_other_pictures_do_not_agree():
    first, second = (prepared(*(draw(seed) for seed in seeds)) for seeds in (range(40), range(40, 80)))
    assert not agreement(first, second).same.any()


def ring(radius, level):
    """A thin ring on white."""
    picture = Image.new("RGB", (512, 512), "white")
    box = [256 - 4 * radius] * 2 + [256 + 4 * radius] * 2
    ImageDraw.Draw(picture).ellipse(box, outline=(level,) * 3, width=12)
    return picture.resize((128, 128), Image.Resampling.LANCZOS)


@pytest.mark.parametrize("level", [240, 220, 128, 0])
def test_pale_rings_of_other_radii_do_not_agree_though_hardly_different(level):
    first, second = ([ring(radius * by, level) for radius in range(24, 52, 2)] for by in (1, 1.12))
    compared = agreement(prepared(*first), prepared(*second))
    assert not compared.same.any()
    if level > 200:
        assert (compared.difference <= MAX_DIFFERENCE).all()
    copies = [encoded(magnified(one, 1.03), 80) for one in first]
    assert level == 0 or agreement(prepared(*first), prepared(*copies)).same.all()  # black ones differ too much
