"""Doubted pairs count nothing in the loss, exactly as with weights of 0; temperatures stay, log s goes on."""

import math

import pytest
import torch

from thermopile.trainer.objectives import OBJECTIVES, Progress, create_objective

from support.objectives import make_features, make_objective, make_state, one_step

NAMES = ("clip", "decl", "sogclr", "isogclr", "fastclip_v0", "fastclip_v1", "fastclip_v2", "fastclip_v3")
EACH = pytest.mark.parametrize("name", NAMES)
LATE = Progress(step=25, steps_per_epoch=10)
"""In the third epoch."""
SAMPLES = 9
SCORES = torch.tensor([[-1.0, 2, 0.5, -math.inf, 1, -3, 0, 0, -1], [-1.0, -1, 0.5, -math.inf, -2, -3, 0, 1e-9, 4]])
DOUBTED = torch.tensor([0, 1, 1, 0, 0, 0, 0, 1, 1], dtype=torch.bool)
"""Those whose sum is above 0; the fourth was never seen."""


@pytest.fixture
def doubting():
    """Return a function: an objective's name -> it, doubting after two epochs, and state with SCORES."""

    def make(name, **settings):
        objective = make_objective(name, "bimodal", doubt_after=2, gamma=0.6, auxiliary="mean", **settings)
        field = "log_s" if "image/log_s" in objective.fields else "log_g"
        state = make_state(objective, SAMPLES)
        return objective, state | {f"{side}/{field}": SCORES[row].double() for row, side in enumerate(objective.sides)}

    return make


def differentiated(outcome, objective, *inputs):
    inputs = (*inputs, *objective.parameters())
    return [outcome.loss, *torch.autograd.grad(outcome.loss, inputs, allow_unused=True, materialize_grads=True)]


@EACH
def test_doubted_pairs_count_as_with_the_weight_0(name, doubting):
    objective, state = doubting(name)
    first, second = make_features(SAMPLES)
    plain = make_objective(name, "bimodal", gamma=0.6, auxiliary="mean")
    weights = (~DOUBTED).double()
    if name in ("clip", "fastclip_v0", "fastclip_v3"):  # whose learned temperature needs as many samples as before
        weights = weights / weights.mean()
    of_plain = {path: rows for path, rows in state.items() if path in plain.fields or path == "visits"}
    found, expected = (
        one_step(objective, first, second, state, LATE),
        one_step(plain, first, second, of_plain | {"weight": weights}, LATE),
    )
    for value, of_weights in zip(
        differentiated(found, objective, first, second), differentiated(expected, plain, first, second), strict=True
    ):
        torch.testing.assert_close(value, of_weights, rtol=1e-12, atol=1e-15)
    for path, rows in expected.state.items():
        stays = DOUBTED & (path.split("/")[-1] in ("tau", "u", "m", "v"))
        assert torch.equal(found.state[path], torch.where(stays, state[path], rows)), path
    assert found.metrics["share_doubted"].item() == pytest.approx(4 / 9)
    assert found.metrics["image/share_outweighed"].item() == pytest.approx(3 / 9)


@EACH
def test_given_weights_are_multiplied(name, doubting):
    objective, state = doubting(name)
    first, second = make_features(SAMPLES)
    weights = torch.linspace(0.5, 1.5, SAMPLES, dtype=torch.float64)
    loss, *_ = differentiated(one_step(objective, first, second, state | {"weight": weights}, LATE), objective, first)
    changed = torch.where(DOUBTED, 7.0, weights)  # whatever the weight of a doubted one is
    again, *_ = differentiated(one_step(objective, first, second, state | {"weight": changed}, LATE), objective, first)
    assert loss.item() == again.item()
    more, *_ = differentiated(
        one_step(objective, first, second, state | {"weight": 2 * weights}, LATE), objective, first
    )
    assert more.item() != loss.item()


@EACH
def test_none_is_doubted_before_the_epoch_that_is_set(name, doubting):
    objective, state = doubting(name)
    plain = make_objective(name, "bimodal", gamma=0.6, auxiliary="mean")
    first, second = make_features(SAMPLES)
    early = Progress(step=19, steps_per_epoch=10)
    of_plain = {path: rows for path, rows in state.items() if path in plain.fields or path == "visits"}
    found, expected = one_step(objective, first, second, state, early), one_step(plain, first, second, of_plain, early)
    for value, of_none in zip(
        differentiated(found, objective, first, second), differentiated(expected, plain, first, second), strict=True
    ):
        assert torch.equal(value, of_none)
    assert found.metrics["share_doubted"] == 0


def test_few_trusted_pairs_have_no_more_than_ten_times_their_weight():
    objective = make_objective("clip", "bimodal", doubt_after=2)
    first, second = make_features(40)
    score = torch.ones(40, dtype=torch.float64)
    score[0] = -1
    state = {f"{side}/log_g": score for side in ("image", "text")} | {"visits": torch.ones(40, dtype=torch.float64)}
    weights = torch.zeros(40, dtype=torch.float64)
    weights[0] = 10
    expected = one_step(make_objective("clip", "bimodal"), first, second, {"weight": weights}, LATE).loss
    assert one_step(objective, first, second, state, LATE).loss.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("name", ["clip", "decl"])
def test_a_moving_average_of_g_is_kept_where_there_is_no_log_s(name, doubting):
    objective, state = doubting(name)
    first, second = (side.detach() for side in make_features(SAMPLES))
    tau = objective.settings.tau if name == "decl" else math.exp(-objective.log_logit_scale.item())
    found = one_step(objective, first, second, state, LATE).state
    similarities = first @ second.T
    for row, side in enumerate(("image", "text")):
        h = (similarities if row == 0 else similarities.T) - similarities.diag()[:, None]
        g = ((h / tau).exp().sum(1) - 1) / (SAMPLES - 1)
        old = SCORES[row].double().exp()
        expected = torch.where(SCORES[row].isneginf(), g, 0.2 * old + 0.8 * g)
        torch.testing.assert_close(found[f"{side}/log_g"].exp(), expected)


def test_what_cannot_be_doubted_is_refused_with_the_reason():
    for name in NAMES:
        if "unimodal" in OBJECTIVES[name].settings_of_mode:
            with pytest.raises(ValueError, match="doubt_after is for pairs, mode bimodal; two views of a picture"):
                create_objective(name, "unimodal", doubt_after=3)
    for name in ("siglip", "cyclip"):
        with pytest.raises(ValueError, match=f"'{name}' has no setting 'doubt_after'"):
            create_objective(name, doubt_after=3)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"doubt_after = {wrong}"):
            create_objective("isogclr", doubt_after=wrong)
