"""What create_objective accepts, and how it says no."""

import re

import pytest
from pydantic import ValidationError

from thermopile.trainer.objectives import OBJECTIVES, Objective, create_objective


def test_every_name_and_mode_of_the_registry_can_be_made():
    for name, objective in OBJECTIVES.items():
        for mode in objective.settings_of_mode:
            assert isinstance(create_objective(name, mode=mode), Objective)


def test_an_unknown_name_is_refused_with_the_nearest_and_the_valid_ones():
    valid = r"valid: (\w+, )+module:name$"
    with pytest.raises(ValueError, match=rf"'isoclr' is unknown \(did you mean 'isogclr'\?\); {valid}"):
        create_objective("isoclr")


MODES = ("bimodal", "unimodal")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name, objective in OBJECTIVES.items()
        for mode in MODES
        if mode not in objective.settings_of_mode
    ],
)
def test_a_mode_that_the_objective_lacks_is_refused_with_the_ones_it_has(name, mode):
    other = MODES[mode == "bimodal"]
    with pytest.raises(ValueError, match=rf"'{name}' has no mode '{mode}'.*valid: {other}$"):
        create_objective(name, mode)


def test_only_three_objectives_know_both_modes():
    both = [name for name, objective in OBJECTIVES.items() if set(objective.settings_of_mode) == set(MODES)]
    assert both == ["sogclr", "isogclr", "decl"]
    with pytest.raises(
        ValueError, match=r"'decl' has no mode 'bimodel' \(did you mean 'bimodal'\?\); valid: bimodal, uni"
    ):
        create_objective("decl", "bimodel")


def test_an_unknown_setting_is_refused_with_the_nearest_and_the_valid_ones():
    with pytest.raises(ValueError, match=r"no setting 'gama' \(did you mean 'gamma'\?\); valid: .*tau_init"):
        create_objective("isogclr", gama=0.5)


OUT_OF_RANGE = {
    "clip": [
        ("log_logit_scale", -0.1), ("log_logit_scale", 4.7), ("similarity_budget", -1), ("similarity_budget", 1.5)
    ],
    "cyclip": [("in_modal", -0.1), ("cross_modal", -0.1), ("log_logit_scale", 4.7)],
    "siglip": [("log_logit_scale", 10.1), ("logit_bias", float("nan")), ("logit_bias", -101.0)],
    "flatnce": [("tau", 0.0)],
    "simco": [("tau", 0.0), ("tau_beta", 0.0)],
    "spectral": [("mu", 0.0)],
    "barlow_twins": [("redundancy", -0.1), ("eps", 0.0)],
    "vicreg": [("invariance", -1.0), ("variance", -1.0), ("covariance", -1.0), ("eps", 0.0)],
    "moco_v3": [("tau", 0.0)],
    "simclr": [("tau", 0.0), ("tau", 5e-5), ("similarity", "shifted")],
    "dcl": [("tau", -1.0)],
    "dclw": [("tau", 0.0), ("sigma", 0.0)],
    "sogclr": [("tau", 0.0), ("gamma", 0.0), ("gamma", 1.1), ("eps", -1e-9), ("tau", float("nan"))],
    "isogclr": [
        ("gamma", 0.0), ("gamma", 1.1), ("gamma_min", 0.0), ("gamma_decay_epochs", 0), ("eps", -1e-9), ("rho", -1.0),
        ("tau_min", 0.0), ("eta", -0.1), ("eta_min", -0.1), ("eta_decay_epochs", 0), ("beta_u", 0.0), ("beta_u", 1.5),
        ("grad_clip", 0.0), ("rho", float("nan")), ("rho", float("inf")), ("gamma", "fast"),
    ],
    "fastclip_v0": [
        ("gamma", 0.0), ("tau_min", 0.0), ("eta", -1.0), ("tau_scale", "exp"), ("gamma_schedule", "linear"),
    ],
    "fastclip_v1": [("gamma", 2.0), ("tau", 0.0), ("eps", -1.0)],
    "fastclip_v2": [("rho", -1.0), ("eta", -1.0), ("grad_clip", 0.0), ("betas", (1.5, 0.9)), ("betas", (0.9, 1.0))],
    "fastclip_v3": [("rho", -1.0), ("eta", -1.0), ("tau_max", 0.0), ("tau_scale", "exp")],
    "decl": [
        ("gamma", 0.0), ("tau", 0.0), ("t0", 0.0), ("seed", -1), ("auxiliary", "median"), ("mixing", "both"),
        ("similarity", "distances"), ("rate", "median"),
    ],
    "auc_cl": [("a", 0.0), ("a", 20.1), ("b", 1.1), ("b", -1.1), ("alpha", -0.1), ("p", 0.0), ("views", "both")],
}  # fmt: skip


