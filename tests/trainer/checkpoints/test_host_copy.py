"""A copy keeps what the tensors were when it was made."""

import pytest
import torch

from thermopile.trainer.checkpoints.host_copy import CopyOnHost, PinnedMemory, bytes_on_gpu, placed
from thermopile.trainer.checkpoints.tensors import load_tensors, save_tensors, take_apart

from support.waits import no_waits


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
    memory = PinnedMemory(bytes_on_gpu({"weights": weights}), weights.device)
    assert memory.bytes.is_pinned()
    weights += 1  # loads the kernel, for which the device would be waited for
    weights -= 1
    torch.cuda._sleep(2_000_000_000)  # a second
    weights += 1
    asked = torch.cuda.Event()
    with no_waits():
        copy = CopyOnHost({"weights": weights}, memory.bytes)
        asked.record()
        weights += 1
    assert not asked.query()
    assert torch.equal(copy.result()["weights"], torch.ones(2**20))
    memory.close()


def test_tensors_are_placed_one_behind_the_other_as_they_are_laid_out(tmp_path):
    tensors = [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.tensor(3, dtype=torch.int64),
        torch.randn(5).bfloat16(), torch.randn(3, 2, dtype=torch.float64), torch.arange(7).byte(),
    ]  # fmt: skip
    padded = [-(-tensor.numel() * tensor.element_size() // 16) * 16 for tensor in tensors]
    memory = torch.zeros(sum(padded), dtype=torch.uint8)
    copies = [placed(memory, sum(padded[:number]), tensor) for number, tensor in enumerate(tensors)]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    for copy, tensor in zip(copies, tensors, strict=True):  # none is in another's place
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.stride()) == (tensor.dtype, tensor.stride())
    save_tensors(tmp_path / "tensors", take_apart(copies)[0])  # which refuses tensors that share memory
    saved = load_tensors(tmp_path / "tensors")
    assert all(torch.equal(saved[str(number)], tensor) for number, tensor in enumerate(tensors))


def test_the_pinned_memory_of_a_training_is_hardly_larger_than_12_bytes_a_parameter(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7), torch.nn.BatchNorm2d(64), torch.nn.Flatten(),
                                torch.nn.LazyLinear(512))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    tree = {"encoders": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert bytes_on_gpu(tree) == 0
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda"))
    assert bytes_on_gpu(tree) <= 12.2 * sum(weight.numel() for weight in model.parameters())
