"""Any model of transformers for images or texts: untrained, trained, interrupted, exported, as transformers has it."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.config import EncoderConfig, ModelConfig
from thermopile.trainer.encoders import Encoders, create_encoder, with_names
from thermopile.trainer.encoders.hf_directory import model_class, quiet
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.export import export_encoders

from support.runs import OFTEN, losses, resumed, small, stopped, train, weights

_CLIP = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_VIEWS = {"image_size": 16, "patch_size": 8}
IMAGE = {
    "clip_vision_model": _CLIP | _VIEWS,
    "siglip_vision_model": _CLIP | _VIEWS,
    "dinov2": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2} | _VIEWS,
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2},
    "resnet": {"layer_type": "basic", "embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2]},
    "vit": _CLIP | _VIEWS,
}
_WORDS = {"vocab_size": 3000, "max_position_embeddings": 40}
_BERT = _CLIP | _WORDS
TEXT = {
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16} | _WORDS,
    "bert": _BERT,
    "mpnet": _BERT,
    "deberta-v2": _BERT | {"pad_token_id": 0},
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 40,
        "vocab_size": 3000,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "clip_text_model": _CLIP | _WORDS | {"bos_token_id": 1, "eos_token_id": 2},
    "siglip_text_model": _CLIP
    | _WORDS
    | {"projection_size": 12, "bos_token_id": None, "eos_token_id": 2, "max_position_embeddings": 9},
}
GROUPS = dict.fromkeys(IMAGE | TEXT, 4) | {"resnet": 3, "distilbert": 3, "deberta-v2": 3}
"""Embeddings, two blocks or stages, and what follows them if it has weights."""
PAIRS = [pytest.param("dinov2", "bert"), *(pytest.param(*pair, marks=pytest.mark.wide) for pair in (
    ("clip_vision_model", "clip_text_model"), ("siglip_vision_model", "siglip_text_model"),
    ("convnext", "distilbert"), ("resnet", "bert"), ("vit", "siglip_text_model")))]  # fmt: skip
TOKENIZER = TokenizerInfo(vocab_size=50, context_length=9, end_id=2)
TOKENS = torch.tensor([[1, 7, 8, 2, 0, 0, 0, 0, 0], [1, 9, 9, 9, 9, 9, 9, 9, 2]])
PICTURES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


def save(folder, model_type, **more):
    torch.manual_seed(5)
    model = model_class(model_type)(AutoConfig.for_model(model_type, **(IMAGE | TEXT)[model_type] | more)).eval()
    with quiet():
        model.save_pretrained(folder)
    return model


def side_of(model_type):
    return ("image", 16) if model_type in IMAGE else ("text", TOKENIZER)


def encoder_of(folder, model_type, recompute=False, **config):
    side, given = side_of(model_type)
    names = {side: EncoderConfig(name=f"hf:{folder}", config=config)}
    return create_encoder(side, with_names(ModelConfig(activation_checkpointing=recompute, **names)), given)


def inputs_of(model_type):
    return PICTURES if model_type in IMAGE else TOKENS


def by_transformers(model, model_type, tokens=TOKENS, end_id=2):
    """The features as transformers' own documentation has them, [b, width]."""
    if model_type in IMAGE:
        return model(PICTURES).pooler_output.flatten(1)
    if model_type == "siglip_text_model":  # trained on texts padded with token 1, which it reads
        padded = tokens.where(((tokens == end_id).cumsum(1) - (tokens == end_id).int()) == 0, 1)
        return model(input_ids=padded).pooler_output
    if model_type in ("clip_text_model", "gpt2"):
        return model(input_ids=tokens).last_hidden_state[range(len(tokens)), (tokens == end_id).int().argmax(1)]
    mask = ((tokens == end_id).cumsum(1) - (tokens == end_id).int()) == 0
    return model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state[:, 0]


