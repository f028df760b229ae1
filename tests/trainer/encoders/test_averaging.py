"""The moving average of the weights: how it moves, and what uses it."""

import json

import pytest
import torch

from thermopile.pipeline.batch import Batch
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint, load_checkpoint
from thermopile.trainer.config import ModelConfig
from thermopile.trainer.encoders import AveragedEncoders, Encoders
from thermopile.trainer.evaluation.evaluate import evaluate

from support.runs import SMALL_MODEL, lines, losses, small, train
from support.waits import no_waits

MODEL = ModelConfig(dim=5, image={"name": "conv", "config": {"width": 2, "batch_norm": True}})
WITH_BATCH_NORM = SMALL_MODEL | {"image": {"config": {"width": 4, "batch_norm": True}}}
LATE = 10**6
"""A step at which the decay has reached its final value."""


def made():
    torch.manual_seed(0)
    return Encoders.create(MODEL, "unimodal", 16, None)


def train_a_little(encoders):
    encoders(Batch(torch.arange(4), tuple(torch.randn(4, 3, 16, 16) for _ in range(2))))  # batch norms learn
    with torch.no_grad():
        for weight in encoders.parameters():
            weight.add_(torch.randn_like(weight))


def values(encoders):
    return {name: value.detach().clone() for name, value in encoders.state_dict().items()}


@pytest.mark.parametrize(("steps_done", "decay"), [(LATE, 0.75), (1, 2 / 11), (5, 6 / 15)])
def test_weights_and_statistics_move_by_a_share_that_is_larger_in_the_first_steps(steps_done, decay):
    encoders = made()
    average, start = AveragedEncoders(encoders, 0.75), values(encoders)
    train_a_little(encoders)
    average.follow(steps_done)
    for name, value in values(encoders).items():
        moved = decay * start[name] + (1 - decay) * value if value.is_floating_point() else value
        torch.testing.assert_close(average.state_dict()[name], moved)
    assert not torch.equal(
        start["image.backbone.body.1.running_mean"], values(encoders)["image.backbone.body.1.running_mean"]
    )


def test_it_reads_nothing_from_the_device_and_is_in_evaluation_mode():
    encoders = made()
    average = AveragedEncoders(encoders, 0.75)
    train_a_little(encoders)
    with no_waits():
        average.follow(1)
    assert not any(module.training for module in average.modules())
    assert not any(weight.requires_grad for weight in average.parameters())


@pytest.fixture(scope="module")
def averaged_run(pairs_dataset, captions_dataset, tmp_path_factory):
    """14 steps on pairs, evaluated after 7, with a checkpoint there."""
    model = WITH_BATCH_NORM | {"ema": 0.9}
    config = small(
        pairs_dataset, model=model, checkpoint={"every_steps": 7},
        evaluation={"every_steps": 7, "test": str(captions_dataset.path), "train": str(captions_dataset.path)},
    )  # fmt: skip
    return train(config, tmp_path_factory.mktemp("averaged") / "run")


def test_a_run_evaluates_its_average_and_says_so(averaged_run, captions_dataset):
    first, last = (line for line in lines(averaged_run) if "evaluation" in line)
    assert first["weights"] == last["weights"] == "averaged"
    found = {
        weights: evaluate(averaged_run, captions_dataset, captions_dataset, weights=weights)
        for weights in (None, "averaged", "raw")
    }
    assert [each.weights for each in found.values()] == ["averaged", "averaged", "raw"]
    for of_average in (found[None], found["averaged"]):
        assert json.loads(json.dumps(of_average.scores)) == last["evaluation"]
    assert found["raw"].scores["image_to_text"] != last["evaluation"]["image_to_text"]


def test_the_average_changes_no_loss_and_is_a_part_of_the_checkpoint(averaged_run, pairs_dataset, tmp_path, finished):
    plain = train(small(pairs_dataset, model=WITH_BATCH_NORM), tmp_path / "run")
    assert losses(averaged_run) == losses(plain)
    _, training = load_checkpoint(latest_checkpoint(averaged_run.checkpoints))
    assert training["averaged"].keys() == training["encoders"].keys()
    assert "averaged" not in load_checkpoint(latest_checkpoint(finished.checkpoints))[1]
