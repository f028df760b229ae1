"""Locked encoders: what they keep, what they still train, and what is refused."""

import pytest
import torch
from torch import nn

from thermopile.pipeline.batch import Batch
from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.config import ModelConfig, OptimizerConfig, load_config
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.encoders.locking import lock_advice
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import create_optimizer

TOKENIZER = TokenizerInfo(vocab_size=50, context_length=9, end_id=2)
SMALL = {
    "conv": {"width": 2, "batch_norm": True},
    "hf:resnet-50": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2]},
    "hf:vit-b": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16},
    "mean_embedding": {"width": 4},
    "hf:distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
    "hf:clip-text": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16},
}
GROUPS = {"conv": 3, "hf:resnet-50": 3, "hf:vit-b": 4, "mean_embedding": 2, "hf:distilbert": 3, "hf:clip-text": 4}
"""Name → groups without the head."""
TEXTS = ("mean_embedding", "hf:distilbert", "hf:clip-text")


def create(image="conv", text="mean_embedding", mode="bimodal", of_image=None, of_text=None, **more):
    torch.manual_seed(0)
    sides = {"image": {"name": image, "config": SMALL[image], **(of_image or {})},
             "text": {"name": text, "config": SMALL[text], **(of_text or {})}}  # fmt: skip
    config = ModelConfig.model_validate({"dim": 6, "head": "simclr_bn", **sides, **more})
    return Encoders.create(config, mode, 32, TOKENIZER if mode == "bimodal" else None)


def with_one_of(name, **settings):
    """Encoders of pairs of which one has this name and these settings, and that one."""
    made = create(text=name, of_text=settings) if name in TEXTS else create(image=name, of_image=settings)
    return made, made.text if name in TEXTS else made.image


def batch(views=1):
    torch.manual_seed(1)
    tokens = torch.randint(3, 50, (4, 9))
    tokens[:, 7] = 2
    return Batch(torch.arange(4), tuple(torch.randn(4, 3, 32, 32) for _ in range(views)), tokens)


def is_training(group):
    """Whether any layer is in training mode; what only holds layers may be made by `groups` itself."""
    return any(module.training for module in group.modules() if not any(module.children()))


