"""What holds for every objective in every mode."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import Progress
from thermopile.trainer.objectives import pairs as pairs_module

from support.objectives import (
    FRAMED,
    PLAIN,
    START,
    directions_of,
    make_features,
    make_objective,
    make_state,
    one_step,
    run_step,
)

ONE_OF_EACH_KIND = pytest.mark.parametrize("case", [("isogclr", "bimodal"), ("auc_cl", "unimodal")], ids="-".join)
"""For what the step that all objectives share decides. AUC-CL has a parameter of its own, and computes its own sums."""
WITH_PAIRS = [case for case in FRAMED if case[0] not in ("barlow_twins", "vicreg")]
"""Objectives that compare samples; the others compare columns."""
FIRST_FRAMES = [next(case for case in FRAMED if case[:2] == known) for known in dict.fromkeys(c[:2] for c in FRAMED)]
MANY_EXAMPLES = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in FIRST_FRAMES else pytest.mark.wide) for case in FRAMED],
    ids=lambda case: f"{case[0]}-{case[1]}{case[2]}",
)
"""The cases of the fixture, but the further frames of each objective in each mode are wide."""


def assert_same(here, there, rtol=0.0, atol=0.0):
    """Two results of `run`: loss, state, metrics and gradients, bit for bit unless a tolerance is given."""
    (outcome, *gradients), (other, *other_gradients) = here, there
    torch.testing.assert_close(outcome.loss, other.loss, rtol=rtol, atol=atol)
    torch.testing.assert_close(outcome.state, other.state, rtol=rtol, atol=atol)
    torch.testing.assert_close(outcome.metrics, other.metrics, rtol=rtol, atol=atol)
    torch.testing.assert_close(gradients, other_gradients, rtol=rtol, atol=atol)


def assert_finite(outcome, *gradients):
    assert all(value.isfinite().all() for value in (outcome.loss, *outcome.metrics.values(), *gradients))
    assert all(values.isfinite().all() for values in outcome.state.values())


def unseen_state(objective, samples, dtype=torch.float32):
    state = {name: torch.full((samples,), value, dtype=dtype) for name, value in objective.fields.items()}
    return state | ({"visits": torch.zeros(samples, dtype=dtype)} if state else {})


@MANY_EXAMPLES
@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 2**31), samples=st.integers(2, 9))
def test_the_order_of_the_batch_does_not_matter(case, data, seed, samples):
    objective = make_objective(*case, auxiliary="mean")
    features, state = make_features(samples, seed), make_state(objective, samples, seed)
    order = torch.tensor(data.draw(st.permutations(range(samples))))
    outcome, first, second, *own = run_step(objective, features, state)
    moved, moved_first, moved_second, *moved_own = run_step(
        objective, [side[order] for side in features], {name: values[order] for name, values in state.items()}
    )
    torch.testing.assert_close(moved.loss, outcome.loss, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(moved_own, own, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close([moved_first, moved_second], [first[order], second[order]], rtol=1e-9, atol=1e-12)
    expected = {name: values[order] for name, values in outcome.state.items()}
    torch.testing.assert_close(moved.state, expected, rtol=1e-9, atol=1e-12)


def test_an_unseen_row_takes_the_batch_value_and_a_seen_row_moves_toward_it(case):
    objective, no_memory = make_objective(*case, gamma=0.3), make_objective(*case, gamma=1.0)
    features, state = make_features(8), make_state(objective, 8)
    outcome, of_batch = run_step(objective, features, state)[0], run_step(no_memory, features, state)[0]
    for name in objective.fields:
        if name.endswith(("log_s", "log_rate")):
            old, new = state[name], of_batch.state[name]
            expected = torch.where(old == -math.inf, new, (0.7 * old.exp() + 0.3 * new.exp()).log())
            assert 0 < (old == -math.inf).sum() < 8
            torch.testing.assert_close(outcome.state[name], expected, rtol=1e-12, atol=1e-12)


def test_at_gamma_one_an_old_estimate_of_any_size_is_forgotten(case):
    objective = make_objective(*case, gamma=1.0)
    features, state = make_features(8), make_state(objective, 8)
    estimates = [name for name in objective.fields if name.endswith(("log_s", "log_rate"))]
    new, old = ({**state, **{name: torch.full((8,), log) for name in estimates}} for log in (-math.inf, 300.0))
    from_new, from_old = run_step(objective, features, new)[0], run_step(objective, features, old)[0]
    assert torch.equal(from_new.loss, from_old.loss)
    assert all(torch.equal(from_old.state[name], from_new.state[name]) for name in from_new.state)


@MANY_EXAMPLES
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**31),
    samples=st.integers(2, 9),
    budget=st.sampled_from([1, 100, 600]),
    piece=st.sampled_from([1, 11, 2**18]),
)
def test_the_budget_and_the_size_of_pieces_change_nothing_beyond_round_off(case, seed, samples, budget, piece):
    whole, chunked = make_objective(*case), make_objective(*case, similarity_budget=budget)
    features, state = make_features(samples, seed), make_state(whole, samples, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pairs_module.PIECE, "cpu", piece)
        in_parts = run_step(chunked, features, state)
    assert_same(in_parts, run_step(whole, features, state), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("rho", "bound"), [(100.0, "tau_min"), (0.0, "tau_max")])
@pytest.mark.parametrize("case", [("isogclr", "bimodal"), ("isogclr", "unimodal"), ("fastclip_v2", "bimodal")])
def test_a_temperature_pushed_past_its_bound_stays_at_the_bound(case, rho, bound):
    objective = make_objective(*case, rho=rho, eps=1e-30, eta=0.5, tau_min=0.05, tau_init=0.1, tau_max=0.2, gamma=1.0)
    features, state = make_features(8, dtype=torch.float32), unseen_state(objective, 8)
    for _ in range(3):
        outcome, *_ = run_step(objective, features, state)
        state = outcome.state
    for side in objective.sides:
        assert (state[f"{side}/tau"] == torch.tensor(getattr(objective.settings, bound), dtype=torch.float32)).all()
        assert outcome.metrics[f"{side}/share_at_{bound}"] == 1.0


@pytest.mark.parametrize(
    ("case", "name", "past", "bound"),
    [
        (("fastclip_v0", "bimodal"), "tau", 1e-6, 0.02),
        (("fastclip_v0", "bimodal"), "tau", 7.0, 0.5),
        (("fastclip_v3", "bimodal"), "tau", -1.0, 0.02),
        (("fastclip_v3", "bimodal"), "tau", 7.0, 0.5),
        (("clip", "bimodal"), "log_logit_scale", -3.0, 0.0),
        (("clip", "bimodal"), "log_logit_scale", 9.0, math.log(100)),
        (("auc_cl", "unimodal"), "b", -1.5, -1.0),
        (("auc_cl", "unimodal"), "b", 3.0, 1.0),
    ],
)
def test_an_own_parameter_outside_its_range_learns_the_gradient_at_the_bound(case, name, past, bound):
    beyond, at = (make_objective(*case, tau_min=0.02, tau_max=0.5) for _ in range(2))
    with torch.no_grad():
        getattr(beyond, name).fill_(past)
        getattr(at, name).fill_(bound)
    features, state = make_features(6), make_state(at, 6)
    assert_same(run_step(beyond, features, state), run_step(at, features, state))
    assert getattr(beyond, name).item() == bound
    assert getattr(beyond, name).grad != 0


@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), samples=st.integers(2, 9), gamma=st.sampled_from([0.01, 0.8, 1.0]))
def test_temperatures_of_a_thousandth_give_finite_numbers_in_float32(case, seed, samples, gamma):
    objective = make_objective(*case, gamma=gamma, tau=0.001, tau_init=0.001, tau_min=0.001)
    features = make_features(samples, seed, torch.float32)
    state = make_state(objective, samples, seed, torch.float32, tau=(0.001, 0.003))
    for step in range(3):
        outcome, *gradients = run_step(objective, features, state, Progress(step, 10))
        assert_finite(outcome, *gradients)
        features, state = features[::-1], outcome.state


def test_coinciding_features_give_finite_numbers(case):
    objective = make_objective(*case, tau=0.001, tau_init=0.001, tau_min=0.001)
    row = F.normalize(torch.ones(1, 16), dim=1)
    for samples in (2, 5):
        features, state = [row.repeat(samples, 1)] * 2, unseen_state(objective, samples)
        outcome, *gradients = run_step(objective, features, state)
        assert_finite(outcome, *gradients)
        assert_finite(*run_step(objective, features, outcome.state))
        if any(name.endswith("log_s") for name in state):
            # The inner value of a sample that is like every other is 1, and nothing pulls at it.
            assert all(values.abs().max() < 1e-3 for name, values in outcome.state.items() if name.endswith("log_s"))
            assert all(gradient.abs().max() < 1e-6 for gradient in gradients[:2] if case[0] != "fastclip_v0")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_features_are_computed_in_float32_and_get_gradients_in_their_own_dtype(case, dtype):
    objective = make_objective(*case)
    features, state = make_features(9, dtype=dtype), make_state(objective, 9, dtype=torch.float32)
    outcome, first, second, *own = run_step(objective, features, state)
    wide, wide_first, wide_second, *wide_own = run_step(objective, [side.float() for side in features], state)
    assert outcome.loss.dtype == torch.float32
    expected = (wide, wide_first.to(dtype), wide_second.to(dtype), *wide_own)
    # A local view's gradient is rounded before it is added to the features'.
    rounding = 2 * torch.finfo(dtype).eps * wide_first.abs().max().item() if objective.frame.local else 0.0
    assert_same((outcome, first, second, *own), expected, atol=rounding)
    assert first.dtype == second.dtype == dtype


def test_two_sides_of_different_dtypes_are_computed_in_the_wider_one(case):
    objective = make_objective(*case)
    (first, second), state = make_features(6), make_state(objective, 6)
    outcome, in_first, in_second, *own = run_step(objective, [first.half(), second], state)
    wide = run_step(objective, [first.half().double(), second], state)
    rounding = 2 * torch.finfo(torch.half).eps * wide[1].abs().max().item() if objective.frame.local else 0.0
    assert_same((outcome, in_first, in_second, *own), (wide[0], wide[1].half(), *wide[2:]), atol=rounding)


def test_autocast_and_reduced_matmul_precision_around_the_objective_change_nothing(case):
    objective = make_objective(*case)
    features, state = make_features(64, dtype=torch.float32), make_state(objective, 64, dtype=torch.float32)
    outside = run_step(objective, features, state)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = run_step(objective, features, state)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_same(inside, outside)


def test_new_state_has_the_keys_and_dtypes_of_the_old_one_and_counts_the_visit(case):
    objective = make_objective(*case)
    state = make_state(objective, 4, dtype=torch.float32)
    state["visits"] = torch.tensor([0, 1, 2, 3_000_000_000], dtype=torch.uint32)
    new = run_step(objective, make_features(4), state)[0].state
    assert new.keys() == {*objective.fields, "visits"}
    assert {name: values.dtype for name, values in new.items()} == {name: v.dtype for name, v in state.items()}
    assert new["visits"].tolist() == [1, 2, 3, 3_000_000_001]


def test_fields_are_named_by_side_and_a_stateless_objective_keeps_an_empty_state(case):
    objective = make_objective(*case)
    sides = {name.split("/")[0] for name in objective.fields}
    new = run_step(objective, make_features(4), make_state(objective, 4))[0].state
    if objective.fields:
        assert sides == ({"image", "text"} if case[1] == "bimodal" else {"sample"})
    else:
        assert new == {}


def test_the_old_state_and_the_features_are_left_as_they_were(case):
    objective = make_objective(*case)
    features, state = make_features(5), make_state(objective, 5)
    before = [values.detach().clone() for values in (*features, *state.values())]
    one_step(objective, *features, state, START).loss.backward()
    assert all(torch.equal(here, copy) for here, copy in zip((*features, *state.values()), before, strict=True))


def test_without_gradients_loss_and_new_state_come_out_the_same(case):
    objective = make_objective(*case)
    features, state = make_features(5), make_state(objective, 5)
    outcome, *_ = run_step(objective, features, state)
    with torch.no_grad():
        quiet = one_step(objective, *features, state, START)
    assert not quiet.loss.requires_grad
    assert torch.equal(quiet.loss, outcome.loss)
    assert all(torch.equal(quiet.state[name], outcome.state[name]) for name in outcome.state)


def test_only_the_features_that_ask_for_a_gradient_get_one(case):
    objective = make_objective(*case)
    (first, second), state = make_features(5), make_state(objective, 5)
    _, in_first, _, *own = run_step(objective, [first, second], state)
    objective.zero_grad()
    one_step(objective, first, second.detach(), state, START).loss.backward()
    assert torch.equal(first.grad, in_first)
    assert second.grad is None
    torch.testing.assert_close([parameter.grad for parameter in objective.parameters()], own, rtol=0, atol=0)


def test_a_scaled_loss_scales_every_gradient(case):
    objective = make_objective(*case)
    features, state = make_features(5), make_state(objective, 5)
    _, *gradients = run_step(objective, features, state)
    inputs = [*features, *objective.parameters()]
    scaled = torch.autograd.grad(one_step(objective, *features, state, START).loss * 1024.0, inputs)
    assert all(torch.equal(here, 1024 * there) for here, there in zip(scaled, gradients, strict=True))


def test_the_gradient_cannot_be_differentiated_again(case):
    objective = make_objective(*case)
    (first, second), state = make_features(5), make_state(objective, 5)
    squared = one_step(objective, first, second, state, START).loss ** 2
    (gradient,) = torch.autograd.grad(squared, first, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_metrics_are_scalars_without_a_graph(case):
    objective = make_objective(*case)
    outcome, *_ = run_step(objective, make_features(9), make_state(objective, 9))
    assert outcome.metrics
    assert all(figure.shape == () and not figure.requires_grad for figure in outcome.metrics.values())


@pytest.mark.parametrize("case", WITH_PAIRS, ids=lambda case: f"{case[0]}-{case[1]}{case[2]}")
def test_metrics_tell_how_often_the_positive_is_the_most_alike(case):
    objective = make_objective(*case)
    (first, second), state = make_features(40), make_state(objective, 40)
    outcome, *_ = run_step(objective, [first, second], state)
    found, others = {}, torch.eye(40).bool()
    if case[1] == "bimodal":
        directions = {"image": [(first, second, [second])], "text": [(second, first, [first])]}
    else:
        directions = {"sample": directions_of(objective.frame, objective.across, first, second)}
    if case[0] in ("auc_cl", "spectral") and case[2] == PLAIN:
        del directions["sample"][1]  # its anchors are the first view's
    for side, of_side in directions.items():
        shares = []
        for anchors, target, candidates in of_side:
            negatives = torch.cat([(anchors @ rows.T).masked_fill(others, -2) for rows in candidates], dim=1)
            shares.append(((anchors * target).sum(1) > negatives.amax(1)).double().mean())
        found[side] = torch.stack(shares).mean()
    assert all(0 < share < 1 for share in found.values())
    for side, share in found.items():
        torch.testing.assert_close(outcome.metrics[f"{side}/retrieval_accuracy"], share)


def make_encoder():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


@pytest.fixture(scope="module")
def compiled_encoder():
    encoder = make_encoder()
    return encoder, torch.compile(encoder, backend="aot_eager")


def encoded_step(forward, encoder, objective, features, state):
    """Loss, new state and the gradients of the encoder and the objective of one step."""
    encoder.zero_grad()
    objective.zero_grad()
    outcome = objective(*(F.normalize(forward(side.detach()), dim=1) for side in features), state, START)
    outcome.loss.backward()
    gradients = [parameter.grad.clone() for parameter in (*encoder.parameters(), *objective.parameters())]
    return outcome.loss.detach(), outcome.state, gradients


@pytest.mark.wide
@ONE_OF_EACH_KIND
def test_a_compiled_encoder_gets_the_gradients_of_a_plain_one(case, compiled_encoder):
    objective, (encoder, compiled) = make_objective(*case), compiled_encoder
    features, state = make_features(7, dtype=torch.float32), make_state(objective, 7, dtype=torch.float32)
    plain = encoded_step(encoder, encoder, objective, features, state)
    torch.testing.assert_close(encoded_step(compiled, encoder, objective, features, state), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.wide
@ONE_OF_EACH_KIND
def test_an_objective_inside_a_compiled_function_gives_the_step_of_a_plain_one(case):
    encoder, objective = make_encoder(), make_objective(*case)
    features, state = make_features(7, dtype=torch.float32), make_state(objective, 7, dtype=torch.float32)

    @torch.compile(backend="aot_eager")
    def step(features, state):
        return objective(*(F.normalize(encoder(side), dim=1) for side in features), state, START)

    plain = encoded_step(encoder, encoder, objective, features, state)
    encoder.zero_grad()
    objective.zero_grad()
    outcome = step([side.detach() for side in features], state)
    outcome.loss.backward()
    gradients = [parameter.grad for parameter in (*encoder.parameters(), *objective.parameters())]
    torch.testing.assert_close((outcome.loss.detach(), outcome.state, gradients), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [1, 2**28])
def test_a_gpu_makes_the_step_of_the_cpu_with_tf32_and_autocast_on(case, budget, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    objective = make_objective(*case, auxiliary="mean", similarity_budget=budget)
    features, state = make_features(64, dtype=torch.float32), make_state(objective, 64, dtype=torch.float32)
    expected = run_step(objective, features, state)
    there = [side.detach().cuda() for side in features], {name: values.cuda() for name, values in state.items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outcome, *gradients = run_step(objective.cuda(), *there)
    torch.testing.assert_close(outcome.loss.cpu(), expected[0].loss, rtol=1e-4, atol=1e-5)
    here = {name: values.cpu() for name, values in outcome.state.items()}
    torch.testing.assert_close(here, expected[0].state, rtol=1e-4, atol=1e-4)
    scale = max(gradient.abs().max().item() for gradient in gradients)
    for gradient, wanted in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(gradient.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5 * scale)
