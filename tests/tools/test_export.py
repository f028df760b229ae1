"""`thermopile export` from one end to the other: what it writes and names, what it refuses."""

import pytest
from safetensors.torch import load_file

from thermopile.trainer.checkpoints.checkpoint_files import load_checkpoint

from support.cli import cli, sets, succeed


@pytest.fixture(scope="module")
def images_run(images_dataset, tmp_path_factory):
    """4 steps on pictures alone: checkpoints at 2 and 4."""
    out = tmp_path_factory.mktemp("runs") / "images"
    settings = ("epochs=1", "batch_size=64", "data.image_size=24", "checkpoint.every_steps=2", "model.head=simclr",
                "model.image.config.width=2")  # fmt: skip
    succeed("train", "--data", images_dataset.path, "--out", out, *sets(*settings))
    return out


def test_the_files_are_named_and_hold_the_checkpoint_asked_for(images_run, tmp_path):
    for at, options in (("step-4", ()), ("step-2", ("--at", "step-2"))):
        result = succeed("export", images_run, "--to", tmp_path / at, "--format", "safetensors", *options)
        assert result.stdout.splitlines() == [str(tmp_path / at / "image.safetensors")]
        weights = load_file(tmp_path / at / "image.safetensors")
        _, training = load_checkpoint(images_run / "checkpoints" / at)
        assert weights["head.2.weight"].equal(training["encoders"]["image.head.2.weight"])
        assert len(weights) == len(training["encoders"])


def test_wrong_usage_is_told_in_one_line(images_run, tmp_path):
    for arguments, exit_code, words in (
        (("--format", "hf"), 2, "--format safetensors"),
        (("--format", "onnx"), 2, "'hf', 'timm', 'open_clip', 'safetensors'"),
        (("--format", "safetensors", "--at", "step-3"), 1, "available: step-2, step-4"),
    ):
        result = cli("export", images_run, "--to", tmp_path / "out", *arguments)
        assert result.exit_code == exit_code, result.output
        assert words in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert "already exists" in cli("export", images_run, "--to", tmp_path, "--format", "safetensors").stderr
