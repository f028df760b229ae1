"""A local model of transformers: its weights are where a run begins, its architecture is recorded with the run."""

import json
import os
import subprocess
import sys
import tomllib

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.config import EncoderConfig, ModelConfig, TrainConfig, load_config, to_toml
from thermopile.trainer.encoders import Encoders, create_encoder, with_names
from thermopile.trainer.encoders.hf_directory import model_class, quiet
from thermopile.trainer.errors import ConfigError

TOKENIZER = TokenizerInfo(vocab_size=50, context_length=9, end_id=2)
TOKENS = torch.tensor([[1, 7, 8, 2, 0, 0, 0, 0, 0], [1, 9, 9, 9, 9, 9, 9, 9, 2]])
PICTURES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)
MODELS = {
    "resnet": {"layer_type": "basic", "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]},
    "vit": {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 16, "image_size": 32},
    "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 60,
                   "max_position_embeddings": 12},
    "clip_text_model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
                        "vocab_size": 60, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
IMAGE_MODELS, TEXT_MODELS = ("resnet", "vit"), ("distilbert", "clip_text_model")


def save(folder, model_type, of=AutoModel, shard_size="1GB", **settings):
    """A model with random weights, saved as transformers saves it."""
    torch.manual_seed(5)
    model = of.from_config(AutoConfig.for_model(model_type, **(MODELS.get(model_type, {}) | settings))).eval()
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def of_directory(side, folder, **config):
    return with_names(ModelConfig(**{side: EncoderConfig(name=f"hf:{folder}", config=config)}))


@pytest.mark.parametrize("model_type", IMAGE_MODELS)
def test_an_image_encoder_begins_with_the_directorys_weights(model_type, tmp_path):
    model = save(tmp_path, model_type)
    backbone = create_encoder("image", of_directory("image", tmp_path), 32).eval().backbone
    assert torch.equal(backbone(PICTURES), model(PICTURES).pooler_output.flatten(1))


def test_a_directorys_model_is_set_to_train_as_one_that_begins_fresh_is(tmp_path):
    save(tmp_path, "resnet")
    encoder = create_encoder("image", of_directory("image", tmp_path), 32)
    assert all(module.training for module in encoder.modules())


@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_a_text_encoder_begins_with_the_directorys_weights(model_type, tmp_path):
    model = save(tmp_path, model_type)
    backbone = create_encoder("text", of_directory("text", tmp_path), TOKENIZER).eval().backbone
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0], [1] * 9])
    states = model(input_ids=TOKENS, attention_mask=mask).last_hidden_state
    place = [3, 8] if model_type == "clip_text_model" else [0, 0]  # a causal tower has read all at the end
    assert torch.equal(backbone(TOKENS), states[[0, 1], place])


@pytest.mark.parametrize("published", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}])
def test_a_decoders_layers_and_positions_are_recorded(published, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 12}  # fmt: skip
    model = save(tmp_path, "qwen2", **sizes, rope_theta=500.0)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(stored | published))
    config = of_directory("text", tmp_path)
    assert config.text.config["layer_types"] == ["full_attention"]
    backbone = create_encoder("text", config, TOKENIZER).eval().backbone
    assert torch.equal(backbone(TOKENS[1:]), model(TOKENS[1:]).last_hidden_state[:, -1])


@pytest.mark.parametrize("stored", [{"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_scaling": 3}])
def test_positions_that_settings_cannot_record_are_refused(stored, tmp_path):
    save(tmp_path, "qwen2", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=60)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": None} | stored))
    with pytest.raises(ConfigError, match=r"model.text.name = .*rope_parameters"):
        of_directory("text", tmp_path)


def test_a_model_whose_pictures_have_two_sides_takes_square_ones(tmp_path):
    save(tmp_path, "hiera", image_size=[32, 32], embed_dim=8, depths=[1, 1, 1], num_heads=[1, 1, 1], num_query_pool=2)
    assert create_encoder("image", of_directory("image", tmp_path), 32).backbone.width


def test_the_backbone_of_a_classifier_is_taken_without_its_classifier(tmp_path):
    model = save(tmp_path, "resnet", of=AutoModelForImageClassification)
    backbone = create_encoder("image", of_directory("image", tmp_path), 32).eval().backbone
    assert torch.equal(backbone(PICTURES), model.resnet(PICTURES).pooler_output.flatten(1))


