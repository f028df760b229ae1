"""Projection heads: the layers that the papers have, between a backbone's features and the objective's space."""

import pytest
import torch
from torch.nn import functional as F

from thermopile.trainer.config import EncoderConfig, ModelConfig, load_config
from thermopile.trainer.config.layers import preset_names, read_preset
from thermopile.trainer.encoders import create_encoder
from thermopile.trainer.encoders.projection_heads import HEADS, PREDICTORS
from thermopile.trainer.errors import ConfigError


def encoder(head, **settings):
    torch.manual_seed(0)
    image = EncoderConfig(name="conv", config={"width": 1})
    return create_encoder("image", ModelConfig(dim=6, head=head, image=image, **settings), 32)


def shapes(module):
    return [tuple(parameter.shape) for parameter in module.parameters()]


def test_a_linear_head_is_one_layer():
    assert shapes(encoder("linear").head) == [(6, 64), (6,)]


def test_simclrs_head_has_a_hidden_layer_as_wide_as_the_features_and_no_batch_norm():
    head = encoder("simclr").head
    assert shapes(head) == [(64, 64), (64,), (6, 64), (6,)]
    first, _, second = head
    h = torch.randn(5, 64)
    torch.testing.assert_close(head(h), second(F.relu(first(h))))
    torch.testing.assert_close(head(h)[:1], head(h[:1]))  # whatever else is in the batch


@pytest.mark.parametrize(
    ("name", "dim", "expected"),
    [("vicreg", 8192, [(8192, 512), (8192, 8192), (8192, 8192)]), ("simclr_bn", 128, [(512, 512), (128, 512)]),
     ("moco_v3", 256, [(4096, 512), (4096, 4096), (256, 4096)]), ("moco_v3_resnet", 256, [(4096, 512), (256, 4096)])],
)  # fmt: skip
def test_heads_with_batch_norm_have_the_published_widths(name, dim, expected):
    with torch.device("meta"):
        head = HEADS[name](512, dim, None)
    assert [shape for shape in shapes(head) if len(shape) == 2] == expected


def test_vicregs_head_normalises_and_rectifies_all_but_its_last_layer():
    head = encoder("vicreg", head_width=5).head
    assert shapes(head) == [(5, 64), (5,), (5,), (5,), (5, 5), (5,), (5,), (5,), (6, 5)]
    h = torch.randn(9, 64)

    def layer(rows, linear):
        out = linear(rows)
        return F.relu((out - out.mean(0)) / (out.var(0, unbiased=False) + 1e-5).sqrt())

    torch.testing.assert_close(head(h), layer(layer(h, head[0]), head[3]) @ head[6].weight.T)


def normalised(rows):
    return (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-5).sqrt()


def test_simclrs_head_with_batch_norm_normalises_both_layers_and_shifts_the_first():
    head = encoder("simclr_bn", head_width=5).head
    h = torch.randn(9, 64)
    hidden = F.relu(normalised(h @ head[0].weight.T))
    torch.testing.assert_close(head(h), normalised(hidden @ head[3].weight.T))
    assert [parameter.requires_grad for parameter in head.parameters()] == [True] * 5 + [False]


@pytest.mark.parametrize(("name", "layers"), [("moco_v3", 3), ("moco_v3_resnet", 2)])
def test_moco_v3s_heads_normalise_every_layer_and_the_last_without_parameters(name, layers):
    head = encoder(name, head_width=5).head
    h = torch.randn(9, 64)
    linears = [layer.weight for layer in head if isinstance(layer, torch.nn.Linear)]
    expected = h
    for weight in linears[:-1]:
        expected = F.relu(normalised(expected @ weight.T))
    torch.testing.assert_close(head(h), normalised(expected @ linears[-1].T))
    assert len(linears) == layers


@pytest.mark.parametrize(("name", "norms"), [("moco_v3", 2), ("moco_v3_resnet", 1)])
def test_moco_v3s_predictors_have_two_layers_and_for_resnets_no_norm_at_the_end(name, norms):
    with torch.device("meta"):
        predictor = PREDICTORS[name](256, None)
    assert [shape for shape in shapes(predictor) if len(shape) == 2] == [(4096, 256), (256, 4096)]
    assert sum(isinstance(layer, torch.nn.BatchNorm1d) for layer in predictor) == norms


@pytest.mark.parametrize("head", sorted(HEADS.keys() - {"none"}))
def test_an_encoder_is_its_backbone_and_then_its_head(head):
    made = encoder(head).eval()
    pictures = torch.randn(4, 3, 32, 32)
    features = made.backbone(pictures)
    assert features.shape == (4, 64)
    assert torch.equal(made(pictures), made.head(features))
    assert made(pictures).shape == (4, 6)


@pytest.mark.parametrize("head", sorted(HEADS.keys() - {"linear", "none"}))
def test_the_width_of_hidden_layers_can_be_set(head):
    assert shapes(encoder(head, head_width=3).head)[0] == (3, 64)


def test_without_a_head_the_features_are_those_of_a_backbone_that_has_as_many():
    image = EncoderConfig(name="conv", config={"width": 1})
    made = create_encoder("image", ModelConfig(dim=64, head="none", image=image), 32)
    pictures = torch.randn(4, 3, 32, 32)
    assert torch.equal(made(pictures), made.backbone(pictures))
    assert len(made.groups()) == 3
    with pytest.raises(ConfigError, match=r"keeps the image encoder's features; set model\.dim=64$"):
        encoder("none")


@pytest.mark.parametrize(
    ("model", "message"),
    [({"head": "mlp"}, "model.head = 'mlp': .*'linear', 'none', 'simclr', .* or 'vicreg'"),
     ({"head_width": 9}, "model: head_width 9 is for hidden layers, but head 'linear' has none")],
)  # fmt: skip
def test_a_head_that_there_is_not_and_a_width_without_hidden_layers_are_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"model": model})


def test_isogclrs_presets_on_pictures_and_their_rivals_have_vicregs_projector():
    others = ("auc_cl", "decl", "moco_v3")  # of other papers
    configs = {name: load_config(read_preset(name)) for name in preset_names() if name.split("/")[0] not in others}
    models = {name: config.model for name, config in configs.items() if config.objective.mode == "unimodal"}
    assert len(models) == 24
    assert {(model.head, model.dim) for model in models.values()} == {("vicreg", 8192)}
