"""The comparison of anchors with candidates against plain softmaxes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thermopile.trainer.objectives import contrast as module
from thermopile.trainer.objectives.contrast import EXCLUDED, contrast


def make_similarities(rows, columns, seed, excluded):
    """Similarities in [-1, 1] where about the share `excluded` is no candidate, but every anchor keeps one."""
    generator = torch.Generator().manual_seed(seed)
    similarities = 2 * torch.rand(rows, columns, generator=generator, dtype=torch.float64) - 1
    left_out = torch.rand(rows, columns, generator=generator) < excluded
    left_out[torch.arange(max(rows, columns)) % rows, torch.arange(max(rows, columns)) % columns] = False
    return similarities.masked_fill_(left_out, EXCLUDED)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("in_place", [False, True])
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    excluded=st.sampled_from([0.0, 0.4]),
    chunk=st.sampled_from([1, 20, 10**6]),
)
def test_an_anchor_sees_its_candidates_softmax_whatever_the_chunks(dim, in_place, seed, rows, columns, excluded, chunk):
    similarities = make_similarities(rows, columns, seed, excluded)
    anchors = (columns, rows)[dim]
    positives, tau = torch.linspace(-1, 1, anchors).double(), torch.linspace(0.01, 1, anchors).double()
    exponents = (similarities - positives.unsqueeze(dim)) / tau.unsqueeze(dim)
    exponents = exponents.masked_fill(similarities == EXCLUDED, -1e9)
    softmax = exponents.softmax(dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_CHUNK", chunk)
        seen = contrast(similarities, positives, tau, dim, similarities if in_place else torch.empty_like(similarities))
    torch.testing.assert_close(seen.exps / seen.total.unsqueeze(dim), softmax, rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(seen.log_sum, exponents.logsumexp(dim), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(seen.mean_exponent, (softmax * exponents).sum(dim), rtol=1e-11, atol=1e-12)


def test_an_excluded_pair_has_no_weight_at_any_temperature():
    similarities = torch.tensor([[EXCLUDED, 0.5, 0.5]])
    for tau in (1e-3, 1.0, 1e6):
        seen = contrast(similarities, torch.zeros(1), torch.tensor([tau]), 1, torch.empty_like(similarities))
        assert seen.exps.tolist() == [[0.0, 1.0, 1.0]]
        torch.testing.assert_close(seen.mean_exponent, torch.tensor([0.5 / tau]))
