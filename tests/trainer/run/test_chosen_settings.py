"""Settings that are chosen from the dataset: what, when, and what is said of it."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.opening import Mixture, usual_image_size
from thermopile.trainer.config import load_config
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.chosen_settings import choices_of, usual_batch_size

from support.cli import cli
from support.datasets import write_dataset


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ([20, 24, 30], 32), ([63, 64, 500], 64), ([79, 79, 80], 64), ([80], 80), ([200, 230], 208), ([512], 224),
    ],
)  # fmt: skip
def test_views_are_as_large_as_the_median_shorter_side(tmp_path, sides, expected):
    wide = pa.table({"width": [side + 10 for side in sides], "height": sides})
    high = pa.table({"width": sides, "height": [side + 10 for side in sides]})
    assert usual_image_size(write_dataset(tmp_path / "data", [wide, high])) == expected


@pytest.mark.parametrize(
    ("samples", "expected"), [(1, 16), (63, 16), (300, 64), (511, 64), (1023, 128), (1024, 256), (10**9, 256)]
)
def test_a_small_dataset_has_four_steps_an_epoch(samples, expected):
    assert usual_batch_size(samples) == expected


@pytest.mark.parametrize(
    ("samples", "shares", "expected"),
    [(10**9, (31, 1), 512), (10**9, (2, 3), 160), (64, (2, 3), 40), (64, (3, 4), 56), (10**9, (16, 17), 132)],
)
def test_each_part_of_a_mixture_has_sixteen_samples_of_a_batch(samples, shares, expected):
    assert usual_batch_size(samples, shares) == expected
    assert expected * min(shares) / sum(shares) >= 16


def sized(path, samples):
    return write_dataset(path, [pa.table({"width": [20] * samples, "height": [20] * samples})])


@pytest.mark.parametrize("samples", [1, 2, 8, 15])
@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"batch_size": 16}, {"batch_size": 256},
                                      {"data": {"image_size": 224}}])  # fmt: skip
def test_fewer_samples_than_a_step_takes_are_refused_whatever_the_settings(tmp_path, samples, settings):
    few = rf"data: {samples} samples?, but training takes at least 16; add samples$"
    with pytest.raises(ConfigError, match=few):
        resolve(load_config({"device": "cpu", **settings}), sized(tmp_path / "data", samples))


def test_too_few_selected_samples_and_too_small_a_part_of_a_mixture_are_named(tmp_path):
    large, small = sized(tmp_path / "large", 40), sized(tmp_path / "small", 15)
    pq.write_table(pa.table({"sample_id": range(15)}), tmp_path / "few.parquet")
    select = {"device": "cpu", "data": {"select": str(tmp_path / "few.parquet")}}
    with pytest.raises(ConfigError, match="large: 15 samples, but training takes at least 16"):
        resolve(load_config(select), large)
    with pytest.raises(ConfigError, match="small: 15 samples, but training takes at least 16"):
        resolve(load_config({"device": "cpu"}), Mixture([large, small]))


@pytest.mark.parametrize(
    ("samples", "batch_size", "said"),
    [
        (16, 17, "batch_size 17 exceeds 16 samples; lower it to 16, or add samples"),
        (40, 256, "batch_size 256 exceeds 40 samples; lower it to 16, or add samples"),
        (300, 301, "batch_size 301 exceeds 300 samples; lower it to 64, or add samples"),
        (16, 15, "the minimum is 16. Raise batch_size to 16.$"),
        (16, 1, "the minimum is 16. Raise batch_size to 16.$"),
    ],
)
def test_a_batch_that_does_not_fit_is_told_which_would(tmp_path, samples, batch_size, said):
    dataset = sized(tmp_path / "data", samples)
    with pytest.raises(ConfigError, match=said):
        resolve(load_config({"device": "cpu", "batch_size": batch_size}), dataset)
    resolve(load_config({"device": "cpu", "batch_size": 16}), dataset)


def test_what_was_chosen_is_said_and_what_was_given_is_not(images_dataset):
    asked = load_config({"device": "cpu"})
    chosen = resolve(asked, images_dataset)[0]
    assert (chosen.data.image_size, chosen.batch_size) == (32, 64)
    assert choices_of(asked, chosen, images_dataset) == [
        "data.image_size = 32: half of the pictures have a shorter side of 27 or more",
        "batch_size = 64: 300 samples",
    ]
    given = load_config({"device": "cpu", "batch_size": 32, "data": {"image_size": 24}})
    assert choices_of(given, resolve(given, images_dataset)[0], images_dataset) == []


def test_pictures_that_are_enlarged_are_warned_of(images_dataset):
    asked = load_config({"device": "cpu", "batch_size": 32, "data": {"image_size": 64}})
    (line,) = choices_of(asked, resolve(asked, images_dataset)[0], images_dataset)
    assert line == "data.image_size = 64 enlarges pictures: half have a shorter side up to 27"
    smallest = load_config({"device": "cpu", "batch_size": 32, "data": {"image_size": 32}})  # as training chooses it
    assert choices_of(smallest, resolve(smallest, images_dataset)[0], images_dataset) == []


def test_on_a_gpu_ffcv_is_chosen_and_nothing_is_advised(images_dataset, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    asked = load_config({"batch_size": 32, "data": {"image_size": 24}})
    chosen = resolve(asked, images_dataset)[0]
    assert chosen.data.loader == "ffcv"
    assert choices_of(asked, chosen, images_dataset) == []


@pytest.mark.parametrize("side", ["image", "text"])
def test_large_views_need_encoders_by_name(pairs_dataset, side):
    large = {"data": {"image_size": 96}, "device": "cpu"}
    with pytest.raises(ConfigError, match="Name the image and the text encoder: ") as refused:
        resolve(load_config(large), pairs_dataset)[0]
    assert re.findall(r"`(--set model[^`]*)`", str(refused.value)) == [
        "--set model.image.name=hf:resnet-18 --set model.text.name=hf:clip-text"
    ]
    other = {"image": ("text", "hf:clip-text"), "text": ("image", "hf:resnet-18")}[side]
    with pytest.raises(ConfigError, match=f"Name the {side} encoder: "):
        resolve(load_config(large | {"model": {other[0]: {"name": other[1]}}}), pairs_dataset)[0]
    named = {"image": {"name": "conv"}, "text": {"name": "mean_embedding"}}
    assert resolve(load_config(large | {"model": named}), pairs_dataset)[0].model.image.name == "conv"


def test_the_command_says_its_choices_and_records_them(images_dataset, tmp_path):
    done = cli("train", "--data", images_dataset.path, "--out", tmp_path / "run", "--set", "epochs=1")
    assert done.exit_code == 0, done.stderr
    said = done.stderr.splitlines()
    assert f"{tmp_path}/run: batch_size = 64: 300 samples" in said
    assert "image_size = 32" in (tmp_path / "run/config.toml").read_text()
    resumed = cli("train", "--out", tmp_path / "run", "--resume")
    assert "batch_size" not in resumed.stderr
