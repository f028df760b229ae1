"""`thermopile bench`: what it measures and prints, never how fast it was."""

import json
import time
from itertools import pairwise

import pytest
from click.testing import CliRunner

from thermopile.tools.bench.loader import HEIGHT, WIDTH, jpegs
from thermopile.tools.bench.step import BatchesInMemory, open_trainer, run
from thermopile.tools.cli import main
from thermopile.trainer.config_layers import read_preset


@pytest.fixture
def trainer(pairs_dataset, tmp_path):
    """A run on 2,000 pairs that begins with 32."""
    with open_trainer(
        pairs_dataset, read_preset("glyphs") | {"device": "cpu", "batch_size": 32}, 8, tmp_path
    ) as opened:
        yield opened


def test_a_batch_in_memory_has_the_ids_of_its_step_in_every_epoch(trainer):
    order = trainer.order
    batches = BatchesInMemory.of(trainer)
    for epoch, first_step in ((0, 0), (1, order.steps_per_epoch - 2)):
        coming = list(batches.epoch(epoch, first_step))
        assert len(coming) == order.steps_per_epoch - first_step
        for step, batch in enumerate(coming, first_step):
            assert batch.sample_ids.tolist() == order.batch_ids(epoch, step).tolist()


def test_the_time_of_a_step_is_the_trainers_and_not_of_what_goes_on_between_steps(trainer):
    done_before, between_steps = [], []

    def between(done):
        done_before.append((done, trainer.steps_done))
        began = time.perf_counter()
        time.sleep(0.3)
        between_steps.append((began, time.perf_counter()))

    seconds = run(trainer, 3, between)
    assert done_before == [(1, 1), (2, 2), (3, 3)]
    assert len(seconds) == 3
    for step, (before, after) in enumerate(pairwise(between_steps), start=1):
        assert seconds[step] <= after[0] - before[1]


def test_a_step_is_measured_with_each_encoder_and_its_time_is_shared_out():
    words = ["bench", "step", "--image", "conv", "--image", "hf:resnet-18", "--device", "cpu", "--batch", "16",
             "--steps", "2", "--json"]  # fmt: skip
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    conv, resnet = json.loads(done.stdout)["steps"]
    assert (conv["image"], resnet["image"], conv["device"], conv["batch_size"]) == ("conv", "hf:resnet-18", "cpu", 16)
    assert resnet["parameters"] > conv["parameters"] > 0
    assert conv["samples_per_second"] == pytest.approx(16 / (conv["step_ms"] / 1e3))
    assert sum(share for part, share in conv["shares"].items() if part != "write_backlog") == pytest.approx(1, abs=0.05)


def test_the_loaders_are_measured_on_ones_own_dataset_beside_the_decoder(images_dataset):
    words = ["bench", "loader", "--data", str(images_dataset.path), "--batch", "16", "--image-size", "32",
             "--rounds", "1"]  # fmt: skip
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "300 images as 2 views of simclr, 32×32, batches of 16" in done.stdout
    for name in ("ffcv ", "dali on the", "libjpeg-turbo, decoding alone"):
        assert sum(line.startswith(name) and line.endswith("%") for line in done.stdout.splitlines()) == 1
    assert "ms of a core on an image, most of it on" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [(("loader", "--batch", "128"), "300 images make 2 batches of 128, but 5 are needed"),
     (("loader", "--recipe", "simlr"), "data.recipe = 'simlr' is unknown"),
     (("step", "--image", "resnet"), "resnet"), (("step", "--set", "batchsize=3"), "batchsize")],
)  # fmt: skip
def test_what_cannot_be_measured_is_wrong_usage(words, expected, images_dataset):
    data = ["--data", str(images_dataset.path)] if words[0] == "loader" else []
    done = CliRunner().invoke(main, ["bench", *words, *data])
    assert done.exit_code == 2, done.output
    assert expected in done.stderr


def test_photographs_are_all_different_and_the_same_at_every_call():
    files = list(jpegs(20))
    assert len(set(files)) == 20
    assert list(jpegs(3)) == files[:3]
    assert (HEIGHT, WIDTH) == (300, 400)


@pytest.mark.parametrize("command", [[], ["step"], ["loader"]])
def test_help_ends_with_an_example(command):
    help_text = CliRunner().invoke(main, ["bench", *command, "--help"]).stdout
    assert f"thermopile {' '.join(['bench', *command])}" in help_text.split("Example")[1]
