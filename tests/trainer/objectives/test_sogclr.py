"""The moving average of inner values, in the numbers that its logarithms stand for."""

import math

import pytest
import torch

from thermopile.trainer.objectives import create_objective
from thermopile.trainer.objectives.sogclr import log_with_eps, share_unseen, update_log_s


@pytest.mark.parametrize("gamma", [0.3, 1.0])
def test_s_moves_towards_g_by_gamma_and_is_g_where_the_sample_is_new(gamma):
    s, g = torch.tensor([0.0, 0.5, 2.0, 7.0]).double(), torch.tensor([3.0, 0.25, 2.0, 1e-3]).double()
    moved = update_log_s(s.log(), g.log(), gamma).exp()
    torch.testing.assert_close(moved, torch.where(s == 0.0, g, (1 - gamma) * s + gamma * g))


def test_eps_is_added_to_s_itself():
    s = torch.tensor([0.0, 0.5, 2.0]).double()
    torch.testing.assert_close(log_with_eps(s.log(), 0.25).exp(), s + 0.25)
    torch.testing.assert_close(log_with_eps(s.log(), 1.0).exp(), s + 1.0)
    torch.testing.assert_close(log_with_eps(s.log(), 0.0), s.log())


def test_unseen_samples_are_counted_for_each_side():
    before = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf], [0.0, 0.0, 0.0, -math.inf]])
    assert share_unseen(before).tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("mode", "given", "negatives"), [("bimodal", {}, 255), ("unimodal", {}, 510), ("unimodal", {"keys": True}, 255)]
)
def test_a_rho_that_may_never_bind_is_told_with_the_bound(mode, given, negatives):
    bound = math.log(negatives)
    assert create_objective("isogclr", mode, rho=bound - 1e-9).advice(256, **given) == []
    (advice,) = create_objective("isogclr", mode, rho=bound).advice(256, **given)
    assert f"rho {bound} is not below log({negatives} negatives) = {bound:.2f}" in advice
