"""Exported encoders: plain transformers and plain safetensors give the run's own features, bit for bit."""

import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from thermopile._version import __version__
from thermopile.pipeline.batch import Batch
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.storage.sealed_json import seal_document, seal_line
from thermopile.trainer import export as export_module
from thermopile.trainer.checkpoints.checkpoint_files import load_checkpoint, save_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.errors import ConfigError, RunError
from thermopile.trainer.export import export_encoders
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.own_dataset import keep_facts
from thermopile.trainer.run_directory import RunDirectory

from support.written_checkpoints import write_checkpoint

IMAGE = {
    "resnet": {"name": "hf:resnet-18", "config": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}},
    "vit": {"name": "hf:vit-s", "config": {"hidden_size": 12, "num_hidden_layers": 1, "patch_size": 16}},
    "cifar": {"name": "hf:resnet-18",
              "config": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "stem": "cifar"}},
    "conv": {"name": "conv", "config": {"width": 2}},
}  # fmt: skip
TEXT = {
    "distilbert": {"name": "hf:distilbert", "config": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}},
    "clip": {"name": "hf:clip-text", "config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                                "intermediate_size": 16}},
    "mean": {"name": "mean_embedding", "config": {"width": 4}},
}  # fmt: skip
PICTURES = torch.linspace(-2, 2, 2 * 3 * 32 * 32).view(2, 3, 32, 32)


def make_run(path, dataset, image, text=None, name=None, evaluation=None, objective="isogclr", **model):
    """A run with one checkpoint, step-7, of random weights, and those encoders."""
    sides = {"image": {"name": name} if name else IMAGE[image]} | ({"text": TEXT[text]} if text else {})
    config = resolve(load_config({
        "batch_size": 64, "data": {"path": str(dataset.path), "image_size": 32}, "model": {"dim": 6} | sides | model,
        "objective": {"name": objective, "mode": "bimodal" if text else "unimodal"}, "evaluation": evaluation or {},
    }), dataset)[0]  # fmt: skip
    run = RunDirectory(path)
    run.create(config, partial(keep_facts, run, dataset))
    torch.manual_seed(3)
    encoders = Encoders.create(config.model, config.objective.mode, 32, dataset.index.tokenizer)
    if encoders.momentum is not None:
        encoders.momentum.head.weight.mul_(2)  # so that it differs
    encoders(_batch(dataset))  # so that batch norms have seen something
    weights = encoders.state_dict()
    averaged = {key: value * 2 for key, value in weights.items()}
    fingerprint = dataset.index.fingerprint
    write_checkpoint(run, 7, dataset_fingerprint=fingerprint, encoders=weights, averaged=averaged)
    return run, encoders.eval()


def _batch(dataset):
    tokens = torch.from_numpy(dataset.shard(0).tokens(np.arange(2))) if dataset.index.tokenizer else None
    return Batch(torch.arange(2), (PICTURES, PICTURES.flip(0)), tokens)


@pytest.mark.parametrize("image", ["resnet", "vit"])
def test_transformers_alone_gives_the_image_encoders_features(image, images_dataset, tmp_path):
    run, encoders = make_run(tmp_path / "run", images_dataset, image)
    export_encoders(run, tmp_path / "out", "hf")
    model = AutoModel.from_pretrained(tmp_path / "out" / "image").eval()
    h = model(PICTURES).pooler_output.flatten(1)
    assert torch.equal(h, encoders.image.backbone(PICTURES))
    head = load_file(tmp_path / "out" / "image" / "head.safetensors")
    assert torch.equal(torch.nn.functional.linear(h, head["weight"], head["bias"]), encoders.image(PICTURES))
    assert not (tmp_path / "out" / "text").exists()


