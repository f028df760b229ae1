"""Every random choice in a view, as a function of (seed, epoch, sample id, view)."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from thermopile.pipeline.augment import RECIPES, Recipe, crop_box, view_key, view_parameters

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


def draw(samples=4000, view=0, seed=0, epoch=0, first_id=0, **settings):
    ids, sides = np.arange(first_id, first_id + samples), np.full(samples, 300)
    return view_parameters(Recipe(**settings), seed, epoch, ids, sides, sides + 100, view)


def test_what_is_drawn_for_a_sample_depends_on_nothing_else_in_the_batch():
    settings = RECIPES["moco_v3"].model_dump()
    many, few = draw(samples=50, seed=3, epoch=2, **settings), draw(samples=7, seed=3, epoch=2, first_id=20, **settings)
    for of_many, of_few in zip(many, few, strict=True):
        np.testing.assert_array_equal(of_many[20:27], of_few)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_flip_blur_and_solarise_come_as_often_as_asked_in_each_view(share):
    settings = {"flip": share, "blur": (share, 0.5), "solarise": (0.9, share)}
    first, second = draw(**settings), draw(view=1, **settings)
    assert abs(first.flip.mean() - share) < 0.025
    assert abs((first.blur > 0).mean() - share) < 0.025
    assert abs((second.blur > 0).mean() - 0.5) < 0.025
    assert abs(first.solarise.mean() - 0.9) < 0.025
    assert abs(second.solarise.mean() - share) < 0.025


def test_sigma_is_uniform_over_its_range():
    sigma = draw(blur=(1.0, 1.0), sigma=(0.5, 1.5)).blur
    assert np.histogram(sigma, bins=4, range=(0.5, 1.5))[0] / 4000 == pytest.approx([0.25] * 4, abs=0.03)


LUMA = np.array([0.299, 0.587, 0.114])
OPERATIONS = ("brightness", "contrast", "saturation", "hue")
STRENGTHS = {"brightness": 0.8, "contrast": 0.6, "saturation": 0.7, "hue": 0.2}


def test_a_recipe_without_colour_leaves_pixels_as_they_are():
    drawn = draw(samples=20)
    np.testing.assert_allclose(drawn.colour, np.broadcast_to(np.eye(3), (20, 3, 3)), atol=1e-7)
    assert not drawn.colour_mean.any()


def test_brightness_multiplies_by_a_factor_from_its_range():
    drawn = draw(jitter=1.0, brightness=0.8)
    factors = drawn.colour[:, 0, 0]
    np.testing.assert_allclose(drawn.colour, factors[:, None, None] * np.eye(3), atol=1e-6)
    assert not drawn.colour_mean.any()
    assert np.histogram(factors, bins=4, range=(0.2, 1.8))[0] / 4000 == pytest.approx([0.25] * 4, abs=0.03)


def test_contrast_moves_pixels_from_the_mean_grey_which_stays():
    drawn = draw(samples=50, jitter=1.0, contrast=0.8)
    factors = drawn.colour[:, 0, 0]
    assert 0.2 <= factors.min() < 0.6 < 1.4 < factors.max() <= 1.8
    np.testing.assert_allclose(drawn.colour, factors[:, None, None] * np.eye(3), atol=1e-6)
    np.testing.assert_allclose(LUMA @ (drawn.colour + drawn.colour_mean), np.tile(LUMA, (50, 1)), atol=1e-6)


def test_saturation_and_hue_keep_greys_and_luma():
    for settings in ({"saturation": 0.8}, {"hue": 0.2}):
        drawn = draw(samples=50, jitter=1.0, **settings)
        np.testing.assert_allclose(drawn.colour.sum(2), np.ones((50, 3)), atol=1e-6)
        np.testing.assert_allclose(LUMA @ drawn.colour, np.tile(LUMA, (50, 1)), atol=1e-6)
        assert np.abs(drawn.colour - np.eye(3)).max() > 0.1


def test_hue_turns_red_to_green_to_blue_by_at_most_its_range_and_keeps_volumes():
    drawn = draw(jitter=1.0, hue=0.5).colour
    red = drawn[:, :, 0]  # what becomes of pure red
    assert {0, 1, 2} == set(red.argmax(1).tolist())
    small = draw(jitter=1.0, hue=0.05).colour
    assert (small[:, :, 0].argmax(1) == 0).all()
    np.testing.assert_allclose(np.linalg.det(drawn), 1, atol=1e-5)


def test_grayscale_makes_every_channel_the_luma():
    np.testing.assert_allclose(draw(samples=3, grayscale=1.0).colour, np.tile(LUMA, (3, 3, 1)), atol=1e-6)


def test_all_four_together_are_each_after_the_other_in_any_order():
    alone = {name: draw(samples=20, jitter=1.0, **{name: STRENGTHS[name]}) for name in OPERATIONS}
    together = draw(samples=20, jitter=1.0, **STRENGTHS)
    for order in itertools.permutations(OPERATIONS):
        m, k = np.eye(3), np.zeros((20, 3, 3))
        for name in order:
            own = alone[name]
            m, k = own.colour @ m, own.colour @ k + own.colour_mean @ (m + k)  # it sees the mean of what came before
        np.testing.assert_allclose(together.colour, m, atol=1e-5)
        np.testing.assert_allclose(together.colour_mean, k, atol=1e-5)


def test_clip_keeps_nearly_the_whole_picture_and_never_mirrors_text():
    assert RECIPES["clip"].scale == (0.9, 1.0)
    assert RECIPES["clip"].flip == 0


@pytest.mark.parametrize(
    "setting",
    [
        {"flip": 1.5},
        {"blur": (0.5, 1.2)},
        {"solarise": (-0.1, 0)},
        {"sigma": (0.0, 1.0)},
        {"hue": 0.6},
        {"contrast": -1},
        {"scale": (0.0, 1.0)},
        {"scale": (0.5, 0.2)},
        {"ratio": (2.0, 1.0)},
        {"std": (0.0, 1, 1)},
    ],
)
def test_a_recipe_that_cannot_be_is_refused(setting):
    with pytest.raises(ValidationError):
        Recipe(**setting)


def test_aspect_ratio_is_uniform_in_its_logarithm():
    boxes = [crop_box(key_of(sample_id=i), 1000, 1000, (0.1, 0.2), (1 / 4, 4.0)) for i in range(4000)]
    logs = np.array([math.log(w / h) for _, _, h, w in boxes]) / math.log(4)
    assert np.histogram(logs, bins=4, range=(-1, 1))[0] / 4000 == pytest.approx([0.25] * 4, abs=0.03)


def test_a_recipe_says_which_operations_it_can_need():
    needs = {name: (recipe.has_colour, recipe.has_blur, recipe.has_solarise) for name, recipe in RECIPES.items()}
    assert needs == {
        "clip": (False, False, False),
        "crop_flip": (False, False, False),
        "simclr": (True, True, False),
        "simclr_cifar": (True, False, False),
        "moco_v3": (True, True, True),
        "vicreg": (True, True, True),
    }
