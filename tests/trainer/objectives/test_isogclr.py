"""iSogCLR's behaviour, in both modes, beyond the reference vectors."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import Progress, create_objective

START = Progress(step=0, steps_per_epoch=10)
MODES = ["bimodal", "unimodal"]
NEVER_SEEN = -math.inf


def make_features(samples, seed=0, dtype=torch.float64):
    """Unit-norm rows of two sides, [samples, 16], of which pairs are alike."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(samples, 16, generator=generator, dtype=torch.float64)
    second = first + torch.randn(samples, 16, generator=generator, dtype=torch.float64)
    return [F.normalize(side, dim=1).to(dtype).requires_grad_() for side in (first, second)]


def make_state(objective, samples, seed=0, dtype=torch.float64, tau=(0.05, 0.3), unseen=0.5):
    """Rows of samples of which about the share `unseen` was never seen, with temperatures within `tau`."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand(samples, generator=generator, dtype=torch.float64)

    new = uniform(0, 1) < unseen
    state = {"visits": torch.where(new, 0.0, 3.0).to(dtype)}
    for side in objective.sides:
        state[f"{side}/log_s"] = torch.where(new, NEVER_SEEN, uniform(-3, 1)).to(dtype)
        state[f"{side}/tau"] = uniform(*tau).to(dtype)
        state[f"{side}/u"] = torch.where(new, 0.0, uniform(-1, 1)).to(dtype)
    return state


def run(objective, features, state, progress=START):
    """One step: its outcome and the gradients of the two features."""
    first, second = (side.detach().clone().requires_grad_() for side in features)
    outcome = objective(first, second, state, progress)
    outcome.loss.backward()
    return outcome, first.grad, second.grad


def assert_finite(outcome, *gradients):
    for tensor in (outcome.loss, *outcome.state.values(), *outcome.metrics.values(), *gradients):
        assert tensor.isfinite().all()


def mini_batch_loss(first, second, tau_of, mode):
    """(1/b) sum of tau · log g, by a plain loop over anchors; its derivative is iSogCLR's gradient at gamma = 1."""
    samples, terms = len(first), []
    for i in range(samples):
        others = [j for j in range(samples) if j != i]
        positive = first[i] @ second[i]
        if mode == "bimodal":
            for side, anchor, candidates in (("first", first[i], second), ("second", second[i], first)):
                tau = tau_of[side][i]
                inner = torch.stack([((anchor @ candidates[j] - positive) / tau).exp() for j in others]).mean()
                terms.append(tau * inner.log())
        else:
            tau = tau_of["sample"][i]
            inner = torch.stack(
                [
                    ((anchor[i] @ candidates[j] - positive) / tau).exp()
                    for anchor in (first, second)
                    for candidates in (first, second)
                    for j in others
                ]
            ).mean()
            terms.append(tau * inner.log())
    return torch.stack(terms).sum() / samples


@pytest.mark.parametrize("mode", MODES)
def test_gradient_at_gamma_one_matches_autograd_of_the_mini_batch_loss(mode):
    objective = create_objective("isogclr", mode, gamma=1.0, rho=0.7)
    features, state = make_features(7), make_state(objective, 7)
    outcome, *gradients = run(objective, features, state)
    tau_of = {side: state[f"{side}/tau"] for side in objective.sides}
    plain = mini_batch_loss(*features, tau_of, mode)
    plain.backward()
    for given_gradient, side in zip(gradients, features, strict=True):
        torch.testing.assert_close(given_gradient, side.grad, rtol=1e-10, atol=1e-13)
    constant = sum(0.7 * tau.mean() for tau in tau_of.values())
    torch.testing.assert_close(outcome.loss.detach(), plain.detach() + constant, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_temperature_gradient_at_gamma_one_is_the_derivative_of_the_robust_loss(mode):
    objective = create_objective("isogclr", mode, gamma=1.0, rho=0.7, beta_u=1.0, grad_clip=1e9)
    features, state = make_features(6), make_state(objective, 6)
    outcome, *_ = run(objective, features, state)
    tau_of = {side: state[f"{side}/tau"].requires_grad_() for side in objective.sides}
    plain = mini_batch_loss(*(side.detach() for side in features), tau_of, mode)
    plain.backward()
    for side, tau in tau_of.items():
        torch.testing.assert_close(outcome.state[f"{side}/u"], 6 * tau.grad + 0.7, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), samples=st.integers(2, 12), data=st.data())
