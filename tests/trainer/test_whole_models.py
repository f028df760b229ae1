"""A whole CLIP or SigLIP: both towers, heads, temperature, tokenizer and normalisation come from one directory."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

from thermopile.benchmarks.library_models import clip_tokenizer
from thermopile.pipeline.dataset.tokenizer import model_context
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.trainer.checkpoints.checkpoint_files import LATEST
from thermopile.trainer.config import load_config, to_tree
from thermopile.trainer.dry_run import dry_run
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.export import export_encoders
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import recipe_named
from thermopile.trainer.run.chosen_settings import choices_of
from thermopile.trainer.run_directory import RunDirectory, find_checkpoint, load_found

from support.cli import assert_one_line, cli, succeed
from support.conversions import dataset_of
from support.runs import small, train, weights
from support.whole_models import CONTEXT, DIM, MEAN, SIDE, STD, save_whole

KINDS = ["clip", pytest.param("siglip", marks=pytest.mark.wide)]
DIMS = {"clip": DIM, "siglip": 16}


@pytest.fixture(scope="module")
def words_dataset(tmp_path_factory):
    """128 glyphs with captions, in the tokens of the models here."""
    folder = tmp_path_factory.mktemp("words")
    clip_tokenizer(folder, context=CONTEXT)
    settings = {"tokenizer": folder / "tokenizer.json", "context_length": CONTEXT}
    return dataset_of(GlyphSource(0, test=True), folder / "glyphs", np.arange(0, 1920, 15), **settings)


def settings_of(folder, kind, locked=0, **more):
    sides = {"name": f"hf:{folder}"} | ({"locked": True, "unlocked_groups": locked} if locked else {})
    model = {"image": sides, "text": sides}
    return {"batch_size": 32, "steps": 2, "model": model, "objective": {"name": kind}} | more


def padded(tokens):
    """The tokens with the padding that transformers' tokenizers give: the closing token, which has the highest id."""
    return tokens.long().cummax(1).values.where((tokens == tokens.max()).cumsum(1) > 0, tokens.long())


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_of_a_locked_run_is_transformers_own_of_the_same_pixels_and_tokens(
    kind, words_dataset, tmp_path
):
    model = save_whole(tmp_path / "model", kind)
    locked = {"clip": 1, "siglip": 2}[kind]  # SigLIP's heads are in its towers
    config = small(words_dataset, **settings_of(tmp_path / "model", kind, locked, optimizer={"layer_decay": 0.75}))
    with Trainer.open(config, RunDirectory(tmp_path / "run")) as trainer:
        batch = next(next(trainer.run.steps()))
        theirs = model(pixel_values=batch.views[0], input_ids=padded(batch.tokens), return_loss=True).loss
        trainer.step([batch])
        (line,) = trainer.run.flush_log()
    assert line["loss"] == pytest.approx(theirs.item(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_dimension_temperature_and_normalisation_are_the_models_unless_they_are_set(kind, words_dataset, tmp_path):
    save_whole(tmp_path, kind)
    asked = settings_of(tmp_path, kind)
    config = small(words_dataset, **asked)
    assert (config.model.dim, config.objective.settings["log_logit_scale"]) == (DIMS[kind], 2.0)
    assert config.objective.settings.get("logit_bias") == {"siglip": -3.0}.get(kind)
    recipe = recipe_named(config.data.recipe)
    assert (list(recipe.mean), list(recipe.std)) == (MEAN, STD)
    assert f"model.dim = {DIMS[kind]}: the image head is the model's own projection" in choices_of(
        config, config, words_dataset
    )
    fresh = {side: of | {"config": {"pretrained": False}} for side, of in asked["model"].items()}
    config = small(words_dataset, **asked | {"model": fresh})
    assert any("the image head is new" in line for line in choices_of(config, config, words_dataset))
    own = {"model": asked["model"] | {"dim": 5}, "objective": {"name": kind, "log_logit_scale": 1.0},
           "data": {"path": str(words_dataset.path), "recipe": {"name": "clip", "mean": [0.1, 0.1, 0.1]}}}  # fmt: skip
    config = small(words_dataset, **asked | own | {"data": own["data"] | {"image_size": SIDE}})
    assert (config.model.dim, config.objective.settings["log_logit_scale"]) == (5, 1.0)
    assert list(recipe_named(config.data.recipe).mean) == [0.1, 0.1, 0.1]
    assert f"model.dim = 5: the image head is new; its own leads to {DIMS[kind]} dimensions" in choices_of(
        config, config, words_dataset
    )


@pytest.mark.parametrize(
    ("objective", "setting"),
    [("isogclr", "tau_init"), ("fastclip_v2", "tau_init"), ("fastclip_v3", "tau"), ("fastclip_v0", "tau")],
)
def test_temperatures_of_their_own_begin_at_the_models_unless_they_are_set(objective, setting, words_dataset, tmp_path):
    save_whole(tmp_path, "clip")
    asked = settings_of(tmp_path, "clip", objective={"name": objective})
    config = small(words_dataset, **asked)
    assert config.objective.settings[setting] == pytest.approx(math.exp(-2.0))
    given = load_config(asked)
    assert f"objective.{setting} = 0.1353: as the model had learned it, within its bounds" in choices_of(
        given, config, words_dataset
    )
    own = asked | {"objective": {"name": objective, setting: 0.05}}
    assert small(words_dataset, **own).objective.settings[setting] == 0.05
    assert not [line for line in choices_of(load_config(own), config, words_dataset) if "had learned" in line]
    bounded = asked | {"objective": {"name": objective, "tau_max": 0.1}}
    config = small(words_dataset, **bounded)
    assert config.objective.settings[setting] == 0.1
    said = choices_of(load_config(bounded), config, words_dataset)
    assert f"objective.{setting} = 0.1: as the model had learned it, within its bounds" in said


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_whole_gives_the_runs_features_from_text_and_pixels(kind, words_dataset, tmp_path):
    save_whole(tmp_path / "model", kind)
    run = train(small(words_dataset, **settings_of(tmp_path / "model", kind)), tmp_path / "run")
    config = run.config()
    encoders = Encoders.create(config.model, "bimodal", SIDE, words_dataset.index.tokenizer, pretrained=False).eval()
    encoders.load_state_dict(weights(run))
    export_encoders(run, tmp_path / "out", "hf")
    whole = AutoModel.from_pretrained(tmp_path / "out" / kind).eval()
    assert whole.config.model_type == kind
    captions = words_dataset.column("caption").to_pylist()[:4]
    read = AutoTokenizer.from_pretrained(tmp_path / "out" / kind)
    inputs = read(captions, padding="max_length", truncation=True, return_tensors="pt")
    tokens = inputs["input_ids"]
    pixels = torch.linspace(-1, 1, 4 * 3 * SIDE * SIDE).view(4, 3, SIDE, SIDE)
    found = whole(**inputs, pixel_values=pixels)  # a SigLIP reads padding, so there is no mask
    for theirs, ours in ((found.text_embeds, encoders.text(tokens)), (found.image_embeds, encoders.image(pixels))):
        torch.testing.assert_close(theirs, F.normalize(ours, dim=-1), atol=1e-5, rtol=0)
    assert whole.logit_scale.item() != 2.0  # as the run has learned it
    learned = {name: value.item() for name, value in load_found(find_checkpoint(run, LATEST))[1]["objective"].items()}
    cosines = F.normalize(encoders.image(pixels), dim=1) @ F.normalize(encoders.text(tokens), dim=1).T
    ours = cosines * math.exp(learned["log_logit_scale"]) + learned.get("logit_bias", 0.0)
    torch.testing.assert_close(found.logits_per_image, ours, atol=1e-4, rtol=0)
    assert list(AutoImageProcessor.from_pretrained(tmp_path / "out" / kind).image_mean) == MEAN


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        ("clip", "isogclr"),
        ("clip", "fastclip_v3"),
        ("clip", "sogclr"),
        pytest.param("siglip", "isogclr", marks=pytest.mark.wide),
    ],
)
def test_the_exported_whole_has_the_temperature_of_another_objective(kind, objective, words_dataset, tmp_path):
    save_whole(tmp_path / "model", kind)
    asked = settings_of(tmp_path / "model", kind, objective={"name": objective})
    run = train(small(words_dataset, **asked), tmp_path / "run")
    export_encoders(run, tmp_path / "out", "hf")
    whole = AutoModel.from_pretrained(tmp_path / "out" / kind)
    state, settings = load_found(find_checkpoint(run, LATEST))[1]["objective"], run.config().objective.settings
    tau = {"isogclr": math.exp(-2.0), "sogclr": 0.03}.get(objective) or state["log_tau"].exp().item()
    assert settings.get("tau_init", settings.get("tau")) != 0.07  # fastclip_v3's default
    assert whole.logit_scale.item() == pytest.approx(-math.log(tau), abs=1e-6)
    if kind == "siglip":
        assert whole.logit_bias.item() == -3.0  # the model's own, which isogclr does not learn


