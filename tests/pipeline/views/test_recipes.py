"""Every random choice in a view, as a function of (seed, epoch, sample id, view)."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from thermopile.pipeline.views.draws import crop_box, view_key
from thermopile.pipeline.views.recipes import RECIPES, Recipe, sides_of_views, view_parameters

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


@pytest.mark.parametrize("view", [0, 3])
@pytest.mark.parametrize("name", ["moco_v3", "glyphs"])
def test_what_is_drawn_for_a_sample_depends_on_nothing_else_in_the_batch(name, view):
    settings = RECIPES[name].model_dump() | {"seed": 3, "epoch": 2, "view": view}
    many, few = draw(samples=50, **settings), draw(samples=7, first_id=20, **settings)
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


# Local views


def test_local_views_are_numbered_from_two_on_whether_there_are_one_or_two_others():
    assert sides_of_views(224, 1, 96, 2) == {0: 224, 2: 96, 3: 96}
    assert sides_of_views(224, 2, 96, 1) == {0: 224, 1: 224, 2: 96}
    assert sides_of_views(224, 2, 96, 0) == {0: 224, 1: 224}


def test_a_local_view_s_crop_has_the_area_of_local_views_and_only_its():
    for view, (low, high) in enumerate([(0.5, 1.0), (0.5, 1.0), (0.1, 0.2), (0.1, 0.2)]):
        box = draw(view=view, scale=(0.5, 1.0), local_scale=(0.1, 0.2)).box
        area = box[:, 2] * box[:, 3] / 120_000
        assert low - 0.01 < area.min() < low + 0.01
        assert high - 0.01 < area.max() < high + 0.01


def test_local_views_take_the_probabilities_of_the_first_and_the_second_view_in_turn():
    for view in (2, 3, 4):
        drawn = draw(view=view, samples=10, blur=(1.0, 0.0), solarise=(0.0, 1.0))
        assert (drawn.blur > 0).all() == drawn.blur.any() == (view % 2 == 0)
        assert drawn.solarise.all() == drawn.solarise.any() == (view % 2 == 1)


# The affine map and noise

AFFINE = {"zoom": (0.5, 2.0), "shear": 30, "rotation": 40, "shift": 0.2}
"""Settings in the order in which they come one after the other."""


def test_a_recipe_without_an_affine_map_moves_nothing_and_adds_no_noise():
    drawn = draw(samples=20)
    np.testing.assert_array_equal(drawn.affine, np.broadcast_to(np.eye(3)[:2], (20, 2, 3)))
    assert not drawn.noise.any()


def test_angles_magnification_shift_and_deviation_are_uniform_over_their_ranges():
    turned = draw(rotation=40).affine
    np.testing.assert_allclose(turned[:, :, :2] @ turned[:, :, :2].transpose(0, 2, 1), np.tile(np.eye(2), (4000, 1, 1)),
                               atol=1e-6)  # fmt: skip
    shift = draw(shift=0.2).affine[:, :, 2]
    for values, low, high in (
        (np.degrees(np.arctan2(turned[:, 0, 1], turned[:, 0, 0])), -40, 40),
        (np.degrees(np.arctan(draw(shear=30).affine[:, 0, 1])), -30, 30),
        (1 / draw(zoom=(0.5, 2.0)).affine[:, 0, 0], 0.5, 2),
        (shift[:, 0], -0.2, 0.2),
        (shift[:, 1], -0.2, 0.2),
        (draw(noise=(5, 25)).noise, 5, 25),
    ):
        assert np.histogram(values, bins=4, range=(low, high))[0] / 4000 == pytest.approx([0.25] * 4, abs=0.03)
    assert abs(np.corrcoef(shift.T)[0, 1]) < 0.05


def test_an_affine_map_undoes_zoom_shear_rotation_and_shift_in_this_order():
    def homogeneous(**settings):
        drawn = draw(samples=20, **settings).affine
        return np.concatenate([drawn, np.tile([[[0.0, 0, 1]]], (20, 1, 1))], axis=1)

    together = np.tile(np.eye(3), (20, 1, 1))
    for name, value in AFFINE.items():
        together = together @ homogeneous(**{name: value})
    np.testing.assert_allclose(homogeneous(**AFFINE), together, atol=1e-6)


def test_every_view_of_every_sample_has_noise_of_its_own():
    keys = np.concatenate([draw(samples=50, view=view, epoch=epoch).noise_key for view in range(4) for epoch in (0, 1)])
    assert len(np.unique(keys)) == 400


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
        {"local_scale": (0.0, 0.1)},
        {"zoom": (0.0, 1.0)},
        {"shear": 90},
        {"rotation": -1},
        {"noise": (-1.0, 0.0)},
        {"noise": (2.0, 1.0)},
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
    operations = ("affine", "colour", "blur", "solarise", "noise")
    needs = {
        name: {operation for operation in operations if getattr(recipe, f"has_{operation}")}
        for name, recipe in RECIPES.items()
    }
    assert needs == {
        "clip": set(),
        "crop_flip": set(),
        "simclr": {"colour", "blur"},
        "simclr_cifar": {"colour"},
        "moco_v3": {"colour", "blur", "solarise"},
        "vicreg": {"colour", "blur", "solarise"},
        "glyphs": {"affine", "colour", "noise"},
    }
