"""A crop of a picture, resized as Pillow's antialiased BILINEAR does it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from thermopile.pipeline.views.resample import resample_into, triangle_filter


def resampled(picture, box, size, *, flip=False):
    out = np.full((3, size, size), np.nan, np.float32)
    resample_into(out, picture, *(float(edge) for edge in box), flip)
    return out.transpose(1, 2, 0)


def picture_of(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@st.composite
def boxes(draw):
    height, width = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    h, w = draw(st.integers(1, height)), draw(st.integers(1, width))
    return height, width, (draw(st.integers(0, height - h)), draw(st.integers(0, width - w)), h, w)


@given(boxes(), st.integers(1, 40), st.booleans())
def test_any_box_of_any_picture_is_what_pillow_makes_of_it(case, size, flip):
    height, width, (top, left, h, w) = case
    picture = picture_of(height, width, seed=height * width)
    image = Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # Pillow rounds to whole levels after each of its two passes; ours to quarters after the first.
    assert np.abs(resampled(picture, (top, left, h, w), size, flip=flip) - np.asarray(image, float)).max() <= 1.3


def test_a_crop_of_the_view_s_own_size_is_copied_exactly():
    picture = picture_of(60, 80)
    np.testing.assert_array_equal(resampled(picture, (10, 20, 32, 32), 32), picture[10:42, 20:52])


@pytest.mark.parametrize("value", [0, 1, 254, 255])
def test_a_picture_of_one_level_keeps_it_exactly_at_the_ends_of_the_range(value):
    picture = np.full((333, 417, 3), value, np.uint8)
    for size in (7, 224, 500):
        np.testing.assert_array_equal(resampled(picture, (0, 0, 333, 417), size), np.full((size, size, 3), value))


@given(st.floats(0, 50), st.floats(0.5, 200), st.integers(0, 100), st.integers(1, 64))
def test_weights_of_every_output_are_not_negative_add_up_to_one_and_stay_inside(start, length, beyond, size):
    source = int(start + length) + 1 + beyond
    first, weights = triangle_filter(start, length, source, size)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(0), 1, atol=1e-5)
    assert first.min() >= 0
    assert first.max() + len(weights) <= source
