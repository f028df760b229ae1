"""Encoders: a batch in, unit-norm features out."""

import copy

import numpy as np
import pytest
import torch

from thermopile.pipeline.batch import Batch
from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.config import EncoderConfig, ModelConfig
from thermopile.trainer.encoders import Encoders, backbones, create_encoder, with_names
from thermopile.trainer.encoders.backbones import PooledTo4
from thermopile.trainer.errors import ConfigError

TOKENIZER = TokenizerInfo(vocab_size=50, context_length=9, end_id=2)
TOKENS = torch.tensor([[1, 7, 8, 2, 0, 0, 0, 0, 0], [1, 9, 9, 9, 9, 9, 9, 9, 2]], dtype=torch.int32)
TINY_TEXT = {
    "hf:distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    "hf:clip-text": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "mean_embedding": {},
}
TINY_IMAGE = {"hf:resnet-18": {"embedding_size": 4, "hidden_sizes": [4, 4, 4, 8]},
              "hf:resnet-50": {"embedding_size": 4, "hidden_sizes": [4, 4, 4, 8], "depths": [1, 1, 1, 1]},
              "hf:vit-s": {"hidden_size": 12, "num_hidden_layers": 1, "patch_size": 16},
              "conv": {"width": 4}}  # fmt: skip


def image_encoder(name, *, image_size=32, **config):
    return create_encoder("image", ModelConfig(dim=6, image=EncoderConfig(name=name, config=config)), image_size)


def text_encoder(name, tokenizer=TOKENIZER, **config):
    return create_encoder("text", ModelConfig(dim=6, text=EncoderConfig(name=name, config=config)), tokenizer)


@pytest.mark.parametrize("name", TINY_IMAGE)
def test_an_image_encoder_gives_a_row_of_features_per_picture(name):
    encoder = image_encoder(name, **TINY_IMAGE[name])
    assert encoder(torch.randn(2, 3, 32, 32)).shape == (2, 6)


@pytest.mark.parametrize("name", TINY_TEXT)
def test_a_text_encoder_gives_features_that_do_not_depend_on_padding(name):
    torch.manual_seed(0)
    encoder = text_encoder(name, **TINY_TEXT[name]).eval()
    features = encoder(TOKENS)
    assert features.shape == (2, 6)
    torch.testing.assert_close(encoder(TOKENS[:1, :5]), features[:1])


@pytest.mark.parametrize("name", TINY_TEXT)
def test_a_text_encoder_reads_the_whole_caption(name):
    torch.manual_seed(0)
    encoder = text_encoder(name, **TINY_TEXT[name]).eval()
    changed = TOKENS.clone()
    changed[1, 7] = 11
    assert not torch.allclose(encoder(changed)[1], encoder(TOKENS)[1])


@pytest.mark.parametrize("name", TINY_TEXT)
@pytest.mark.parametrize("padding", [0, 2, 11])
def test_a_text_encoder_does_not_care_what_a_tokenizer_pads_with(name, padding):
    torch.manual_seed(0)
    encoder = text_encoder(name, **TINY_TEXT[name]).eval()
    padded = TOKENS.clone()
    padded[0, 4:] = padding
    assert torch.equal(encoder(padded), encoder(TOKENS))


def test_a_token_whose_id_is_zero_is_text_before_the_end_of_a_caption():
    torch.manual_seed(0)
    encoder = text_encoder("mean_embedding")
    changed = TOKENS.clone()
    changed[0, 1] = 0
    assert not torch.allclose(encoder(changed)[0], encoder(TOKENS)[0])


@pytest.mark.parametrize("name", TINY_TEXT)
def test_captions_of_our_own_tokenizer_give_the_features_that_a_pad_id_of_zero_gives(name, pairs_dataset):
    info = pairs_dataset.index.tokenizer
    torch.manual_seed(0)
    encoder = text_encoder(name, info, **TINY_TEXT[name]).eval()
    tokens = torch.from_numpy(pairs_dataset.shard(0).tokens(np.arange(400)))
    assert torch.equal(encoder(tokens), features_with_pad_id_zero(encoder, name, tokens.long()))