def test_no_whole_is_written_where_transformers_would_read_texts_elsewhere(pairs_dataset, tmp_path, caplog):
    save_whole(tmp_path / "model", "clip")
    name, size = f"hf:{tmp_path}/model", pairs_dataset.index.tokenizer.vocab_size
    model = {"image": {"name": name, "config": {"pretrained": False}},
             "text": {"name": name, "config": {"pretrained": False, "vocab_size": size}}}  # fmt: skip
    run = train(small(pairs_dataset, batch_size=32, steps=1, model=model), tmp_path / "run")
    export_encoders(run, tmp_path / "out", "hf")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"image", "text"}
    assert "no clip/ is written: where the end token's id is 2" in caplog.text


def test_one_tower_of_a_whole_may_be_trained_beside_another_encoder(words_dataset, tmp_path):
    save_whole(tmp_path, "clip")
    asked = settings_of(tmp_path, "clip")
    config = small(words_dataset, **asked | {"model": {"image": asked["model"]["image"]}})
    assert config.model.dim == DIM
    assert config.objective.settings["log_logit_scale"] == pytest.approx(np.log(1 / 0.07))  # CLIP's start
    encoders = Encoders.create(config.model, "bimodal", SIDE, words_dataset.index.tokenizer)
    assert encoders.image.head.bias is None


