"""A copy keeps what the tensors were when it was made."""

import pytest
import torch

from thermopile.trainer.checkpointer import CopyOnHost

from waits import no_waits


def test_what_is_changed_later_is_not_in_the_copy():
    weights, state = torch.ones(3), {"step": torch.tensor(1.0), "momentum": torch.zeros(2)}
    copy = CopyOnHost({"encoders": {"weight": weights}, "optimizer": {"state": {0: state}, "groups": [{"lr": 0.1}]}})
    weights.zero_()
    state["momentum"] += 1
    result = copy.result()
    assert torch.equal(result["encoders"]["weight"], torch.ones(3))
    assert torch.equal(result["optimizer"]["state"][0]["momentum"], torch.zeros(2))
    assert result["optimizer"]["groups"] == [{"lr": 0.1}]


def test_settings_and_nested_lists_are_copied_too():
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}]
    copy = CopyOnHost({"groups": groups, "name": "adamw", "temperature": None})
    groups[0]["lr"] = 0.2
    groups[0]["params"].append(2)
    assert copy.result() == {
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}], "name": "adamw", "temperature": None,
    }  # fmt: skip


def test_a_parameter_is_copied_without_its_graph():
    copy = CopyOnHost({"weight": torch.nn.Parameter(torch.ones(2))}).result()
    assert not copy["weight"].requires_grad


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_of_its_moment_and_does_not_wait_for_it():
    weights = torch.zeros(2**20, device="cuda").contiguous()
    CopyOnHost({"weights": weights}).result()  # the first one sets up pinned memory
    torch.cuda._sleep(200_000_000)
    weights += 1
    asked = torch.cuda.Event()
    with no_waits():
        copy = CopyOnHost({"weights": weights})
        asked.record()
        weights += 1
    assert not asked.query()
    assert torch.equal(copy.result()["weights"], torch.ones(2**20))