def features_with_pad_id_zero(encoder, name, tokens):
    """The features where whatever is not token 0 is text, and token 0 has no embedding."""
    encoder = copy.deepcopy(encoder)
    real = tokens != 0
    if name == "mean_embedding":
        mean, *hidden = encoder.backbone.body
        with torch.no_grad():
            mean.embedding.weight[0] = 0
        return encoder.head(
            torch.nn.Sequential(*hidden)((mean.embedding(tokens) * real[..., None]).sum(1) / real.sum(1, keepdim=True))
        )
    with torch.no_grad():
        encoder.backbone.model.get_input_embeddings().weight[0] = 0
    states = encoder.backbone.model(input_ids=tokens, attention_mask=real.long()).last_hidden_state
    return encoder.head(states[range(len(tokens)), (tokens == 2).int().argmax(1) if name == "hf:clip-text" else 0])


@pytest.mark.wide
def test_published_sizes_are_what_their_names_say():
    with torch.device("meta"):  # no memory and no random numbers
        count = {
            name: sum(p.numel() for p in image_encoder(name, image_size=224).backbone.parameters()) / 1e6
            for name in ("hf:resnet-18", "hf:resnet-50", "hf:vit-s", "hf:vit-b")
        }
    # He et al. 2016 and Touvron et al. 2021, without the classifier; ViT with the pooler of transformers.
    assert count == pytest.approx(
        {"hf:resnet-18": 11.2, "hf:resnet-50": 23.5, "hf:vit-s": 21.8, "hf:vit-b": 86.4}, rel=0.01
    )


@pytest.mark.parametrize("name", TINY_IMAGE)
def test_an_image_encoder_takes_local_views_of_another_size(name):
    assert image_encoder(name, **TINY_IMAGE[name])(torch.randn(2, 3, 16, 16)).shape == (2, 6)


@pytest.mark.parametrize("side", [2, 4, 5, 8])
def test_maps_of_4_by_4_are_not_averaged_which_would_change_nothing(side):
    maps = torch.rand(3, 2, side, side)
    pooled = PooledTo4(4)(maps)
    assert torch.equal(pooled, torch.nn.AdaptiveAvgPool2d(4)(maps))
    assert (pooled is maps) == (side == 4)


def test_convolutions_may_have_batch_norm_in_place_of_biases():
    body = image_encoder("conv", width=2, batch_norm=True).backbone.body
    kinds = [type(layer).__name__ for layer in body]
    assert kinds[:9] == ["Conv2d", "BatchNorm2d", "ReLU"] * 3
    assert all(layer.bias is None for layer in body if isinstance(layer, torch.nn.Conv2d))


def test_a_vits_patch_projection_may_stay_as_it_was_drawn():
    encoder = image_encoder("hf:vit-s", **TINY_IMAGE["hf:vit-s"], fixed_patches=True)
    projection = encoder.backbone.model.embeddings.patch_embeddings.projection
    assert not any(parameter.requires_grad for parameter in projection.parameters())
    # MoCo v3's code: uniform, as for a matrix of 3·16·16 inputs and the model's width.
    bound = (6 / (3 * 16 * 16 + 12)) ** 0.5
    assert bound * 0.99 < projection.weight.abs().max() <= bound
    assert not projection.bias.any()


def test_a_trained_vits_patch_projection_is_kept(tmp_path):
    model = image_encoder("hf:vit-s", **TINY_IMAGE["hf:vit-s"]).backbone.model
    model.save_pretrained(tmp_path / "vit")
    config = with_names(ModelConfig(image={"name": f"hf:{tmp_path}/vit", "config": {"fixed_patches": True}}))
    loaded = create_encoder("image", config, 32).backbone.model
    theirs, ours = (each.embeddings.patch_embeddings.projection.weight for each in (model, loaded))
    assert torch.equal(ours, theirs)
    assert not ours.requires_grad