@pytest.mark.parametrize("text", ["distilbert", "clip"])
def test_transformers_alone_gives_the_text_features_from_the_tokenizer_beside(text, pairs_dataset, tmp_path):
    run, encoders = make_run(tmp_path / "run", pairs_dataset, "resnet", text)
    export_encoders(run, tmp_path / "out", "hf")
    folder = tmp_path / "out" / "text"
    captions = pairs_dataset.column("caption").to_pylist()[:200]
    read = AutoTokenizer.from_pretrained(folder)(
        captions, padding="max_length", truncation=True, return_tensors="pt"
    )  # fmt: skip
    tokens, mask = read["input_ids"], read["attention_mask"]
    assert tokens.equal(torch.from_numpy(pairs_dataset.shard(0).tokens(np.arange(200))).long())
    end = (tokens == pairs_dataset.index.tokenizer.end_id).int().argmax(1)
    states = AutoModel.from_pretrained(folder).eval()(input_ids=tokens, attention_mask=mask).last_hidden_state
    h = states[range(200), end] if text == "clip" else states[:, 0]
    assert torch.equal(h, encoders.text.backbone(tokens))
    assert ("not `pooler_output`" in (folder / "README.md").read_text("utf-8")) == (text == "clip")


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_the_momentum_network_is_exported_beside_the_trained_one(form, images_dataset, tmp_path):
    run, encoders = make_run(tmp_path / "run", images_dataset, "resnet", momentum=0.9)
    export_encoders(run, tmp_path / "out", form)
    assert not torch.equal(encoders.image(PICTURES), encoders.momentum(PICTURES))
    if form == "hf":
        h = AutoModel.from_pretrained(tmp_path / "out/momentum").eval()(PICTURES).pooler_output.flatten(1)
        assert torch.equal(h, encoders.momentum.backbone(PICTURES))
    else:
        encoders.image.load_state_dict(load_file(tmp_path / "out/momentum.safetensors"))
        assert torch.equal(encoders.image(PICTURES), encoders.momentum(PICTURES))