def take_steps(encoders, inputs, steps=2):
    optimizer = create_optimizer(OptimizerConfig(weight_decay=0.3), encoders, create_objective("isogclr"), {})
    optimizer.set_learning_rate(0.1)
    for _ in range(steps):
        features = encoders(inputs)
        (features.first * features.second.flip(0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("name", GROUPS)
def test_each_weight_and_buffer_of_a_backbone_is_in_one_group(name):
    backbone = with_one_of(name)[1].backbone
    groups = backbone.groups()
    assert len(groups) == GROUPS[name]
    held = [id(each) for group in groups for each in (*group.parameters(), *group.buffers())]
    assert sorted(held) == sorted(id(each) for each in (*backbone.parameters(), *backbone.buffers()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_locked_groups_keep_weights_and_statistics_and_the_others_learn(name, recompute):
    made = create(
        **{"text" if name in TEXTS else "image": name, "of_text" if name in TEXTS else "of_image":
           {"locked": True, "unlocked_groups": 2}}, activation_checkpointing=recompute,
    )  # fmt: skip
    encoder = made.text if name in TEXTS else made.image
    before = [{key: value.clone() for key, value in group.state_dict().items()} for group in encoder.groups()]
    optimizer = take_steps(made, batch())
    *locked, last, head = encoder.groups()
    for group, old in zip(locked, before, strict=False):
        torch.testing.assert_close(dict(group.state_dict()), old, rtol=0, atol=0)
        assert not is_training(group)
    for group, old in ((last, before[-2]), (head, before[-1])):
        assert any(not torch.equal(value, old[key]) for key, value in group.state_dict().items())
    held = {id(weight) for each in optimizer.weights.param_groups for weight in each["params"]}
    assert not held & {id(weight) for group in locked for weight in group.parameters()}


@pytest.mark.parametrize("name", GROUPS)
def test_no_graph_is_built_for_locked_groups(name):
    made, encoder = with_one_of(name, locked=True, unlocked_groups=1)
    seen = []
    encoder.backbone.register_forward_hook(lambda module, inputs, output: seen.append(output))
    made(batch())
    assert [(output.requires_grad, output.grad_fn) for output in seen] == [(False, None)]


def test_an_encoder_locked_whole_has_no_gradient_and_the_other_one_learns():
    made = create(of_image={"locked": True})
    before = {key: value.clone() for key, value in made.state_dict().items()}
    features = made(batch())
    assert (features.first.requires_grad, features.second.requires_grad) == (False, True)
    take_steps(made, batch())
    after = made.state_dict()
    changed = {key.partition(".")[0] for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {"text"}


def test_switching_to_training_mode_leaves_what_is_locked_in_evaluation_mode():
    made = create(of_image={"locked": True, "unlocked_groups": 1}).eval().train()
    assert [is_training(group) for group in made.image.groups()] == [False, False, False, True]
    assert made.text.training


def test_the_momentum_network_of_a_locked_encoder_keeps_what_is_locked_too():
    made = create(mode="unimodal", of_image={"locked": True, "unlocked_groups": 1}, momentum=0.9)
    before = {key: value.clone() for key, value in made.momentum.state_dict().items()}
    take_steps(made, batch(views=2))
    made.move_momentum(0.7)
    changed = {key for key, value in made.momentum.state_dict().items() if not torch.equal(value, before[key])}
    assert changed
    assert all(key.startswith("head.") for key in changed)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"of_image": {"locked": True, "unlocked_groups": 5}},
      r"model\.image\.unlocked_groups = 5: the encoder has 4 groups, the head included; set at most 4$"),
     ({"mode": "unimodal", "of_text": {"locked": True}}, "a run on images has no text encoder; remove"),
     ({"mode": "unimodal", "of_image": {"locked": True}}, r"^model\.image\.locked = true locks all weights.*set unl"),
     ({"of_image": {"locked": True}, "of_text": {"locked": True}}, "model.image.locked and model.text.locked = true")],
)  # fmt: skip
def test_what_cannot_be_locked_is_refused_in_one_line_with_the_cure(settings, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        create(**settings)
    assert "\n" not in str(refusal.value)


def test_groups_to_unlock_where_nothing_is_locked_are_refused():
    with pytest.raises(ConfigError, match=r"model\.image: unlocked_groups 1 needs locked = true; set that"):
        load_config({"model": {"image": {"unlocked_groups": 1}}})


def test_a_predictor_may_be_trained_behind_a_locked_encoder():
    made = create(mode="unimodal", of_image={"locked": True}, momentum=0.9, predictor="moco_v3")
    assert {name.partition(".")[0] for name, weight in made.named_parameters() if weight.requires_grad} == {"predictor"}


def advice(name, init=None, **settings):
    image = {"name": name, "locked": True, **settings}
    tree = {"init": init or {}, "model": {"image": image}}
    return lock_advice(load_config(tree | {"objective": {"mode": "bimodal"}}))


def test_weights_that_nothing_has_trained_are_warned_of_where_they_are_locked():
    (of_encoder,) = advice("hf:vit-b", unlocked_groups=1)
    assert of_encoder.startswith("model.image.locked keeps an encoder at random weights")
    (of_head,) = advice("hf:/models/vit")
    assert "projection head at random weights; train it with model.image.unlocked_groups = 1" in of_head
    assert advice("hf:/models/vit", unlocked_groups=1) == []
    assert advice("conv", {"run": "/runs/a@step-3"}) == []
    assert advice("conv", {"run": "/runs/a@step-3", "sides": "image"}) == []
    assert advice("conv", {"run": "/runs/a@step-3", "sides": "text"}) == [of_encoder]


def test_a_locked_batch_norm_gives_in_training_what_it_gives_in_evaluation():
    made = create(of_image={"locked": True, "unlocked_groups": 1}, head="linear")
    norm = next(module for module in made.image.modules() if isinstance(module, nn.BatchNorm2d))
    norm.running_mean.fill_(0.5)
    in_training = made(batch()).first
    torch.testing.assert_close(in_training, made.eval()(batch()).first, rtol=0, atol=0)
