"""The momentum network: a moving average of the image encoder that gives the keys."""

import math

import pytest
import torch
from torch.nn import functional as F

from thermopile.pipeline.batch import Batch
from thermopile.trainer.config import EncoderConfig, ModelConfig, load_config
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import create_optimizer, momentum_at

MODEL = ModelConfig(
    dim=5, head="moco_v3", head_width=6, momentum=0.9, predictor="moco_v3",
    image=EncoderConfig(name="conv", config={"width": 2, "batch_norm": True}),
)  # fmt: skip


def make(seed=0, **changed):
    torch.manual_seed(seed)
    return Encoders.create(MODEL.model_copy(update=changed), "unimodal", 16, None)


def views(count=2, side=16):
    return tuple(torch.randn(4, 3, side, side) for _ in range(count))


def weights(module):
    return torch.cat([value.flatten() for value in module.parameters()])


def test_it_starts_as_the_encoder_and_moves_towards_it_by_a_share():
    encoders = make()
    start = weights(encoders.momentum).clone()
    assert torch.equal(start, weights(encoders.image))
    with torch.no_grad():
        for weight in encoders.image.parameters():
            weight.add_(torch.randn_like(weight))
    encoders.move_momentum(0.75)
    torch.testing.assert_close(weights(encoders.momentum), 0.75 * start + 0.25 * weights(encoders.image))


def test_keys_are_unit_rows_of_the_moving_average_without_predictor_or_gradient():
    encoders, of_views = make(), views()
    reference = make(seed=1)
    encoders.momentum.load_state_dict(reference.image.state_dict())
    features = encoders(Batch(torch.arange(4), of_views))
    expected = F.normalize(reference.image(torch.cat(of_views)), dim=1).chunk(2)
    torch.testing.assert_close(features.keys, expected)
    assert not any(keys.requires_grad for keys in features.keys)


def test_queries_pass_the_predictor():
    with_one, without = make(), make(predictor="none")
    of_views = views()
    raw = without.image(torch.cat(of_views))
    expected = F.normalize(with_one.predictor(raw), dim=1).chunk(2)
    features = with_one(Batch(torch.arange(4), of_views))
    torch.testing.assert_close((features.first, features.second), expected)


def test_local_views_pass_the_trained_network_only_at_their_own_size():
    encoders, local = make(), views(3, side=8)
    features = encoders(Batch(torch.arange(4), views(), local=local))
    again = make()
    expected = F.normalize(again.predictor(again.image(torch.cat(local))), dim=1).chunk(3)
    torch.testing.assert_close(features.local, expected)
    assert all(feature.requires_grad for feature in features.local)
    assert int(encoders.momentum.backbone.body[1].num_batches_tracked) == 1  # of the global views


def test_features_are_as_they_are_where_the_objective_wants_them_raw():
    torch.manual_seed(0)
    raw = Encoders.create(MODEL, "unimodal", 16, None, unit_norm=False)
    of_views = views()
    features = raw(Batch(torch.arange(4), of_views))
    again = make()
    torch.testing.assert_close(torch.cat(features[:2]), again.predictor(again.image(torch.cat(of_views))))


def test_batch_norms_of_the_moving_average_have_statistics_of_their_own():
    encoders = make()
    with torch.no_grad():
        encoders.image.backbone.body[0].weight.mul_(3)
    encoders(Batch(torch.arange(4), views()))
    ours, averages = (network.backbone.body[1].running_var for network in (encoders.momentum, encoders.image))
    assert not torch.allclose(ours, averages)
    before = ours.clone()
    encoders.move_momentum(0.5)
    assert torch.equal(ours, before)


def test_the_optimiser_leaves_the_moving_average_alone():
    encoders = make()
    config = load_config({"optimizer": {"lr": 0.1}}).optimizer
    optimizer = create_optimizer(config, encoders, create_objective("simclr", "unimodal"), {})
    before = weights(encoders.momentum).clone()
    features = encoders(Batch(torch.arange(4), views()))
    (features.first * features.second.detach().flip(0)).sum().backward()
    optimizer.set_learning_rate(0.1)
    optimizer.step()
    assert torch.equal(weights(encoders.momentum), before)
    assert not torch.equal(weights(encoders.image), before)


def test_the_weight_of_the_old_values_rises_from_its_start_to_one_by_a_cosine():
    assert momentum_at(0.9, 0, 100) == pytest.approx(0.9)
    assert momentum_at(0.9, 100, 100) == 1.0
    assert momentum_at(0.9, 25, 100) == pytest.approx(1 - 0.1 * (1 + math.sqrt(0.5)) / 2)


def test_a_predictor_without_a_momentum_network_is_refused():
    with pytest.raises(ConfigError, match="momentum is 0; set momentum"):
        load_config({"model": {"predictor": "moco_v3"}})
