"""The embedded example: a long tail whose truth is known."""

import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.ft2font import FT2Font

from thermopile.pipeline.sources.glyphs import CHARACTERS, FONTS, IMAGE_SIZE, GlyphSource, class_sizes


def test_class_sizes_fall_exponentially_from_500_to_5_over_100_classes():
    sizes = class_sizes()
    assert (len(sizes), sizes[0], sizes[-1], sizes.sum()) == (100, 500, 5, 10_847)
    assert np.log(sizes / (500 * 100.0 ** (-np.arange(100) / 99))).min() > -0.2  # rounding down alone


def test_the_train_set_has_the_class_sizes_and_the_test_set_is_balanced():
    train, test = GlyphSource(0).groups(), GlyphSource(0, test=True).groups()
    assert train.names == test.names == tuple(unicodedata.name(character) for character in CHARACTERS)
    assert sorted(np.bincount(train.of_sample), reverse=True) == class_sizes().tolist()
    assert np.bincount(test.of_sample).tolist() == [20] * 100


@pytest.mark.parametrize("font", FONTS)
def test_every_font_has_every_character(font):
    face = FT2Font(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / font))
    assert [character for character in CHARACTERS if face.get_char_index(ord(character)) == 0] == []


def test_which_classes_are_frequent_depends_on_the_seed():
    assert GlyphSource(0)[0].group != GlyphSource(1)[0].group


def test_a_sample_is_the_same_each_time_and_differs_from_the_others():
    one, again, other = GlyphSource(3)[17], GlyphSource(3)[17], GlyphSource(3)[18]
    assert np.array_equal(one.picture, again.picture)
    assert one._replace(picture=None) == again._replace(picture=None)
    assert not np.array_equal(one.picture, other.picture)
    assert not np.array_equal(one.picture, GlyphSource(3, test=True)[17].picture)


def test_a_caption_names_the_character_and_the_font():
    source = GlyphSource(0)
    sample = source[0]
    assert unicodedata.name(chr(int(sample.uri[9:13], 16))) == sample.group
    assert sample.caption.startswith(f"the character {sample.group.lower()} in DejaVu S")
    assert list(source.captions(np.array([5, 0]))) == [source[5].caption, sample.caption]


def test_pictures_show_the_glyph_in_the_light_on_a_dark_ground():
    for i in range(0, 2000, 97):
        picture = np.asarray(GlyphSource(0, test=True)[i].picture)
        assert picture.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
        edge, middle = picture[:3].mean(), np.sort(picture[8:24, 8:24].ravel())[-60:].mean()
        assert middle > edge + 50
