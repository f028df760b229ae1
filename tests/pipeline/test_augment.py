"""Crops, flips and normalisation as functions of (seed, epoch, sample id, view)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from thermopile.pipeline.augment import RECIPES, Recipe, crop_box, is_flipped, normalise_into, view_key

sides = st.integers(1, 700)
keys = st.integers(0, 2**64 - 1).map(np.uint64)


def key_of(seed=0, epoch=0, sample_id=0, view=0):
    return np.uint64(view_key(np.uint64(seed), np.uint64(epoch), np.uint64(sample_id), np.uint64(view)))


@given(keys, sides, sides)
def test_a_crop_lies_inside_the_picture_and_is_not_empty(key, height, width):
    top, left, h, w = crop_box(key, height, width, (0.08, 1.0), (3 / 4, 4 / 3))
    assert h >= 1
    assert w >= 1
    assert 0 <= top <= height - h
    assert 0 <= left <= width - w


def test_crops_have_the_area_and_aspect_ratio_asked_for():
    boxes = np.array([crop_box(key_of(sample_id=i), 300, 400, (0.2, 0.6), (3 / 4, 4 / 3)) for i in range(2000)])
    area, aspect = boxes[:, 2] * boxes[:, 3] / 120_000, boxes[:, 3] / boxes[:, 2]
    assert 0.195 < area.min() < 0.21
    assert 0.59 < area.max() < 0.61
    assert abs(area.mean() - 0.4) < 0.01
    assert 0.74 < aspect.min() < 0.76
    assert 1.32 < aspect.max() < 1.35
    assert abs(np.log(aspect).mean()) < 0.01


@pytest.mark.parametrize(("height", "width", "expected"), [(10, 1000, (0, 494, 10, 13)), (1000, 10, (494, 0, 13, 10))])
def test_a_picture_too_long_for_any_crop_gives_its_centre(height, width, expected):
    # Area 1.0 of so long a picture fits no allowed aspect ratio, so every attempt fails.
    top, left, h, w = crop_box(key_of(), height, width, (1.0, 1.0), (3 / 4, 4 / 3))
    assert (h, w) == (min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))) == expected[2:]
    assert abs(top - expected[0]) + abs(left - expected[1]) <= 1


def test_randomness_differs_between_seeds_epochs_samples_and_views():
    keys = {int(key_of(**{name: value})) for name in ("seed", "epoch", "sample_id", "view") for value in (1, 2, 3)}
    assert len(keys) == 12


def test_flips_come_as_often_as_asked():
    flips = np.mean([is_flipped(key_of(sample_id=i), 0.3) for i in range(5000)])
    assert abs(flips - 0.3) < 0.02
    assert not any(is_flipped(key_of(sample_id=i), 0.0) for i in range(100))


@pytest.mark.parametrize("flipped", [False, True])
def test_normalised_pixels_are_channels_first_and_mirrored_where_flipped(flipped):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    gain, offset = np.array([0.5, 1.0, 2.0], np.float32), np.array([1.0, 0.0, -1.0], np.float32)
    out = np.empty((3, 5, 7), np.float32)
    normalise_into(out, pixels, flipped, gain, offset)
    source = pixels[:, ::-1] if flipped else pixels
    np.testing.assert_array_equal(out, source.transpose(2, 0, 1) * gain[:, None, None] + offset[:, None, None])


def test_clip_keeps_nearly_the_whole_picture_and_never_mirrors_text():
    assert RECIPES["clip"].scale == (0.9, 1.0)
    assert RECIPES["clip"].flip == 0


@pytest.mark.parametrize(
    "setting",
    [{"flip": 1.5}, {"scale": (0.0, 1.0)}, {"scale": (0.5, 0.2)}, {"ratio": (2.0, 1.0)}, {"std": (0.0, 1, 1)}],
)
def test_a_recipe_that_cannot_be_is_refused(setting):
    with pytest.raises(ValidationError):
        Recipe(**setting)


def test_aspect_ratio_is_uniform_in_its_logarithm():
    boxes = [crop_box(key_of(sample_id=i), 1000, 1000, (0.1, 0.2), (1 / 4, 4.0)) for i in range(4000)]
    logs = np.array([math.log(w / h) for _, _, h, w in boxes]) / math.log(4)
    assert np.histogram(logs, bins=4, range=(-1, 1))[0] / 4000 == pytest.approx([0.25] * 4, abs=0.03)
