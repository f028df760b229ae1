"""Steps with keys of a momentum encoder and with local views, against their losses written out plainly."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from thermopile.trainer.objectives import create_objective
from thermopile.trainer.objectives.pairs import Directed

from support.objectives import (
    FRAMED,
    PLAIN,
    START,
    Frame,
    directions_of,
    keys_of,
    local_of,
    make_features,
    make_objective,
    make_state,
    run_step,
)

KEYS, LOCAL = Frame(keys=True), Frame(local=2)
WITH_FRAME = pytest.mark.parametrize(
    "case", [case for case in FRAMED if case[2] != PLAIN], ids=lambda case: f"{case[0]}{case[2]}"
)


def exponents(objective, anchors, positives, candidates):
    """(S_iz - s_i) / tau of each anchor's negatives z, [b, negatives], its own sample's -inf; and s_i."""
    positive, itself = (anchors * positives).sum(1), torch.eye(len(anchors), dtype=torch.bool)
    similarities = torch.cat([(anchors @ rows.T).masked_fill(itself, -math.inf) for rows in candidates], dim=1)
    return (similarities - positive[:, None]) / objective.settings.tau, positive


def plain_auc_cl(objective, directions):
    settings, losses = objective.settings, []
    for anchors, positives, (candidates,) in directions:
        negatives = (anchors @ candidates.T)[~torch.eye(len(anchors), dtype=torch.bool)]
        positive = (anchors * positives).sum(1)
        of_positives = (positive - settings.a) ** 2 + 2 * settings.alpha * (1 - positive) - settings.alpha**2
        of_negatives = (negatives - objective.b) ** 2 + 2 * settings.alpha * negatives
        weight = 1 if settings.negatives == "sum" else settings.p / len(anchors)
        losses.append((of_positives.sum() + weight * of_negatives.sum()) / len(anchors))
    return torch.stack(losses).mean()


def plain_decl(objective, directions):
    """loss1, with the rate of the batch: that of the anchors at gamma = 1, or that of their keys."""
    tau, of_anchors, rates = objective.settings.tau, [], []
    keys = [positives for _, positives, _ in directions]
    for (anchors, positives, candidates), own_keys in zip(directions, keys[::-1], strict=True):
        log_h, positive = exponents(objective, anchors, positives, candidates)
        of_anchors.append(((log_h + positive[:, None] / tau).exp().sum(1) / (len(anchors) - 1), positive / tau))
        log_h, positive = exponents(objective, own_keys, positives, candidates)
        rates.append((log_h + positive[:, None] / tau).exp().sum(1) / (len(anchors) - 1))
    if objective.settings.rate == "moving_average":
        rates = [r for r, _ in of_anchors]
    rate = torch.stack(rates).mean(0).detach()
    return torch.stack([(r / rate - positive).mean() for r, positive in of_anchors]).mean()


PLAINLY = {"auc_cl": plain_auc_cl, "decl": plain_decl}
"""Losses that test_weights does not write out for these frames: of no weights, and with the rate of the keys."""


def check(objective, features, state):
    """Compare a step with autograd of the loss written out: the mean over directions, with keys twice that."""
    outcome, *gradients = run_step(objective, features, state)
    first, second = (side.detach().clone().requires_grad_() for side in features)
    directions = directions_of(objective.frame, objective.across, first, second)
    expected = (2 if objective.frame.keys else 1) * PLAINLY[objective.name](objective, directions)
    torch.testing.assert_close(outcome.loss, expected, rtol=1e-10, atol=1e-11)
    there = torch.autograd.grad(expected, [first, second, *objective.parameters()])
    scale = max(1.0, *(gradient.abs().max().item() for gradient in gradients))
    torch.testing.assert_close(gradients, list(there), rtol=1e-9, atol=1e-12 * scale)
    return outcome


@pytest.mark.parametrize("case", [case for case in FRAMED if case[2] != PLAIN and case[0] == "auc_cl"], ids=str)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), samples=st.integers(2, 9), tau=st.floats(0.05, 1.0), weighted=st.booleans())
def test_value_and_gradients_are_autograds_of_the_loss_of_every_direction(case, seed, samples, tau, weighted):
    negatives = "weighted" if weighted else "sum"
    objective = make_objective(*case, b=tau - 0.5, negatives=negatives)
    objective.name = case[0]
    check(objective, make_features(samples, seed), make_state(objective, samples, seed))


@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), samples=st.integers(2, 9), budget=st.sampled_from([0, 1, 300]))
def test_decls_rate_of_the_momentum_encoder_is_that_of_the_keys(seed, samples, budget):
    objective = make_objective(
        "decl", "unimodal", KEYS, rate="momentum", auxiliary="mean", gamma=0.3, tau=0.2, similarity_budget=budget
    )
    objective.name = "decl"
    features, state = make_features(samples, seed), make_state(objective, samples, seed)
    outcome = check(objective, features, state)
    keys = [key.double() for key in keys_of(KEYS, *features)]
    itself = torch.eye(samples, dtype=torch.bool)
    log_rate = torch.cat([keys[0] @ keys[1].T / 0.2, keys[1] @ keys[0].T / 0.2], dim=1)
    log_rate = log_rate.masked_fill(itself.repeat(1, 2), -math.inf).logsumexp(1) - math.log(2 * (samples - 1))
    torch.testing.assert_close(outcome.state["sample/log_rate"], log_rate, rtol=1e-10, atol=1e-11)


@WITH_FRAME
def test_keys_get_no_gradient_and_local_views_get_theirs(case):
    (first, second), objective = make_features(6), make_objective(*case)
    keys, local = keys_of(case[2], first, second), [view.detach() for view in local_of(case[2], first, second)]
    for leaf in (*(keys or ()), *local):
        leaf.requires_grad_()
    objective(first, second, make_state(objective, 6), START, keys=keys, local=local).loss.backward()
    assert all(key.grad is None for key in keys or ())
    assert all(view.grad.abs().max() > 0 for view in (first, second, *local))


@pytest.mark.parametrize("name", ["simclr", "auc_cl", "moco_v3"])
def test_local_views_may_be_the_only_ones_to_ask_for_a_gradient(name):
    first, second = (side.detach() for side in make_features(6))
    keys = keys_of(KEYS, first, second) if name == "moco_v3" else None
    gradients = []
    for asks in (False, True):
        local = [view.detach().requires_grad_() for view in local_of(LOCAL, first, second)]
        objective = make_objective(name, "unimodal")
        objective(first.requires_grad_(asks), second, {}, START, keys=keys, local=local).loss.backward()
        gradients.append([view.grad for view in local])
    assert all(torch.equal(alone, beside) for alone, beside in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", ["simclr", "auc_cl"])
@pytest.mark.parametrize("budget", [1, 10**6])
def test_without_local_views_directions_make_the_step_of_pairs(name, budget):
    objective, features = make_objective(name, "unimodal", b=0.2), make_features(7)
    outcome, *gradients = run_step(objective, features, {})
    objective.compared = lambda frame: Directed(frame, across=objective.across, budget=budget)
    directed, *of_directed = run_step(objective, features, {})
    torch.testing.assert_close(directed.loss, outcome.loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(of_directed, gradients, rtol=1e-10, atol=1e-13)


class Products(TorchDispatchMode):
    """Counts multiply-adds."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "frame", "views", "products"),
    [
        ("moco_v3", KEYS, 0, 2 * 2),
        ("moco_v3", KEYS, 3, 8 * 2),
        ("auc_cl", KEYS, 3, 8 * 2),
        ("auc_cl", PLAIN, 3, 8 * 3),
        ("simclr", PLAIN, 3, 5 * 3 * 2),  # a view has one block, against both targets
    ],
)
def test_a_direction_takes_two_products_with_keys_and_three_with_learned_targets(name, frame, views, products):
    first, second = make_features(12)
    local = [first.detach().requires_grad_() for _ in range(views)]
    with Products() as counter:
        make_objective(name, "unimodal")(first, second, {}, START, keys_of(frame, first, second), local).loss.backward()
    assert counter.count == products * 12 * 12 * 16


