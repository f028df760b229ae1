"""Mean and std of a model's directory are those with which transformers' own processor makes the model's input."""

import json
import logging

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, CLIPImageProcessor, SiglipImageProcessor, ViTImageProcessor

from thermopile.trainer.config import EncoderConfig
from thermopile.trainer.encoders import image_processor
from thermopile.trainer.encoders.hf_directory import quiet
from thermopile.trainer.errors import ConfigError

SIDE = 224
PROCESSORS = {
    "clip": CLIPImageProcessor(),
    "siglip": SiglipImageProcessor(),
    "vit": ViTImageProcessor(),
    "raw pixels": SiglipImageProcessor(do_rescale=False, do_normalize=False),
    "scaled alone": SiglipImageProcessor(do_normalize=False),
    "normalised alone": SiglipImageProcessor(do_rescale=False, image_mean=[127.5] * 3, image_std=[127.5] * 3),
    "scaled by another factor": SiglipImageProcessor(rescale_factor=1 / 128, image_mean=[1.0] * 3, image_std=[0.5] * 3),
    "a mean of each channel": ViTImageProcessor(image_mean=[0.1, 0.5, 0.9], image_std=[0.2, 0.3, 0.4]),
}


def save(folder, processor, nested):
    """Write it as transformers 4 does, or as AutoProcessor does since transformers 5."""
    with quiet():
        processor.save_pretrained(folder)
    if nested:
        stored = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").unlink()
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": stored, "processor_class": "X"}))


def normalisation(folder, side):
    return image_processor.normalisation(EncoderConfig(name=f"hf:{folder}"), side)


def write(folder, **settings):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("nested", [False, True], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_the_models_input_is_that_of_transformers(processor, nested, tmp_path, caplog):
    save(tmp_path, processor, nested)
    found = normalisation(tmp_path, SIDE)
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    read = AutoImageProcessor.from_pretrained(tmp_path)
    theirs = read(Image.fromarray(pixels), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    ours = (pixels / 255 - found["mean"]) / found["std"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert caplog.messages == []


def test_of_two_files_transformers_takes_the_one_that_holds_a_processor(tmp_path):
    save(tmp_path, PROCESSORS["siglip"], nested=True)
    write(tmp_path, image_mean=[0.1] * 3, image_std=[0.2] * 3)
    assert normalisation(tmp_path, SIDE)["mean"] == pytest.approx([0.5] * 3)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "CLIPProcessor"}')  # as transformers 4 wrote
    assert normalisation(tmp_path, SIDE)["mean"] == pytest.approx([0.1] * 3)


def test_one_that_subtracts_one_after_scaling_is_understood(tmp_path):
    write(tmp_path, rescale_factor=1 / 127.5, rescale_offset=True, image_mean=0.0, image_std=1.0)
    assert normalisation(tmp_path, SIDE) == {"mean": pytest.approx([0.5] * 3), "std": pytest.approx([0.5] * 3)}


@pytest.mark.parametrize("settings", [None, {"do_resize": True}, {"image_mean": [0.5] * 3}])
def test_one_that_tells_no_mean_and_std_is_told_of(settings, tmp_path, caplog):
    if settings:
        write(tmp_path, **settings)
    assert normalisation(tmp_path, SIDE) == {}
    assert "tells no mean and std of pictures" in caplog.text
    assert "set data.recipe.mean and data.recipe.std" in caplog.text


def test_pictures_of_another_size_are_told_of(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    save(
        tmp_path, CLIPImageProcessor(size={"shortest_edge": 256}, crop_size={"height": 240, "width": 240}), nested=True
    )
    normalisation(tmp_path, 64)
    assert "an image processor for pictures of 240 pixels (bicubic); here they have 64 (bilinear)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"image_mean": [127.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1e-9}, "no model is meant for"),
        ({"image_mean": [127.5] * 3, "image_std": [0.5] * 3}, "no model is meant for"),
        ({"image_mean": [1e38] * 3, "image_std": [0.5] * 3}, "no model is meant for the mean"),
        ({"image_mean": [float("nan")] * 3, "image_std": [0.5] * 3}, "no model is meant for the mean"),
        ({"image_mean": [0.5] * 3, "image_std": [0.0] * 3}, "no model is meant for"),
        ({"image_mean": [0.5] * 3, "image_std": [-0.5] * 3}, "no model is meant for"),
        ({"image_mean": [0.5] * 2, "image_std": [0.5] * 3}, "image_mean: List should have at least 3 items"),
        ({"image_mean": ["red"] * 3, "image_std": [0.5] * 3}, r"image_mean\.0: Input should be a valid number"),
        ({"image_mean": {"a": 1}, "image_std": [0.5] * 3}, "image_mean: Input should be a valid list"),
        ({"rescale_factor": 0}, "rescale_factor: Input should be greater than 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(settings, said, tmp_path):
    write(tmp_path, **settings)
    with pytest.raises(ConfigError, match=said):
        normalisation(tmp_path, SIDE)


def test_a_processor_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"image_processor": [1]}')
    with pytest.raises(ConfigError, match="its image processor's settings: Input should be a valid dict"):
        normalisation(tmp_path, SIDE)
