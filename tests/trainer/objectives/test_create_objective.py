"""What create_objective accepts, and how it says no."""

import pytest
from pydantic import ValidationError

from thermopile.trainer.objectives import OBJECTIVES, Objective, create_objective


def test_every_name_and_mode_of_the_registry_can_be_made():
    for name, objective in OBJECTIVES.items():
        for mode in objective.settings_of_mode:
            assert isinstance(create_objective(name, mode=mode), Objective)


def test_an_unknown_name_is_refused_with_the_nearest_and_the_valid_ones():
    with pytest.raises(ValueError, match=r"'isoclr' is unknown \(did you mean 'isogclr'\?\); valid: clip, isogclr"):
        create_objective("isoclr")


def test_a_mode_that_the_objective_lacks_is_refused_with_the_ones_it_has():
    with pytest.raises(ValueError, match=r"'clip' has no mode 'unimodal'.*valid: bimodal$"):
        create_objective("clip", "unimodal")


def test_an_unknown_setting_is_refused_with_the_nearest_and_the_valid_ones():
    with pytest.raises(ValueError, match=r"no setting 'gama' \(did you mean 'gamma'\?\); valid: .*tau_init"):
        create_objective("isogclr", gama=0.5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", 0.0), ("gamma", 1.1), ("gamma_min", 0.0), ("gamma_decay_epochs", 0), ("eps", -1e-9), ("rho", -1.0),
        ("tau_min", 0.0), ("eta", -0.1), ("eta_min", -0.1), ("eta_decay_epochs", 0), ("beta_u", 0.0), ("beta_u", 1.5),
        ("grad_clip", 0.0), ("rho", float("nan")), ("rho", float("inf")), ("gamma", "fast"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_a_setting_out_of_range_is_refused_with_its_name_and_value(mode, key, value):
    with pytest.raises(ValueError, match=rf"'isogclr': {key} = {value!r}: Input should be"):
        create_objective("isogclr", mode, **{key: value})


@pytest.mark.parametrize("settings", [{"tau_init": 0.001}, {"tau_init": 2.0}, {"tau_min": 0.9}, {"tau_max": 0.004}])
def test_temperatures_out_of_order_are_refused_with_all_three_numbers(settings):
    with pytest.raises(ValueError, match=r"tau_min [\d.]+ <= tau_init [\d.]+ <= tau_max [\d.]+ does not hold"):
        create_objective("isogclr", **settings)


def test_a_cosine_of_eta_that_would_rise_is_refused():
    with pytest.raises(ValueError, match=r"eta_min 0\.1 is above eta 0\.01"):
        create_objective("isogclr", eta_min=0.1, eta_decay_epochs=3)


def test_a_logit_scale_above_one_hundred_is_refused():
    with pytest.raises(ValueError, match=r"'clip': log_logit_scale = 5\.0"):
        create_objective("clip", log_logit_scale=5.0)


def test_settings_are_kept_frozen_and_make_the_same_objective_again():
    objective = create_objective("isogclr", "unimodal", gamma=0.6, eta_decay_epochs=4)
    with pytest.raises(ValidationError, match="frozen"):
        objective.settings.gamma = 0.5
    again = create_objective("isogclr", "unimodal", **objective.settings.model_dump())
    assert again.settings == objective.settings


def test_pairs_and_images_start_from_the_settings_of_their_runs_in_the_paper():
    pairs, images = (create_objective("isogclr", mode).settings for mode in ("bimodal", "unimodal"))
    assert (pairs.grad_clip, pairs.tau_init, pairs.tau_min, pairs.rho) == (5.0, 0.01, 0.005, 2.0)
    assert (images.grad_clip, images.tau_init, images.tau_min, images.rho) == (3.0, 0.7, 0.05, 0.3)