def test_weights_of_half_precision_are_trained_in_single(tmp_path):
    save(tmp_path, "resnet").half().save_pretrained(tmp_path)
    encoder = create_encoder("image", of_directory("image", tmp_path), 32)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}


def test_the_settings_record_the_absolute_path_and_the_architecture(tmp_path, monkeypatch):
    save(tmp_path / "model", "resnet")
    monkeypatch.chdir(tmp_path)
    model = with_names(ModelConfig(image=EncoderConfig(name="hf:./model")))
    assert model.image.name == f"hf:{tmp_path / 'model'}"
    assert model.image.config == {"model_type": "resnet"} | MODELS["resnet"]
    recorded = tomllib.loads(to_toml(TrainConfig(model=model)))
    assert with_names(load_config(recorded).model) == model


@pytest.mark.parametrize(("side", "model_type"), [("image", "vit"), ("text", "clip_text_model")])
def test_a_recorded_model_needs_no_directory_once_a_checkpoint_has_the_weights(side, model_type, tmp_path):
    save(tmp_path / "model", model_type)
    config = with_names(of_directory(side, tmp_path / "model"))
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert with_names(config) == config
    encoders = Encoders.create(config, "bimodal", 32, TOKENIZER, pretrained=False)
    with pytest.raises(ConfigError, match="the directory, whose weights the run starts from, no longer exists"):
        Encoders.create(config, "bimodal", 32, TOKENIZER)
    (tmp_path / "elsewhere").rename(tmp_path / "model")
    weights = Encoders.create(config, "bimodal", 32, TOKENIZER).state_dict()
    encoders.load_state_dict(weights)


def test_what_is_set_beside_the_directory_wins_over_its_config(tmp_path):
    save(tmp_path, "distilbert")
    encoder = create_encoder("text", of_directory("text", tmp_path, dropout=0.0), TOKENIZER)
    assert encoder.backbone.model.config.dropout == 0.0


def test_a_config_that_names_code_or_another_attention_is_not_obeyed(tmp_path):
    save(tmp_path, "resnet")
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text()) | {
        "auto_map": {"AutoModel": "evil.Model"}, "attn_implementation": "someone/kernel", "return_dict": False,
    }  # fmt: skip
    file.write_text(json.dumps(stored))
    (tmp_path / "evil.py").write_text("raise SystemExit")
    config = of_directory("image", tmp_path)
    assert config.image.config == {"model_type": "resnet"} | MODELS["resnet"]
    assert create_encoder("image", config, 32)(PICTURES).shape == (2, 64)


def test_a_directory_that_cannot_be_used_is_told_in_one_line(tmp_path):
    def refused(side, folder, match):
        with pytest.raises(ConfigError, match=match) as refusal:
            of_directory(side, folder)
        assert str(folder) in str(refusal.value)
        assert "\n" not in str(refusal.value)

    refused("image", tmp_path / "none", "no such directory")
    refused("image", tmp_path, r"has no config\.json")
    (tmp_path / "config.json").write_text("{")
    refused("image", tmp_path, r"config\.json cannot be read")
    (tmp_path / "config.json").write_text("[]")
    refused("image", tmp_path, "is not a JSON object")
    (tmp_path / "config.json").write_text('{"model_type": "detr"}')
    refused("image", tmp_path, "holds a model of type 'detr'; model.image supports: resnet, vit")
    save(tmp_path, "resnet")
    refused("text", tmp_path, "holds a model of type 'resnet'; model.text supports: distilbert, clip_text_model")
    stored = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(stored) | {"depths": [1, 10**8]}))
    refused("image", tmp_path, "no model has a setting of 100,000,000; it would not fit into memory")
    (tmp_path / "config.json").write_text(stored)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refused("image", tmp_path, r"has no model\.safetensors\. .* \(\.bin, .*may execute code: .*save_pretrained")


def test_an_adapter_in_a_directory_and_a_type_that_fetches_code_are_refused(tmp_path):
    save(tmp_path, "resnet")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has an adapter; merge it into the model"):
        create_encoder("image", of_directory("image", tmp_path), 32)
    assert model_class("bert", "text") is not None
    assert [model_class(name, "text") for name in ("mra", "yoso", "rwkv")] == [None] * 3