@pytest.mark.parametrize("model_type", IMAGE | TEXT)
def test_features_are_transformers_own_and_width_and_groups_are_found(model_type, tmp_path):
    model = save(tmp_path, model_type)
    encoder = encoder_of(tmp_path, model_type).eval()
    features = encoder.backbone(inputs_of(model_type))
    torch.testing.assert_close(features, by_transformers(model, model_type), atol=1e-6, rtol=1e-5)
    assert encoder.backbone.width == features.shape[1]
    groups = encoder.backbone.groups()
    assert len(groups) == GROUPS[model_type]
    held = [id(weight) for group in groups for weight in group.parameters()]
    assert sorted(held) == sorted(id(weight) for weight in encoder.backbone.parameters())
    features.sum().backward()  # what no feature depends on is not trained, or ranks would wait for its gradient
    assert all((weight.grad is not None) == weight.requires_grad for weight in encoder.backbone.parameters())


@pytest.mark.parametrize(
    "model_type", ["convnext", "dinov2", pytest.param("siglip_text_model", marks=pytest.mark.wide)]
)
def test_recomputing_changes_nothing(model_type, tmp_path):
    save(tmp_path, model_type)

    def gradients(recompute):
        encoder = encoder_of(tmp_path, model_type, recompute)
        torch.manual_seed(0)
        encoder(inputs_of(model_type)).square().sum().backward()
        return [weight.grad for weight in encoder.backbone.parameters() if weight.requires_grad]

    torch.manual_seed(1)
    kept = gradients(False)
    torch.manual_seed(1)
    assert all(map(torch.equal, kept, gradients(True)))


def test_a_directory_may_give_its_architecture_alone(tmp_path):
    save(tmp_path, "vit")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"fresh weights, set model\.image\.config\.pretrained=false"):
        encoder_of(tmp_path, "vit")
    assert encoder_of(tmp_path, "vit", pretrained=False)(PICTURES).shape == (2, 64)


@pytest.mark.parametrize(
    "model_type", ["dinov2", "convnext", pytest.param("siglip_vision_model", marks=pytest.mark.wide)]
)
def test_local_views_of_another_size_are_taken(model_type, tmp_path):
    save(tmp_path, model_type)
    backbone = encoder_of(tmp_path, model_type).backbone
    backbone.check_side(8)
    assert backbone(PICTURES[..., :8, :8]).shape == (2, 16)


@pytest.mark.wide
@pytest.mark.parametrize(("image", "text"), PAIRS)
def test_a_run_is_interrupted_without_a_trace_and_transformers_alone_reads_what_it_exports(
    image, text, pairs_dataset, tmp_path
):
    save(tmp_path / "i", image)
    context = {"max_position_embeddings": pairs_dataset.index.tokenizer.context_length}
    save(tmp_path / "t", text, **context if text == "siglip_text_model" else {})
    model = {"dim": 8, "image": {"name": f"hf:{tmp_path}/i"}, "text": {"name": f"hf:{tmp_path}/t"}}
    config = small(pairs_dataset, batch_size=64, steps=4, model=model, **OFTEN)
    whole = train(config, tmp_path / "whole")
    run = resumed(config, stopped(config, tmp_path / "run", 3), 2)
    assert losses(run) == losses(whole)
    export_encoders(run, tmp_path / "out", "hf")
    tokens = torch.from_numpy(pairs_dataset.shard(0).tokens(np.arange(2))).long()
    encoders = Encoders.create(config.model, "bimodal", 16, pairs_dataset.index.tokenizer, pretrained=False).eval()
    encoders.load_state_dict(weights(run))
    for side, model_type, inputs in (("image", image, PICTURES), ("text", text, tokens)):
        loaded = model_class(model_type).from_pretrained(tmp_path / "out" / side).eval()
        theirs = by_transformers(loaded, model_type, tokens)
        torch.testing.assert_close(getattr(encoders, side).backbone(inputs), theirs, atol=1e-5, rtol=0)
    read = AutoTokenizer.from_pretrained(tmp_path / "out" / "text")
    assert read.pad_token_id == (1 if text == "siglip_text_model" else 0)