def test_every_objective_has_settings_that_are_refused():
    assert OUT_OF_RANGE.keys() == OBJECTIVES.keys()


@pytest.mark.parametrize(
    ("name", "mode", "key", "value"),
    [
        (name, mode, key, value)
        for name, refused in OUT_OF_RANGE.items()
        for mode in OBJECTIVES[name].settings_of_mode
        for key, value in refused
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_name_its_value_and_the_range(name, mode, key, value):
    given = value if not isinstance(value, tuple) else next(beta for beta in value if not 0 <= beta < 1)
    with pytest.raises(ValueError, match=rf"'{name}': {key}[.01]* = .*{re.escape(repr(given))}.*: Input should be"):
        create_objective(name, mode, **{key: value})


@pytest.mark.parametrize(
    ("name", "first"),
    [("isogclr", "tau_init"), ("fastclip_v2", "tau_init"), ("fastclip_v0", "tau"), ("fastclip_v3", "tau")],
)
def test_temperatures_out_of_order_are_refused_with_all_three_numbers(name, first):
    for settings in ({first: 0.001}, {first: 2.0}, {"tau_min": 0.9}, {"tau_max": 0.004}):
        with pytest.raises(ValueError, match=rf"tau_min [\d.]+ <= {first} [\d.]+ <= tau_max [\d.]+ does not hold"):
            create_objective(name, **settings)


def test_a_cosine_of_eta_that_would_rise_is_refused():
    with pytest.raises(ValueError, match=r"eta_min 0\.1 is above eta 0\.005"):
        create_objective("isogclr", eta_min=0.1, eta_decay_epochs=3)


@pytest.mark.parametrize("name", ["simclr", "decl"])
def test_distances_have_a_higher_temperature_than_cosines_where_none_is_given(name):
    assert create_objective(name, "unimodal").settings.tau == 0.1
    assert create_objective(name, "unimodal", similarity="distance").settings.tau == 0.5
    assert create_objective(name, "unimodal", similarity="distance", tau=0.1).settings.tau == 0.1


def test_features_come_raw_where_columns_or_distances_are_compared():
    raw = [name for name, objective in OBJECTIVES.items() if not objective.unit_norm]
    assert raw == ["spectral", "barlow_twins", "vicreg"]
    for name in ("simclr", "decl"):
        assert create_objective(name, "unimodal", similarity="cos").unit_norm
        assert not create_objective(name, "unimodal", similarity="distance").unit_norm


def test_settings_are_kept_frozen_and_make_the_same_objective_again():
    objective = create_objective("isogclr", "unimodal", gamma=0.6, eta_decay_epochs=4)
    with pytest.raises(ValidationError, match="frozen"):
        objective.settings.gamma = 0.5
    again = create_objective("isogclr", "unimodal", **objective.settings.model_dump())
    assert again.settings == objective.settings


def test_images_start_from_the_settings_of_their_runs_in_the_paper_and_pairs_from_those_for_small_batches():
    pairs, images = (create_objective("isogclr", mode).settings for mode in ("bimodal", "unimodal"))
    assert (pairs.grad_clip, pairs.tau_init, pairs.tau_min, pairs.rho, pairs.eta) == (5.0, 0.05, 0.005, 1.0, 0.005)
    assert (images.grad_clip, images.tau_init, images.tau_min, images.rho, images.eta) == (3.0, 0.7, 0.05, 0.3, 0.01)