def test_a_dataset_with_another_tokenizer_is_refused_with_the_line_that_converts_it(
    words_dataset, pairs_dataset, tmp_path, caplog
):
    save_whole(tmp_path / "model", "clip")
    recorded = to_tree(small(words_dataset, **settings_of(tmp_path / "model", "clip")))["model"]
    sizes = {"vocab_size": 9_999, "pretrained": False}
    fresh = recorded | {"text": {"name": f"hf:{tmp_path}/model", "config": sizes}}
    dry(pairs_dataset, fresh, tmp_path)  # its tokens are as good as others for fresh weights
    for model in (settings_of(tmp_path / "model", "clip")["model"], recorded):
        with pytest.raises(ConfigError, match=rf"thermopile convert … --tokenizer hf:{tmp_path}/model`"):
            dry(pairs_dataset, model, tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"--context-length"):
        dry(pairs_dataset, recorded, tmp_path)
    assert "has no tokenizer.json, so nothing shows" in caplog.text


def dry(dataset, model, folder):
    with dry_run(small(dataset, model=model), RunDirectory(folder / "run")):
        pass


@pytest.mark.parametrize(("told", "length"), [(None, 77), (20, 20)])
def test_a_models_context_length_is_the_shorter_that_it_tells(told, length, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": told}))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    assert model_context(tmp_path) == length


@pytest.mark.wide
def test_a_model_gives_a_conversion_its_tokenizer_and_context_length(words_dataset, picture_folder, tmp_path):
    save_whole(tmp_path / "model", "siglip")
    rows = [f"{path},the character {path.stem}" for path in sorted(picture_folder.rglob("*.png"))[:20]]
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath,title", *rows]))
    line = ("convert", "csv", tmp_path / "pairs.csv", tmp_path / "out", "--caption", "title", "--tokenizer")
    succeed(*line, f"hf:{tmp_path}/model")
    index = Dataset(tmp_path / "out").index
    assert index.tokenizer.context_length == CONTEXT
    assert index.tokenizer.end_id == words_dataset.index.tokenizer.end_id
    succeed(*line, f"hf:{tmp_path}/model", "--context-length", 20, "--overwrite")
    assert Dataset(tmp_path / "out").index.tokenizer.context_length == 20
    asked = small(Dataset(tmp_path / "out"), **settings_of(tmp_path / "model", "siglip", batch_size=16))
    with pytest.raises(
        ConfigError, match=rf"captions of 20: .* and --context-length {CONTEXT}$"
    ):  # it pools at its end
        Encoders.create(asked.model, "bimodal", SIDE, Dataset(tmp_path / "out").index.tokenizer)
    told = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(told | {"model_max_length": "long"}))
    assert_one_line(cli(*line, f"hf:{tmp_path}/model", "--overwrite"), 1, "tokenizer_config.json cannot be read")
