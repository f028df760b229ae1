"""A run on a GPU: the CPU's losses, no wait for the device but for the log, and one rank for each GPU."""

import pytest
import torch

from thermopile.trainer.checkpoints.host_copy import CopyOnHost, PinnedMemory, bytes_on_gpu
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import sets
from support.runs import finish, lines, losses, train
from support.waits import no_waits

TREE = {"epochs": 2, "batch_size": 256, "log_every": 1, "optimizer": {"warmup": 0}}


def small(dataset, **more):
    # One loader everywhere: views of `dali` differ from those of `ffcv` by a level.
    data = {"path": str(dataset.path), "image_size": 32, "loader": "ffcv"}
    return resolve(load_config(TREE | {"data": data, "checkpoint": {"every_minutes": 0}} | more), dataset)[0]


def first(steps, run):
    """The first losses."""
    return list(losses(run).values())[:steps]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({"precision": "float32", "channels_last": False}, 1e-2), ({"precision": "tf32"}, 1e-2), ({}, 5e-2)],
)
def test_a_run_on_a_gpu_begins_with_the_losses_of_one_on_the_cpu(pairs_dataset, tmp_path, settings, tolerance):
    on_cpu = train(small(pairs_dataset, device="cpu"), tmp_path / "cpu")
    on_gpu = train(small(pairs_dataset, device="cuda", **settings), tmp_path / "gpu")
    assert first(5, on_gpu) == pytest.approx(first(5, on_cpu), rel=tolerance)
    line = lines(on_gpu)[-1]
    assert 0 < line["forward_backward_seconds"] < line["step_seconds"]


HF = {
    "image": {"name": "hf:resnet-18", "config": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}},
    "text": {"name": "hf:distilbert", "config": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}},
}
CLIP = {
    "image": {"name": "hf:vit-s", "config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}},
    "text": {"name": "hf:clip-text", "config": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}},
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "float32"}, {}, {"model": HF}, {"model": CLIP}, {"model": HF, "precision": "tf32"},
        {"model": HF | {"activation_checkpointing": True}}, {"model": CLIP | {"activation_checkpointing": True}},
        pytest.param({"model": HF, "compile": True}, id="compiled-HF"),
        pytest.param({"model": CLIP, "compile": True}, id="compiled-CLIP"),
    ],
)  # fmt: skip
def test_a_step_between_two_lines_of_the_log_does_not_wait_for_the_gpu(pairs_dataset, tmp_path, settings):
    config = small(pairs_dataset, device="cuda", log_every=100, **settings)
    with Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer:
        batches = trainer.run.loader.epoch(0, 0)
        for _ in range(3):  # the objective looks at the first features, and kernels are chosen or compiled
            trainer.step([next(batches)])
        memory = PinnedMemory(bytes_on_gpu(trainer.run.training_state()), trainer.run.device)
        with no_waits():
            for _ in range(3):
                trainer.step([next(batches)])
            copy = CopyOnHost(trainer.run.training_state(), memory.bytes)
        copy.result()
        memory.close()


@pytest.mark.gpu
@pytest.mark.parametrize("loader", ["ffcv", "dali"])
@pytest.mark.parametrize("settings", [{"precision": "float32"}, {"precision": "fp16"}, {"compile": True}],
                         ids=["float32", "fp16", "compiled"])  # fmt: skip
def test_a_run_in_pieces_begins_with_the_losses_of_one_that_encodes_batches_at_once(
    pairs_dataset, tmp_path, loader, settings
):
    if loader == "dali":
        pytest.importorskip("nvidia.dali")
    data = {"path": str(pairs_dataset.path), "image_size": 32, "loader": loader}
    runs = [train(small(pairs_dataset, device="cuda", data=data, micro_batch=rows, **settings), tmp_path / str(rows))
            for rows in (0, 64)]  # fmt: skip
    whole, pieces = (first(5, run) for run in runs)
    assert pieces == pytest.approx(whole, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"micro_batch": 64}], ids=["at once", "pieces"])
def test_a_run_stopped_on_a_gpu_goes_on_with_the_same_losses(pairs_dataset, tmp_path, more):
    config = small(pairs_dataset, device="cuda", precision="fp16", **more)
    whole, broken = train(config, tmp_path / "whole"), RunDirectory(tmp_path / "broken")
    with Trainer.open(config, broken) as trainer:
        trainer.train(should_stop=lambda: trainer.run.steps_done == 5)
    train(config, broken, resume=True)
    assert first(8, broken) == pytest.approx(first(8, whole), rel=1e-2)


@pytest.mark.gpu
def test_steps_that_are_skipped_are_logged_though_nothing_waits_for_their_end(pairs_dataset, tmp_path):
    config = small(pairs_dataset, device="cuda", on_nan="skip")
    run = RunDirectory(tmp_path / "run")
    with Trainer.open(config, run) as trainer:
        trainer.run.encoders.image.register_forward_hook(
            lambda module, inputs, features: features * torch.nan if trainer.run.steps_done == 3 else None
        )
        trainer.train()
    assert [step for step, loss in losses(run).items() if loss is None] == [4]


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("image", ["conv", "hf:resnet-18"])  # without and with batch norms
def test_two_ranks_with_a_gpu_each_train_as_one_does(start_ranks, pairs_dataset, tmp_path, image):
    def start(run, world):
        settings = sets("epochs=1", "batch_size=256", "log_every=1", "data.image_size=32", "data.loader=ffcv",
                        "precision=float32", f"model.image.name={image}")  # fmt: skip
        finish(start_ranks(world, "train", "--data", pairs_dataset.path, "--out", run.path, *settings))
        return losses(run)

    alone, together = (start(RunDirectory(tmp_path / f"of-{world}"), world) for world in (1, 2))
    assert together == pytest.approx(alone, rel=1e-2)