@pytest.mark.parametrize("model_type", ["t5", "canine", "mobilebert", "bart", "higgs_audio_v2_tokenizer"])
def test_models_of_another_kind_than_an_encoder_or_a_decoder_of_tokens_are_refused(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=f"holds a model of type '{model_type}'; model.text supports: distilbert"):
        of_directory("text", tmp_path)


def test_weights_that_are_damaged_or_of_another_model_are_told_in_one_line(tmp_path):
    def refused(match):
        with pytest.raises(ConfigError, match=match) as refusal:
            create_encoder("image", of_directory("image", tmp_path), 32)
        assert "\n" not in str(refusal.value)

    save(tmp_path, "resnet")
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    refused(r"its weights do not match its config\.json")
    save(tmp_path / "wider", "resnet", hidden_sizes=[4, 16])
    file.write_bytes((tmp_path / "wider" / "model.safetensors").read_bytes())
    refused(r"its weights do not match its config\.json")
    save(tmp_path / "vit", "vit")
    file.write_bytes((tmp_path / "vit" / "model.safetensors").read_bytes())
    refused("lacks .* of the model's tensors, for example ")


@pytest.fixture
def sharded(tmp_path):
    """Return a function that saves a model in several files, replaces parts of its index, and loads it."""
    model = save(tmp_path / "model", "resnet", shard_size="1KB")
    index = tmp_path / "model" / "model.safetensors.index.json"

    def load(**replaced):
        index.write_text(json.dumps(json.loads(index.read_text()) | replaced))
        return create_encoder("image", of_directory("image", index.parent), 32).eval().backbone

    load.model, load.folder = model, index.parent
    return load


def test_weights_in_several_files_are_loaded_by_their_index(sharded):
    assert len(list(sharded.folder.glob("*.safetensors"))) > 1
    assert torch.equal(sharded()(PICTURES), sharded.model(PICTURES).pooler_output.flatten(1))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../model/a.safetensors", "/a.safetensors", ["a.safetensors"]])
def test_an_index_names_safetensors_in_the_directory_and_no_other_file_is_opened(sharded, name, monkeypatch):
    for opens in ("torch.load", "safetensors.safe_open", "transformers.modeling_utils.safe_open"):
        monkeypatch.setattr(opens, lambda *_, **__: pytest.fail("a file was opened"))
    with pytest.raises(ConfigError, match=r"names .*only \*\.safetensors in the directory itself") as refusal:
        sharded(weight_map=dict.fromkeys(sharded.model.state_dict(), name))
    assert repr(name) in str(refusal.value)


@pytest.mark.parametrize("replaced", [{"weight_map": {}}, {"weight_map": ["a.safetensors"]}, {"metadata": 3}])
def test_an_index_that_is_none_is_told_in_one_line(sharded, replaced):
    with pytest.raises(ConfigError, match=r"index\.json lacks weight_map or metadata; save the model again"):
        sharded(**replaced)


def test_a_model_that_does_not_fit_the_data_is_told_with_the_cure(tmp_path):
    save(tmp_path / "image", "vit")
    with pytest.raises(ConfigError, match=r"images of 32 pixels, but data.image_size = 48; set data.image_size=32"):
        create_encoder("image", of_directory("image", tmp_path / "image"), 48)
    save(tmp_path / "text", "distilbert", vocab_size=40)
    with pytest.raises(ConfigError, match=r"has 40 tokens .* the dataset has 50 .*--tokenizer"):
        create_encoder("text", of_directory("text", tmp_path / "text"), TOKENIZER)


@pytest.mark.wide
def test_a_torchvision_that_does_not_fit_torch_is_named(tmp_path):
    told = tmp_path / "torchvision-0.99.dist-info" / "METADATA"
    for path, text in (
        (tmp_path / "torchvision" / "__init__.py", "raise RuntimeError('operator torchvision::nms does not exist')"),
        (told, "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99\n"),
    ):
        path.parent.mkdir()
        path.write_text(text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "import thermopile.trainer.encoders.hf_directory"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "ConfigError: transformers' models cannot be imported beside this torchvision; install" in done.stderr
