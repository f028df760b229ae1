"""No encoder and no optimiser reads from the device in a step: on a GPU the host would wait for it."""

import pytest
import torch

from thermopile.pipeline.batch import Batch
from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.config import ModelConfig, OptimizerConfig
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.objectives import create_objective
from thermopile.trainer.optim import create_optimizer

from support.waits import WaitError, no_waits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENIZER = TokenizerInfo(vocab_size=50, context_length=9, end_id=2)
SMALL = {
    "conv": {"width": 2},
    "hf:resnet-50": {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2]},
    "hf:vit-b": {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16},
    "mean_embedding": {"width": 4},
    "hf:distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
    "hf:clip-text": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16},
}
PAIRS = [("conv", "mean_embedding"), ("hf:resnet-50", "hf:distilbert"), ("hf:vit-b", "hf:clip-text")]


def create(image, text, **more):
    sides = {side: {"name": name, "config": SMALL[name]} for side, name in (("image", image), ("text", text))}
    config = ModelConfig.model_validate({"dim": 6, "head": "vicreg", "head_width": 5, **sides, **more})
    return Encoders.create(config, "bimodal", 32, TOKENIZER).train().to(DEVICE)


def batch():
    tokens = torch.randint(3, 50, (4, 9))
    tokens[:, 7] = 2
    return Batch(torch.arange(4), (torch.randn(4, 3, 32, 32),), tokens).to(DEVICE)


def backward(encoders, batch):
    first, second, *_ = encoders(batch)
    (first * second).sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("image", "text"), PAIRS)
def test_neither_pass_of_an_encoder_reads_from_the_device(image, text, recompute):
    encoders, inputs = create(image, text, activation_checkpointing=recompute), batch()
    backward(encoders, inputs)  # the first pass may set things up
    with no_waits(), torch.autocast(DEVICE.type, torch.bfloat16):
        backward(encoders, inputs)
    assert all(weights.grad.isfinite().all() for weights in encoders.parameters())


@pytest.mark.parametrize("name", ["adamw", "sgd", "lars", "lamb", "lion"])
def test_no_optimiser_reads_from_the_device(name):
    encoders = create(*PAIRS[0])
    objective = create_objective("fastclip_v3", "bimodal").to(DEVICE)  # with a temperature that has its own optimiser
    optimizer = create_optimizer(OptimizerConfig(name=name), encoders, objective, {})
    inputs = batch()
    for parameter in objective.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):  # the first step sets the state up
        backward(encoders, inputs)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    before = next(encoders.parameters()).clone()
    backward(encoders, inputs)
    states = () if optimizer.weights.defaults.get("fused") else optimizer.weights.state.values()
    with no_waits(on_host=[state["step"] for state in states if "step" in state]):
        optimizer.step()
    assert not torch.equal(next(encoders.parameters()), before)


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: bool((x > 0).all()),
                                  lambda x: x.nonzero(), lambda x: x.index_put_((x > 0,), x[0, 0])])  # fmt: skip
def test_what_reads_from_the_device_is_noticed(read):
    values = torch.ones(2, 2, device=DEVICE)
    with pytest.raises((WaitError, RuntimeError)), no_waits():
        read(values)
