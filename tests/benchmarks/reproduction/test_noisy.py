"""SimCLR and DeCL on noisy similarities."""

import pytest
import torch
from torch.nn import functional as F

from thermopile.benchmarks.reproduction.noisy import (
    NoisyDecl,
    NoisyDeclSettings,
    NoisyPairs,
    NoisySimclr,
    NoisySimclrSettings,
)
from thermopile.trainer.objectives import Progress, create_objective

NOISY = {"simclr": (NoisySimclr, NoisySimclrSettings), "decl": (NoisyDecl, NoisyDeclSettings)}


@pytest.fixture
def features():
    torch.manual_seed(0)
    return [F.normalize(torch.randn(64, 8, dtype=torch.float64), dim=1).requires_grad_() for _ in range(2)]


def step(objective, features):
    state = {name: torch.full((64,), value, dtype=torch.float64) for name, value in objective.fields.items()}
    outcome = objective(*features, state | {"visits": torch.zeros(64, dtype=torch.int64)}, Progress(0, 10))
    return outcome.loss, torch.autograd.grad(outcome.loss, features)[0]


@pytest.mark.parametrize("name", NOISY)
def test_without_noise_it_is_the_objective_itself_and_noise_changes_its_gradient(name, features):
    noisy, settings = NOISY[name]
    expected = step(create_objective(name, "unimodal", tau=0.1), features)
    for got, plain in zip(step(noisy("unimodal", settings(tau=0.1, noise=0.0)), features), expected, strict=True):
        torch.testing.assert_close(got, plain)
    first, second = (step(noisy("unimodal", settings(tau=0.1, noise=0.2)), features)[1] for _ in range(2))
    assert (first - expected[1]).norm() > 0.05 * expected[1].norm()
    assert not torch.equal(first, second)


def test_every_similarity_has_noise_of_its_own_with_that_deviation(features):
    table = torch.stack([each.detach() for each in features])
    pairs = NoisyPairs(table, slice(0, 64), across=False, budget=2**20, noise=0.2)
    (block, _), exact = pairs.blocks, table.flatten(0, 1)
    (_, similarities), *_ = pairs.visit(block)
    apart = similarities - exact[:64] @ exact.T
    noise = apart[similarities > -2]  # but for where a sample meets itself
    assert float(noise.std()) == pytest.approx(0.2, rel=0.05)
    assert float((pairs.positives - (table[0] * table[1]).sum(1)).std()) == pytest.approx(0.2, rel=0.3)
    assert len(noise.unique()) == len(noise) == 64 * 126