def test_averaged_weights_are_exported_unless_the_raw_ones_are_asked_for(images_dataset, tmp_path):
    run, encoders = make_run(tmp_path / "run", images_dataset, "resnet", ema=0.9)
    raw = encoders.state_dict()["image.head.weight"]
    for asked, used, expected in ((None, "averaged", 2 * raw), ("averaged", "averaged", 2 * raw), ("raw", "raw", raw)):
        export_encoders(run, tmp_path / str(asked), "safetensors", weights=asked)
        with safe_open(tmp_path / str(asked) / "image.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor("head.weight"), expected)
            assert file.metadata()["weights"] == used


def test_averaged_weights_that_the_run_does_not_have_are_refused(images_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", images_dataset, "resnet")
    with pytest.raises(ConfigError, match=r"no averaged weights \(model.ema is 0\); leave out --weights averaged"):
        export_encoders(run, tmp_path / "out", "safetensors", weights="averaged")
    assert not (tmp_path / "out").exists()


def test_the_image_processor_shows_the_central_square_as_training_normalises_it(images_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", images_dataset, "resnet")
    export_encoders(run, tmp_path / "out", "hf")
    recipe = RECIPES[run.config().data.recipe]
    pixels = np.random.default_rng(0).integers(0, 256, (32, 50, 3), np.uint8)
    seen = AutoImageProcessor.from_pretrained(tmp_path / "out" / "image")(Image.fromarray(pixels), return_tensors="np")
    expected = (pixels[:, 9:41] / 255 - recipe.mean) / recipe.std
    np.testing.assert_allclose(seen["pixel_values"][0].transpose(1, 2, 0), expected, atol=1e-5)


@pytest.mark.parametrize(("image", "text"), [("conv", "mean"), ("cifar", "clip"), ("vit", "distilbert")])
def test_a_safetensors_file_holds_an_encoders_weights_and_what_a_reader_must_know(image, text, pairs_dataset, tmp_path):
    run, encoders = make_run(tmp_path / "run", pairs_dataset, image, text, head="vicreg", head_width=5)
    files = export_encoders(run, tmp_path / "out", "safetensors")
    assert [path.name for path in files] == ["image.safetensors", "text.safetensors", "tokenizer.json"]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == pairs_dataset.tokenizer_path.read_bytes()
    for side, encoder in (("image", encoders.image), ("text", encoders.text)):
        weights = load_file(tmp_path / "out" / f"{side}.safetensors")
        assert weights.keys() == encoder.state_dict().keys()
        assert all(torch.equal(weights[name], value) for name, value in encoder.state_dict().items())
        with safe_open(tmp_path / "out" / f"{side}.safetensors", "pt") as file:
            facts = file.metadata()
        settings = IMAGE[image] if side == "image" else TEXT[text]
        assert (facts["encoder"], json.loads(facts["config"])) == (settings["name"], settings["config"])
        assert (facts["head"], facts["head_width"], facts["dim"], facts["step"]) == ("vicreg", "5", "6", "7")
        assert (int(facts["width"]), facts["thermopile"]) == (encoder.backbone.width, __version__)
        tokenizer, recipe = pairs_dataset.index.tokenizer, RECIPES[run.config().data.recipe]
        about = {"image_size": 32, "mean": list(recipe.mean), "std": list(recipe.std)} if side == "image" else {
            "vocab_size": tokenizer.vocab_size, "context_length": tokenizer.context_length, "end_id": tokenizer.end_id,
        }  # fmt: skip
        assert {key: json.loads(facts[key]) for key in about} == about


@pytest.mark.parametrize(
    ("image", "text", "what"),
    [("conv", None, "image encoder is 'conv', which transformers does not have"),
     ("resnet", "mean", "text encoder is 'mean_embedding', which"),
     ("cifar", None, "'hf:resnet-18' with the stem 'cifar', which transformers does not have")],
)  # fmt: skip
def test_encoders_that_transformers_has_not_are_refused_naming_the_other_format(
    image, text, what, pairs_dataset, tmp_path
):
    run, _ = make_run(tmp_path / "run", pairs_dataset, image, text)
    with pytest.raises(ConfigError, match=f"{what}.*; export it with --format safetensors"):
        export_encoders(run, tmp_path / "out", "hf")
    assert os.listdir(tmp_path) == ["run"]


def test_a_directory_that_is_there_is_left_as_it_is(images_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", images_dataset, "conv")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="already exists; nothing was written"):
        export_encoders(run, tmp_path / "out", "safetensors")
    assert os.listdir(tmp_path / "out") == []


def test_an_export_that_fails_half_way_leaves_nothing(pairs_dataset, tmp_path, monkeypatch):
    run, _ = make_run(tmp_path / "run", pairs_dataset, "conv", "mean")

    def full(side, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "_copy_tokenizer", full)  # the last of the files
    with pytest.raises(OSError, match="No space left"):
        export_encoders(run, tmp_path / "out", "safetensors")
    assert os.listdir(tmp_path) == ["run"]


def test_a_checkpoint_that_is_not_there_is_named(images_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", images_dataset, "conv")
    with pytest.raises(RunError, match="no checkpoint 'step-8'; available: step-7"):
        export_encoders(run, tmp_path / "out", "safetensors", at="step-8")


def test_what_is_written_may_be_read_by_whom_the_umask_says(images_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", images_dataset, "resnet")
    before = os.umask(0o027)
    try:
        files = export_encoders(run, tmp_path / "out", "hf")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: "0o640" for path in files}
    assert "model.safetensors" in {path.name for path in files}


def test_where_a_local_model_lies_is_not_told(images_dataset, tmp_path):
    source, _ = make_run(tmp_path / "source", images_dataset, "resnet")
    export_encoders(source, tmp_path / "secret" / "model", "hf")
    run, _ = make_run(tmp_path / "run", images_dataset, "resnet", name=f"hf:{tmp_path}/secret/model/image")
    export_encoders(run, tmp_path / "out", "hf")
    for path in (tmp_path / "out").rglob("*.*"):
        assert b"secret" not in path.read_bytes(), path
    assert '| encoder | "hf:image" |' in (tmp_path / "out" / "image" / "README.md").read_text("utf-8")


def card_of(folder):
    return ModelCard.load(folder / "README.md")


def test_a_card_says_to_a_hub_what_loads_each_encoder_and_for_which_task(pairs_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", pairs_dataset, "resnet", "distilbert")
    export_encoders(run, tmp_path / "out", "hf")
    for side, task in (("image", "image-feature-extraction"), ("text", "feature-extraction")):
        card = card_of(tmp_path / "out" / side)
        assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", task)
        assert card.data.tags == ["thermopile", "contrastive-learning", "isogclr"]
        assert (card.data.base_model, card.data.datasets, card.data.eval_results) == (None, None, None)
        assert "trained contrastively to step 7." in card.text
        assert "add its `license` above" in card.text


def test_a_card_of_a_model_that_judged_pairs_does_not_say_that_it_was_trained(pairs_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", pairs_dataset, "resnet", "distilbert", objective="frozen")
    export_encoders(run, tmp_path / "out", "hf")
    text = card_of(tmp_path / "out" / "image").text
    assert "A model that judged pairs and was not trained here." in text
    assert "trained contrastively" not in text


def test_a_card_has_the_scores_of_its_step_and_of_its_weights(images_dataset, tmp_path):
    scored = {"every_steps": 1, "test": "/private/flowers-test"}
    run, _ = make_run(tmp_path / "run", images_dataset, "resnet", evaluation=scored, momentum=0.9)
    lines = ({"step": 6, "evaluation": {"knn": {"10": {"all": 0.1}}}},
             {"step": 7, "evaluation": {"knn": {"10": {"all": 0.5, "head": 0.9}}, "probe": {"sgd": {"all": 0.25}}}},
             {"step": 8, "evaluation": {"knn": {"10": {"all": 0.2}}}})  # fmt: skip
    run.metrics_file.write_bytes(b"".join(seal_line(line) + b"\n" for line in lines))
    export_encoders(run, tmp_path / "out", "hf", at="step-7")
    found = card_of(tmp_path / "out/image").data
    scores = [(each.dataset_name, each.metric_name, each.metric_value) for each in found.eval_results]
    assert scores == [("flowers-test", "knn/10/all", 0.5), ("flowers-test", "probe/sgd/all", 0.25)]
    assert found.model_name == "run"
    assert "private" not in (tmp_path / "out/image/README.md").read_text("utf-8")
    assert card_of(tmp_path / "out/momentum").data.eval_results is None
    run.metrics_file.write_bytes(seal_line(lines[1] | {"weights": "averaged"}) + b"\n")
    export_encoders(run, tmp_path / "raw", "hf", at="step-7")
    assert card_of(tmp_path / "raw/image").data.eval_results is None


@pytest.mark.parametrize(("root", "named"), [
    ("hf://datasets/a/b@0123456789abcdef0123456789abcdef01234567/data", ["a/b"]),
    ("hf://datasets/../b", None), ("hf://datasets/a/b: [x]", None), ("/home/me/pictures", None),
])  # fmt: skip
def test_a_card_names_the_hubs_data_set_and_no_folder(root, named, images_dataset, tmp_path):
    shutil.copytree(images_dataset.path, tmp_path / "data")
    text = json.loads((tmp_path / "data/dataset.json").read_text("utf-8"))
    del text["sha256"]
    text["source"]["root"] = root
    (tmp_path / "data/dataset.json").write_bytes(seal_document(text))
    run, _ = make_run(tmp_path / "run", Dataset(tmp_path / "data"), "resnet")
    export_encoders(run, tmp_path / "out", "hf")
    assert card_of(tmp_path / "out/image").data.datasets == named
    assert ("`datasets`, which are not known here" in card_of(tmp_path / "out/image").text) == (named is None)
    (tmp_path / "data").rename(tmp_path / "moved")
    export_encoders(run, tmp_path / "later", "hf")
    assert card_of(tmp_path / "later/image").data.datasets is None
    assert "`datasets`, which are not known here" in card_of(tmp_path / "later/image").text


@pytest.mark.parametrize("format", ["hf", "safetensors"])
def test_a_disk_that_is_full_is_one_error_that_names_the_directory_and_nothing_stays(
    format, images_dataset, tmp_path, file_size_limit
):
    run, _ = make_run(tmp_path / "run", images_dataset, "resnet")
    error = rf"{tmp_path}/out cannot be written: .*File too large[^\n]*Nothing was left behind"
    with file_size_limit(2_000), pytest.raises(OSError, match=error):
        export_encoders(run, tmp_path / "out", format)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_nothing_is_written(value, images_dataset, tmp_path):
    run, _ = make_run(tmp_path / "run", images_dataset, "conv")
    info, training = load_checkpoint(run.checkpoints / "step-7")
    training["encoders"]["image.head.bias"][2] = value
    save_checkpoint(run.checkpoints, info, training)
    with pytest.raises(RunError, match=r"step-7 holds weights that are not finite \(image\.head\.bias\); nothing was"):
        export_encoders(run, tmp_path / "out", "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