def test_the_order_of_the_batch_does_not_matter(mode, seed, samples, data):
    objective = create_objective("isogclr", mode, gamma=0.6)
    features, state = make_features(samples, seed), make_state(objective, samples, seed)
    order = torch.tensor(data.draw(st.permutations(range(samples))))
    outcome, *gradients = run(objective, features, state)
    moved_state = {name: values[order] for name, values in state.items()}
    moved, *moved_gradients = run(objective, [side[order] for side in features], moved_state)
    torch.testing.assert_close(moved.loss, outcome.loss, rtol=1e-11, atol=1e-13)
    for there, here in zip(moved_gradients, gradients, strict=True):
        torch.testing.assert_close(there, here[order], rtol=1e-9, atol=1e-13)
    for name, values in outcome.state.items():
        torch.testing.assert_close(moved.state[name], values[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_an_unseen_row_takes_the_batch_value_and_a_seen_row_moves_toward_it(mode):
    objective = create_objective("isogclr", mode, gamma=0.3)
    features, state = make_features(8), make_state(objective, 8)
    no_memory = create_objective("isogclr", mode, gamma=1.0)
    outcome, inner = run(objective, features, state)[0], run(no_memory, features, state)[0]
    for side in objective.sides:
        old, log_g = state[f"{side}/log_s"], inner.state[f"{side}/log_s"]
        expected = torch.where(old == NEVER_SEEN, log_g, (0.7 * old.exp() + 0.3 * log_g.exp()).log())
        assert 0 < (old == NEVER_SEEN).sum() < 8
        torch.testing.assert_close(outcome.state[f"{side}/log_s"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_at_gamma_one_an_old_estimate_of_any_size_is_forgotten(mode):
    objective = create_objective("isogclr", mode, gamma=1.0)
    features, state = make_features(8), make_state(objective, 8)
    new = {name: torch.full_like(values, NEVER_SEEN) if "log_s" in name else values for name, values in state.items()}
    old = {name: torch.full_like(values, 300.0) if "log_s" in name else values for name, values in state.items()}
    from_new, from_old = run(objective, features, new)[0].state, run(objective, features, old)[0].state
    assert all(torch.equal(from_old[name], from_new[name]) for name in state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rho", "bound"), [(100.0, "tau_min"), (0.0, "tau_max")])
def test_a_temperature_pushed_past_its_bound_stays_at_the_bound(mode, rho, bound):
    objective = create_objective(
        "isogclr", mode, rho=rho, eps=1e-30, eta=0.5, tau_min=0.05, tau_init=0.1, tau_max=0.2, gamma=1.0
    )
    features, state = make_features(8, dtype=torch.float32), make_state(objective, 8, dtype=torch.float32)
    for _ in range(3):
        outcome, *_ = run(objective, features, state)
        state = outcome.state
    for side in objective.sides:
        assert (state[f"{side}/tau"] == torch.tensor(getattr(objective.settings, bound), dtype=torch.float32)).all()
        assert outcome.metrics[f"{side}/share_at_{bound}"] == 1.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gamma", [0.01, 0.8, 1.0])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), samples=st.integers(2, 16))
def test_temperatures_of_a_thousandth_give_finite_numbers_in_float32(mode, gamma, seed, samples):
    objective = create_objective("isogclr", mode, gamma=gamma, tau_init=0.002, tau_min=0.001)
    features = make_features(samples, seed, torch.float32)
    state = make_state(objective, samples, seed, torch.float32, tau=(0.001, 0.003))
    outcome, *gradients = run(objective, features, state)
    assert_finite(outcome, *gradients)
    again, *gradients = run(objective, features, outcome.state)
    assert_finite(again, *gradients)


@pytest.mark.parametrize("mode", MODES)
def test_samples_with_coinciding_features_have_inner_value_one_and_no_gradient(mode):
    objective = create_objective("isogclr", mode, tau_min=0.001, tau_init=0.001)
    row = F.normalize(torch.ones(1, 16), dim=1)
    state = {name: torch.full((5,), value) for name, value in objective.fields.items()} | {"visits": torch.zeros(5)}
    outcome, *gradients = run(objective, [row.repeat(5, 1), row.repeat(5, 1)], state)
    assert_finite(outcome, *gradients)
    for side in objective.sides:
        torch.testing.assert_close(outcome.state[f"{side}/log_s"], torch.zeros(5), rtol=0, atol=1e-3)
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros(5, 16), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_two_has_one_other_sample_to_repel(mode):
    objective = create_objective("isogclr", mode, gamma=1.0)
    features, state = make_features(2), make_state(objective, 2)
    outcome, *gradients = run(objective, features, state)
    assert_finite(outcome, *gradients)
    first, second = (side.detach() for side in features)
    if mode == "bimodal":
        exponent = (first[0] @ second[1] - first[0] @ second[0]) / state["first/tau"][0]
        torch.testing.assert_close(outcome.state["first/log_s"][0], exponent)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_features_are_computed_in_float32_and_get_gradients_in_their_own_dtype(mode, dtype):
    objective = create_objective("isogclr", mode)
    features, state = make_features(9, dtype=dtype), make_state(objective, 9, dtype=torch.float32)
    outcome, *gradients = run(objective, features, state)
    wide, *wide_gradients = run(objective, [side.to(torch.float32) for side in features], state)
    assert torch.equal(outcome.loss, wide.loss)
    assert all(torch.equal(outcome.state[name], wide.state[name]) for name in state)
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    assert all(torch.equal(here, there.to(dtype)) for here, there in zip(gradients, wide_gradients, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_scale_saves_float16_gradients_that_would_vanish(mode):
    objective = create_objective("isogclr", mode)
    features, state = make_features(9, dtype=torch.float16), make_state(objective, 9, dtype=torch.float32, unseen=0.0)
    for side in objective.sides:
        state[f"{side}/log_s"] = torch.full((9,), 22.0)
    _, unscaled, _ = run(objective, features, state)
    (objective(*features, state, START).loss * 2.0**20).backward()
    assert unscaled.count_nonzero() == 0
    _, wide, _ = run(objective, [side.to(torch.float32) for side in features], state)
    torch.testing.assert_close(features[0].grad, (wide * 2.0**20).half(), rtol=0, atol=0)
    assert features[0].grad.count_nonzero() > 0


@pytest.mark.parametrize("mode", MODES)
def test_autocast_and_reduced_matmul_precision_around_the_objective_change_nothing(mode):
    objective = create_objective("isogclr", mode)
    features, state = make_features(64, dtype=torch.float32), make_state(objective, 64, dtype=torch.float32)
    outcome, *gradients = run(objective, features, state)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside, *gradients_inside = run(objective, features, state)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(inside.loss, outcome.loss)
    assert all(torch.equal(here, there) for here, there in zip(gradients_inside, gradients, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_new_state_has_the_keys_and_dtypes_of_the_old_one_and_counts_the_visit(mode):
    objective = create_objective("isogclr", mode)
    features, state = make_features(4, dtype=torch.float64), make_state(objective, 4, dtype=torch.float32)
    state["visits"] = torch.tensor([0, 1, 2, 3_000_000_000], dtype=torch.uint32)
    outcome, *_ = run(objective, features, state)
    assert outcome.state.keys() == {*objective.fields, "visits"}
    assert {name: values.dtype for name, values in outcome.state.items()} == {n: v.dtype for n, v in state.items()}
    assert outcome.state["visits"].tolist() == [1, 2, 3, 3_000_000_001]


def test_fields_give_a_new_sample_no_estimate_the_starting_temperature_and_no_momentum():
    bimodal = create_objective("isogclr", "bimodal", tau_init=0.03)
    unimodal = create_objective("isogclr", "unimodal", tau_init=0.4)
    assert bimodal.fields == {
        "first/log_s": NEVER_SEEN, "first/tau": 0.03, "first/u": 0.0,
        "second/log_s": NEVER_SEEN, "second/tau": 0.03, "second/u": 0.0,
    }  # fmt: skip
    assert unimodal.fields == {"sample/log_s": NEVER_SEEN, "sample/tau": 0.4, "sample/u": 0.0}


def test_the_old_state_and_the_features_are_left_as_they_were():
    objective = create_objective("isogclr")
    features, state = make_features(5), make_state(objective, 5)
    before = {name: values.clone() for name, values in state.items()}
    kept = [side.detach().clone() for side in features]
    run(objective, features, state)
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert all(torch.equal(side, copy) for side, copy in zip(features, kept, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_metrics_describe_the_new_temperatures_and_the_share_of_unseen_samples(mode):
    objective = create_objective("isogclr", mode)
    features, state = make_features(10), make_state(objective, 10)
    outcome, *_ = run(objective, features, state)
    for side in objective.sides:
        tau = outcome.state[f"{side}/tau"]
        assert outcome.metrics[f"{side}/tau_mean"] == tau.mean()
        assert outcome.metrics[f"{side}/tau_lowest"] == tau.min()
        assert outcome.metrics[f"{side}/tau_highest"] == tau.max()
        assert outcome.metrics[f"{side}/log_s_mean"] == outcome.state[f"{side}/log_s"].mean()
        unseen = (state[f"{side}/log_s"] == NEVER_SEEN).sum().item() / 10
        assert outcome.metrics[f"{side}/share_unseen"].item() == pytest.approx(unseen)
        assert outcome.metrics[f"{side}/tau_gradient_mean_abs"] > 0
    assert all(figure.shape == () for figure in outcome.metrics.values())


def test_cosine_schedules_give_the_steps_of_their_constant_values():
    schedules = {"gamma_decay_epochs": 2, "gamma_min": 0.4, "eta": 0.02, "eta_min": 0.01, "eta_decay_epochs": 2}
    scheduled = create_objective("isogclr", **schedules)
    features, state = make_features(6), make_state(scheduled, 6)
    for epoch, gamma, eta in ((0, 1.0, 0.02), (1, 0.7, 0.015), (2, 0.4, 0.01), (9, 0.4, 0.01)):
        constant, *_ = run(create_objective("isogclr", gamma=gamma, eta=eta), features, state)
        outcome, *_ = run(scheduled, features, state, Progress(step=10 * epoch + 9, steps_per_epoch=10))
        for name, values in constant.state.items():
            torch.testing.assert_close(outcome.state[name], values, rtol=1e-13, atol=0)


def test_only_the_features_that_ask_for_a_gradient_get_one():
    objective = create_objective("isogclr")
    (first, second), state = make_features(5), make_state(objective, 5)
    objective(first, second.detach(), state, START).loss.backward()
    assert first.grad is not None
    assert second.grad is None


def test_the_gradient_cannot_be_differentiated_again():
    objective = create_objective("isogclr")
    (first, second), state = make_features(5), make_state(objective, 5)
    squared = objective(first, second, state, START).loss ** 2
    (gradient,) = torch.autograd.grad(squared, first, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_batch_of_one_is_refused_for_it_has_no_negatives():
    objective = create_objective("isogclr")
    with pytest.raises(ValueError, match="batch of 1 sample has no negatives"):
        objective(*make_features(1), make_state(objective, 1), START)


def test_features_of_different_shapes_are_refused_with_both_shapes():
    objective = create_objective("isogclr")
    first, second = make_features(4)
    with pytest.raises(ValueError, match=r"first is \[4, 16\] and second \[3, 16\]"):
        objective(first, second[:3], make_state(objective, 4), START)


def test_integer_features_are_refused():
    objective = create_objective("isogclr")
    with pytest.raises(ValueError, match=r"torch\.int64.*must be floating point"):
        objective(torch.ones(4, 16, dtype=torch.int64), make_features(4)[1], make_state(objective, 4), START)


@pytest.mark.parametrize("name", ["second/u", "visits"])
def test_a_missing_field_is_named(name):
    objective = create_objective("isogclr")
    state = make_state(objective, 4)
    del state[name]
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        objective(*make_features(4), state, START)


def test_state_of_another_number_of_samples_is_refused_with_both_numbers():
    objective = create_objective("isogclr")
    state = make_state(objective, 4)
    state["first/tau"] = state["first/tau"][:3]
    with pytest.raises(ValueError, match=r"'first/tau' is \[3\] but the batch has 4 samples"):
        objective(*make_features(4), state, START)