@WITH_FRAME
def test_similarities_stay_within_the_budget(case, monkeypatch):
    held, budget = [], 3 * 2 * 16 * 8  # three rows against both targets

    class Watched(Directed):
        def visit(self, block):
            for rows, similarities in super().visit(block):
                held.append(self._chunk.nbytes + sum(kept.nbytes for kept in self._kept.values()))
                yield rows, similarities

    monkeypatch.setattr("thermopile.trainer.objectives.base.Directed", Watched)
    objective = make_objective(*case, similarity_budget=budget)
    run_step(objective, make_features(16), make_state(objective, 16))
    assert 0 < max(held) <= budget


NAMES = {"keys": "auc_cl, decl, isogclr, moco_v3, sogclr", "local": "auc_cl, decl, moco_v3, simclr"}


@pytest.mark.parametrize(
    ("name", "mode", "settings", "frame", "message"),
    [
        ("simclr", "unimodal", {}, KEYS, r"objective 'simclr' takes no keys of a momentum encoder; valid: {keys}$"),
        ("sogclr", "bimodal", {}, KEYS, r"objective 'sogclr' takes no keys .* in mode bimodal; unimodal: {keys}$"),
        ("dcl", "unimodal", {}, LOCAL, r"objective 'dcl' takes no local views; valid, in mode unimodal: {local}$"),
        ("decl", "bimodal", {}, LOCAL, r"objective 'decl' takes no local views; valid, in mode unimodal: {local}$"),
        ("moco_v3", "unimodal", {}, PLAIN, r"objective 'moco_v3' needs the keys of a momentum encoder$"),
        (
            "decl",
            "unimodal",
            {"rate": "momentum"},
            PLAIN,
            r"'decl': rate = 'momentum' needs the keys",
        ),
        ("simclr", "unimodal", {"similarity": "distance"}, LOCAL, r"'simclr': similarity = 'distance' takes neither"),
        ("decl", "unimodal", {"similarity": "distance"}, KEYS, r"'decl': similarity = 'distance' takes neither"),
        ("auc_cl", "unimodal", {"views": "all"}, KEYS, r"'auc_cl': views = 'all' takes neither .*; use 'across'$"),
        ("auc_cl", "unimodal", {"views": "all"}, LOCAL, r"'auc_cl': views = 'all' takes neither .*; use 'across'$"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_in_one_line(name, mode, settings, frame, message):
    objective, features = create_objective(name, mode, **settings), make_features(4)
    given = {"keys": keys_of(frame, *features), "local": local_of(frame, *features)}
    for refused in (
        lambda: objective.check_frame(frame.keys, frame.local),
        lambda: objective(*features, make_state(objective, 4), START, **given),
    ):
        with pytest.raises(ValueError, match=message.format_map(NAMES)) as caught:
            refused()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["keys", "local"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: rows[:3], r"first is \[4, 16\] and {}\[1\] \[3, 16\]; both must be \[b, d\]"),
        (lambda rows: rows[:, :8], r"first is \[4, 16\] and {}\[1\] \[4, 8\]; both must be \[b, d\]"),
        (lambda rows: rows.long(), r"first is torch.float64, {}\[1\] torch.int64; both must be floating point"),
        (lambda rows: 2 * rows, r"row 0 of {}\[1\] has norm 2, "),
        (lambda rows: rows * math.nan, r"row 0 of {}\[1\] has norm nan, "),
    ],
    ids=["rows", "columns", "integers", "norms", "nan"],
)
def test_keys_and_local_views_that_do_not_fit_are_named(kind, spoil, message):
    first, second = make_features(4)
    given = {"keys": (first, second), "local": [first, second]}
    given[kind] = [first, spoil(second.detach())]
    with pytest.raises(ValueError, match=message.format(kind)):
        make_objective("moco_v3", "unimodal")(first, second, {}, START, **given)
