"""Encoders in half precision: the same run to its round-off, and a loss scale that survives a stop."""

import json

import pytest
import torch

from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.config import OPTIMIZERS
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from support.runs import small

TOO_LARGE, HARMLESS = 2.0**40, 2.0**8
"""Scales of the loss whose gradients overflow at once, and do not."""
CLIP = {
    "objective": {"name": "clip"}, "optimizer": {"lr": 1e-2, "warmup": 0},
    "model": {"dim": 16, "image": {"config": {"width": 8}}},
}  # fmt: skip
"""A loss that falls as it learns: iSogCLR's has other weights in every step."""


def tiny(dataset, precision, **more):
    return small(dataset, **{"precision": precision, "optimizer": {"warmup": 0}} | more)


def scaled_by(trainer, scale):
    scaler = trainer.precision.scaler
    if scaler.is_enabled():
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale})
    return trainer


def losses(run):
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


def trained(config, path):
    run = RunDirectory(path)
    with Trainer.open(config, run) as trainer:
        scaled_by(trainer, HARMLESS).train()
    return run


@pytest.fixture(scope="module")
def in_float32(pairs_dataset, tmp_path_factory):
    return losses(trained(tiny(pairs_dataset, "float32", **CLIP), tmp_path_factory.mktemp("runs") / "float32"))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.wide)])
def test_a_run_in_half_precision_begins_as_one_in_float32_and_learns_as_it_does(
    in_float32, pairs_dataset, tmp_path, precision
):
    run = trained(tiny(pairs_dataset, precision, **CLIP), tmp_path / "run")
    found = losses(run)
    assert found != in_float32
    assert found[:4] == pytest.approx(in_float32[:4], rel=0.01)
    assert sum(found[-3:]) < sum(found[:3]) - 1
    if precision == "bf16":
        assert load_checkpoint(latest_checkpoint(run.checkpoints))[1]["loss_scale"] == {}, "only fp16 scales the loss"


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_encoders_compute_in_half_precision_and_give_unit_rows_of_float32(pairs_dataset, tmp_path, precision, dtype):
    encoded, received = [], []
    with Trainer.open(tiny(pairs_dataset, precision, epochs=1), RunDirectory(tmp_path / "run")) as trainer:
        for encoder in trainer.run.encoders.children():
            encoder.register_forward_hook(lambda module, inputs, features: encoded.append(features.dtype))
        trainer.run.objective.register_forward_pre_hook(lambda module, inputs: received.extend(inputs[:2]))
        trainer.train(should_stop=lambda: trainer.run.steps_done == 2)
    assert set(encoded) == {dtype}
    assert len(received) == 2 * 2
    for features in received:
        assert features.dtype == torch.float32
        torch.testing.assert_close(features.norm(dim=1), torch.ones(256), rtol=0, atol=1e-6)
    assert {weight.dtype for weight in trainer.run.encoders.parameters()} == {torch.float32}


@pytest.mark.wide
def test_a_resumed_fp16_run_goes_on_with_its_loss_scale_and_losses(pairs_dataset, tmp_path):
    config = tiny(pairs_dataset, "fp16", epochs=1)
    whole, broken = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    for run, steps in ((whole, 7), (broken, 4)):
        with Trainer.open(config, run) as trainer:
            scaled_by(trainer, HARMLESS).train(
                should_stop=lambda trainer=trainer, steps=steps: trainer.run.steps_done == steps
            )
    _, training = load_checkpoint(latest_checkpoint(broken.checkpoints))
    assert training["loss_scale"]["scale"] == HARMLESS
    with Trainer.open(config, broken, resume=True) as trainer:
        assert trainer.precision.scaler.get_scale() == HARMLESS
        trainer.train()
    assert losses(broken) == losses(whole)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("adamw", "lars") else pytest.mark.wide) for name in OPTIMIZERS]
)
def test_a_step_whose_gradients_overflow_moves_no_weight_and_halves_the_scale(pairs_dataset, tmp_path, name):
    config = tiny(pairs_dataset, "fp16", epochs=1, optimizer={"name": name, "warmup": 0})
    with Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer:
        scaled_by(trainer, TOO_LARGE)
        before = {key: value.clone() for key, value in trainer.run.encoders.state_dict().items()}

        def report(report):
            if report.step == 1:
                torch.testing.assert_close(trainer.run.encoders.state_dict(), before, rtol=0, atol=0)
                assert trainer.precision.scaler.get_scale() == TOO_LARGE / 2
                for memory in trainer.optimizer.weights.state.values():
                    assert not any(value.any() for value in memory.values() if isinstance(value, torch.Tensor))
                scaled_by(trainer, HARMLESS)

        trainer.train(report, lambda: trainer.run.steps_done == 2)
        after = trainer.run.encoders.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert not torch.equal(after["image.head.weight"], before["image.head.weight"])
