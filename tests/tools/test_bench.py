"""`thermopile bench`: what it measures and prints, never how fast it was."""

import json
import sys

import pytest

from thermopile.tools.bench import loader

from support.cli import cli, sets, succeed


@pytest.mark.wide
@pytest.mark.parametrize(
    ("image", "larger"),
    [("support.own_code:Tower", False), pytest.param("hf:resnet-18", True, marks=pytest.mark.wide)],
)
def test_a_step_is_measured_with_each_encoder_and_its_time_is_shared_out(image, larger):
    words = ["bench", "step", "--image", "conv", "--image", image, "--device", "cpu", "--batch", "16",
             "--steps", "2", "--set", "data.image_size=32", "--json"]  # fmt: skip
    done = succeed(*words)
    conv, other = json.loads(done.stdout)["steps"]
    assert (conv["image"], other["image"], conv["device"], conv["batch_size"]) == ("conv", image, "cpu", 16)
    assert (other["parameters"] > conv["parameters"]) == larger
    assert other["parameters"] > 0
    assert conv["samples_per_second"] == pytest.approx(16 / (conv["step_ms"] / 1e3))
    assert sum(share for part, share in conv["shares"].items() if part != "write_backlog") == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("text", "settings"),
    [("support.own_code:Words", ("width=12",)),
     pytest.param("hf:distilbert", ("n_layers=1", "dim=24", "hidden_dim=24"), marks=pytest.mark.wide)],
)  # fmt: skip
def test_a_step_on_a_dataset_is_compared_with_one_on_random_batches(hostile_dataset, text, settings):
    words = ["bench", "step", "--data", str(hostile_dataset.path), "--device", "cpu", "--batch", "16", "--steps", "2",
             "--text", text]  # fmt: skip
    done = succeed(*words, *sets(*(f"model.text.config.{setting}" for setting in settings)))
    for data in ("synthetic", "ffcv"):
        assert f"batch 16, {data} data: " in done.stdout
    assert done.stdout.count(f"conv and {text} on cpu, ") == 2
    assert "  real data " in done.stdout.splitlines()[-1]
    assert done.stdout.endswith("% of synthetic\n")


def test_without_the_loaders_package_random_batches_are_measured_and_it_fails(hostile_dataset, monkeypatch):
    for module in ("nvidia.dali", "nvidia.dali.tensors"):  # as if it were not installed
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "thermopile.pipeline.loading.dali_loader", raising=False)
    words = ["bench", "step", "--data", str(hostile_dataset.path), "--batch", "16", "--steps", "1", "--device", "cpu",
             "--set", "data.loader=dali"]  # fmt: skip
    done = cli(*words)
    assert done.exit_code == 1, done.output
    assert "synthetic data: " in done.stdout
    assert "data.loader = 'dali' cannot be used here: " in done.stderr


@pytest.mark.wide
def test_the_loaders_are_measured_on_ones_own_dataset(images_dataset):
    words = ["bench", "loader", "--data", str(images_dataset.path), "--batch", "16", "--image-size", "32",
             "--rounds", "1"]  # fmt: skip
    done = succeed(*words)
    assert "300 images as 2 views of simclr, 32×32, batches of 16" in done.stdout
    for name in ("ffcv ", "dali on the"):
        assert sum(line.startswith(name) for line in done.stdout.splitlines()) == 1


def test_a_loader_whose_package_is_missing_is_named_beside_the_others(images_dataset, monkeypatch):
    monkeypatch.setattr(loader, "NEEDS", loader.NEEDS | {"dali": "no_such_module"})
    words = ["bench", "loader", "--data", str(images_dataset.path), "--batch", "16", "--image-size", "32",
             "--rounds", "1", "--device", "cpu"]  # fmt: skip
    ffcv, missing = (" ".join(line.split()) for line in succeed(*words).stdout.splitlines()[-2:])
    assert ffcv.startswith("ffcv ")
    assert missing == "dali on the CPU not measured: No module named 'no_such_module'"


@pytest.mark.parametrize(
    ("words", "expected"),
    [(("loader", "--batch", "128"), "300 images make 2 batches of 128, but 5 are needed"),
     (("loader", "--recipe", "simlr"), "data.recipe = 'simlr' is unknown"),
     (("step", "--image", "resnet"), "resnet"), (("step", "--set", "batchsize=3"), "batchsize"),
     (("step", "--device", "tpu"), "'tpu' is not one of 'cpu', 'cuda'"),
     (("loader", "--device", "gpu"), "'gpu' is not one of 'auto', 'cpu', 'cuda'")],
)  # fmt: skip
def test_what_cannot_be_measured_is_wrong_usage(words, expected, images_dataset):
    data = ["--data", str(images_dataset.path)] if words[0] == "loader" else []
    done = cli("bench", *words, *data)
    assert done.exit_code == 2, done.output
    assert expected in done.stderr
