"""Compiled elementwise operations: the results of the plain ones, over chunks and for every objective that has some."""

import pytest
import torch
from torch._dynamo.utils import counters

from thermopile.trainer.objectives import pairs as pairs_module

from support.objectives import START, make_features, make_objective, make_state, run_step

pytestmark = pytest.mark.wide


def outcome(case, features, **settings):
    objective = make_objective(*case, **settings)
    found, *gradients = run_step(
        objective, features, make_state(objective, len(features[0]), dtype=torch.float32), START
    )
    return found.loss, found.state, gradients


@pytest.mark.parametrize("budget", [0, 4 * 4 * 40], ids=["kept", "chunks"])
@pytest.mark.parametrize(
    "case", [("isogclr", "bimodal"), ("isogclr", "unimodal"), ("clip", "bimodal"), ("siglip", "bimodal")], ids=str
)
def test_compiled_operations_differ_by_round_off(case, budget, monkeypatch):
    compiled = []
    compile_one = pairs_module.compile_for_each_shape
    monkeypatch.setattr(pairs_module, "compile_for_each_shape", lambda one: compiled.append(one) or compile_one(one))
    features = make_features(40, dtype=torch.float32)
    plain, fast = (outcome(case, features, similarity_budget=budget, compile=on) for on in (False, True))
    assert compiled
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


def test_a_compiler_does_not_undo_the_rounding_to_tf32():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    rounded = pairs_module.compile_for_each_shape(pairs_module.rounded)
    assert torch.equal(rounded(values.clone()), pairs_module.rounded(values.clone()))


def test_each_shape_has_code_of_its_own_whichever_came_before():
    """Otherwise a resumed run would have other code than a run that was never stopped."""
    add_one = pairs_module.compile_for_each_shape(lambda values: values + 1)
    counters["stats"].clear()
    for rows in (5, 6, 7):
        add_one(torch.zeros(rows, 3))
    assert counters["stats"]["unique_graphs"] == 3


def test_distances_have_operations_of_their_own_and_are_not_compiled(monkeypatch):
    monkeypatch.setattr(pairs_module, "compile_for_each_shape", lambda operations: pytest.fail("compiled"))
    features = [2 * side for side in make_features(20, dtype=torch.float32)]
    outcome(("simclr", "unimodal"), features, compile=True, similarity="distance")
