"""Inputs that no objective takes, and how it says so."""

import math
import re

import pytest
import torch

from thermopile.trainer.objectives import OBJECTIVES, FeaturesError

from support.objectives import FRAMED, START, make_features, make_objective, make_state, one_step

UNIT_NORM = [case for case in FRAMED if OBJECTIVES[case[0]].unit_norm]
RAW = [(name, "unimodal", {}) for name in ("spectral", "barlow_twins", "vicreg")]
BY_DISTANCE = [
    (name, mode, {"similarity": "distance"})
    for name, mode in [("simclr", "unimodal"), ("decl", "bimodal"), ("decl", "unimodal")]
]


@pytest.mark.parametrize("case", UNIT_NORM, ids=lambda case: f"{case[0]}-{case[1]}{case[2]}")
@pytest.mark.parametrize("side", ["first", "second"])
@pytest.mark.parametrize(
    ("scale", "norm"), [(1.1, "1.1"), (0.0, "0"), (math.nan, "nan"), (math.inf, "(inf|nan)")], ids=str
)
def test_a_row_whose_norm_is_not_one_is_named_with_its_norm(case, side, scale, norm):
    objective = make_objective(*case)
    features = [given.detach() for given in make_features(6)]
    features[("first", "second").index(side)][4] *= scale
    with pytest.raises(ValueError, match=rf"row 4 of {side} has norm {norm}, .*1 of 6 rows are not of norm 1; .*norm"):
        one_step(objective, *features, make_state(objective, 6), START)


@pytest.mark.parametrize(("name", "mode", "settings"), RAW + BY_DISTANCE)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_raw_features_may_have_any_norm_but_no_value_that_is_not_finite(name, mode, settings, side, value):
    objective = make_objective(name, mode, **settings)
    features, state = [5 * given.detach() for given in make_features(6)], make_state(objective, 6)
    features[side][3] = 0.0
    assert objective(*features, state, START).loss.isfinite()
    features[side][4, 2] = value
    message = rf"row 4 of {('first', 'second')[side]} holds NaN or infinity, .*1 of 6 rows are not finite; check"
    with pytest.raises(FeaturesError, match=message):
        objective(*features, state, START)


@pytest.mark.parametrize(("name", "mode", "settings"), BY_DISTANCE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_distances_refuse_features_that_were_normalised_by_mistake(name, mode, settings, dtype):
    objective = make_objective(name, mode, **settings)
    (first, second), state = make_features(6, dtype=dtype), make_state(objective, 6)
    with pytest.raises(FeaturesError, match=r"^features: every row has norm 1, but similarity = 'distance' takes.*$"):
        objective(first, second, state, START)
    objective(first, second + 0.1, state, START)
    objective(first, second, state, START)  # by chance, later on


def test_features_are_looked_at_in_every_step_on_the_cpu():
    objective = make_objective("clip", "bimodal")
    first, second = make_features(6)
    objective(first, second, {}, START)
    with pytest.raises(ValueError, match=r"row 0 of first has norm 2, .*6 of 6 rows"):
        objective(2 * first, second, {}, START)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_normalised_in_their_own_dtype_are_of_norm_one(dtype):
    objective = make_objective("simclr", "unimodal")
    raw = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    features = torch.nn.functional.normalize(raw, dim=1)
    assert objective(features, features.flip(0), {}, START).loss.isfinite()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.ones(4, 16), torch.ones(3, 16), r"first is [4, 16] and second [3, 16]; both must be [b, d]"),
        (torch.ones(4, 16), torch.ones(4, 8), r"first is [4, 16] and second [4, 8]; both must be [b, d]"),
        (torch.ones(16), torch.ones(16), r"first is [16] and second [16]; both must be [b, d]"),
        (torch.ones(1, 1), torch.ones(1, 1), r"a batch of 1 sample has no negatives; use a batch of at least 2"),
        (
            torch.ones(4, 16, dtype=torch.int64),
            torch.ones(4, 16),
            r"first is torch.int64, second torch.float32; both must be floating point",
        ),
    ],
    ids=["rows", "columns", "vectors", "one sample", "integers"],
)
def test_features_that_do_not_fit_are_refused_with_what_they_are(case, first, second, message):
    objective = make_objective(*case)
    with pytest.raises(ValueError, match=re.escape(message)):
        one_step(objective, first, second, make_state(objective, len(first)), START)


def test_a_missing_or_misshapen_field_of_state_is_named(case):
    objective = make_objective(*case)
    features, state = make_features(4), make_state(objective, 4)
    for name in state:
        others = {other: values for other, values in state.items() if other != name}
        with pytest.raises(ValueError, match=f"state: '{name}' is missing; given "):
            one_step(objective, *features, others, START)
        with pytest.raises(ValueError, match=rf"state: '{name}' is \[3\] but the batch has 4 samples; pass \[4\]"):
            one_step(objective, *features, others | {name: state[name][:3]}, START)


def test_state_of_another_mode_is_refused():
    objective, other = make_objective("isogclr", "bimodal"), make_objective("isogclr", "unimodal")
    with pytest.raises(ValueError, match=r"'image/log_s' is missing; given \['sample/log_s', 'sample/tau', 'sample/u'"):
        objective(*make_features(4), make_state(other, 4), START)
