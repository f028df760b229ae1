"""The embedded example: a long tail whose truth is known."""

import io
import unicodedata
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.ft2font import FT2Font
from PIL import Image

from thermopile.pipeline.errors import SourceError
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


@pytest.fixture(scope="module")
def altered():
    """Every 29th sample of a source that alters 10 % in each way, by index."""
    source = GlyphSource(5, swap=0.1, duplicate=0.1)
    return {index: source[index] for index in range(0, len(source), 29)}


def test_a_share_of_the_captions_is_of_another_class_and_the_column_says_so():
    source, plain = GlyphSource(5, swap=0.1), GlyphSource(5)
    captions, before = (list(of.captions(np.arange(len(plain)))) for of in (source, plain))
    altered = [i for i in range(len(plain)) if captions[i] != before[i]]
    assert len(altered) == round(0.1 * len(plain))
    assert sorted(captions[i] for i in altered) == sorted(before[i] for i in altered)
    class_of = source.groups().of_sample
    assert len({captions[i].split(" in ")[0] for i in altered if class_of[i] == class_of[0]}) > 10
    for i in altered[::50]:
        assert (source[i].altered, source[i].group, source[i].picture) == ("swapped", plain[i].group, plain[i].picture)
        assert f"the character {source[i].group.lower()} in" not in captions[i]


def test_a_near_duplicate_is_larger_encoded_otherwise_and_captioned_anew():
    source = GlyphSource(5, duplicate=0.1)
    copies = range(10_847, len(source))
    assert len(copies) == 1085
    for i in copies[::100]:
        copy = source[i]
        original = source[int(copy.altered.removeprefix("duplicate of "))]
        assert (copy.group, original.altered, original.key) == (original.group, None, copy.altered[13:])
        assert copy.caption.startswith(f"the character {copy.group.lower()} in DejaVu S")
        assert copy.caption != original.caption
        shown = Image.open(io.BytesIO(copy.picture))
        assert (shown.format, shown.size) == ("JPEG", (IMAGE_SIZE, IMAGE_SIZE))
        of = {i: np.corrcoef(np.ravel(shown), np.ravel(source[i].picture))[0, 1] for i in (int(original.key), 17)}
        assert 0.9 < of[int(original.key)] < 0.9999
        assert of[17] < 0.8


def test_samples_that_are_not_altered_are_those_of_the_plain_source(altered):
    plain, kinds = GlyphSource(5), set()
    for index, sample in altered.items():
        kinds.add((sample.altered or "none").split()[0])
        if sample.altered is None:
            assert sample._replace(picture=None) == plain[index]._replace(picture=None)
            assert np.array_equal(sample.picture, plain[index].picture)
    assert kinds == {"none", "swapped", "duplicate"}


def test_without_alterations_the_source_is_described_as_before():
    assert GlyphSource(5).describe() == {"kind": "glyphs", "seed": 5, "split": "train"}
    assert GlyphSource(5, swap=0.1).describe() == {"kind": "glyphs", "seed": 5, "split": "train", "swap": 0.1}
    assert [GlyphSource(5, swap=swap).alters for swap in (0.0, 0.1)] == [False, True]


def test_the_test_set_is_never_altered():
    test = GlyphSource(5, test=True, swap=0.1, duplicate=0.1)
    assert (len(test), test.alters, test.describe()) == (2000, False, GlyphSource(5, test=True).describe())


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"swap": 0.6, "duplicate": 0.5}, "may add up to 1 at most"),
        ({"swap": float("nan")}, "may add up to 1 at most"),
        ({"swap": 0.0001}, "1 samples cannot be swapped between classes"),
    ],
)
def test_shares_that_cannot_be_had_are_refused(shares, words):
    with pytest.raises(SourceError, match=words):
        GlyphSource(0, **shares)