def test_bimodal_features_are_of_picture_and_caption_with_norm_one():
    encoders = Encoders.create(with_names(ModelConfig(dim=5)), "bimodal", 32, TOKENIZER)
    first, second, *_ = encoders(Batch(torch.arange(2), (torch.randn(2, 3, 32, 32),), TOKENS))
    assert first.shape == second.shape == (2, 5)
    torch.testing.assert_close(torch.cat([first, second]).norm(dim=1), torch.ones(4))


def test_unimodal_features_are_of_both_views_by_one_encoder():
    encoders = Encoders.create(with_names(ModelConfig(dim=5)), "unimodal", 32, None)
    view = torch.randn(2, 3, 32, 32)
    first, second, *_ = encoders(Batch(torch.arange(2), (view, view.flip(0))))
    torch.testing.assert_close(first, second.flip(0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EncoderConfig(name="cnv"), "'cnv': unknown encoder; available: conv"),
        (EncoderConfig(name="hf:resnet-51"), "unknown model; available: hf:resnet-18"),
        (EncoderConfig(name="conv", config={"wdth": 3}), "wdth"),
        (EncoderConfig(name="conv", config={"batch_norm": "no"}), "batch_norm = 'no'; use true or false"),
        (EncoderConfig(name="hf:vit-s", config={"fixed_patches": "no"}), "fixed_patches = 'no'; use true or false"),
        (EncoderConfig(name="hf:vit-s", config={"hiden_size": 3}), "no such setting"),
        (
            EncoderConfig(name="hf:resnet-18", config={"depths": [1, 100_000_000]}),
            "no model has a setting of 100,000,000",
        ),
        (EncoderConfig(name="hf:vit-s", config={"num_hidden_layers": 10_000_000}), "has more than 3,000 parts"),
        (EncoderConfig(name="hf:vit-s", config={"hidden_size": 6_000_000}), r"weights do not fit into memory"),
        # Both can make transformers fetch code and run it.
        (EncoderConfig(name="hf:vit-s", config={"_attn_implementation": "someone/kernel"}), "no such setting"),
        (EncoderConfig(name="hf:/nowhere", config={"model_type": "timm_wrapper"}), "supports: resnet, vit"),
    ],
)
def test_an_unknown_encoder_or_setting_is_named(config, message, monkeypatch):
    monkeypatch.setattr(backbones, "MAX_MODULES", 3_000)  # making a tenth of what is allowed takes a third of a second
    with pytest.raises(ConfigError, match=message):
        create_encoder("image", ModelConfig(image=config), 32)


def test_pairs_are_needed_for_the_bimodal_mode():
    with pytest.raises(ConfigError, match="needs captions"):
        Encoders.create(with_names(ModelConfig()), "bimodal", 32, None)


def test_the_cifar_stem_is_a_small_convolution_that_keeps_the_pictures_size():
    torch.manual_seed(0)
    stem = image_encoder("hf:resnet-18", **TINY_IMAGE["hf:resnet-18"], stem="cifar").backbone.model.embedder
    pictures = torch.randn(2, 3, 32, 32)
    (weight, *_) = stem.parameters()
    assert weight.shape == (4, 3, 3, 3)
    assert weight.std().item() == pytest.approx((2 / (4 * 9)) ** 0.5, rel=0.15)  # He's, by fan-out, as the others
    expected = torch.relu(torch.nn.functional.conv2d(pictures, weight, padding=1))
    stem.embedder.normalization = torch.nn.Identity()
    torch.testing.assert_close(stem(pictures), expected)


def test_a_stem_is_a_setting_of_resnets_alone():
    with pytest.raises(ConfigError, match=r"model.image.config.stem = 'cfar'; available: imagenet, cifar"):
        image_encoder("hf:resnet-18", **TINY_IMAGE["hf:resnet-18"], stem="cfar")
    with pytest.raises(ConfigError, match=r"model.image.config.stem: transformers' ViTConfig has no such setting"):
        image_encoder("hf:vit-s", stem="cifar")
