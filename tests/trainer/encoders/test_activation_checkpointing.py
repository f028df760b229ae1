"""Activation checkpointing: less is kept, and nothing is changed, bit for bit, batch norms' statistics included."""

import pytest
import torch
from torch.nn import functional as F

from thermopile.pipeline.batch import Batch
from thermopile.pipeline.dataset.index import TokenizerInfo
from thermopile.trainer.config import EncoderConfig, ModelConfig
from thermopile.trainer.encoders import Encoders, create_encoder, synced_batch_norm

TOKENIZER = TokenizerInfo(vocab_size=50, context_length=9, end_id=2)
RESNET = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 2]}
VIT = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16}
BERT = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16}
CLIP = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
ENCODERS = {
    "built-ins": (("conv", {"width": 2}), ("mean_embedding", {"width": 4})),
    "ResNet and DistilBERT": (("hf:resnet-18", RESNET), ("hf:distilbert", BERT)),  # with dropout
    "ResNet with CIFAR stem": (("hf:resnet-50", RESNET | {"stem": "cifar"}), ("mean_embedding", {"width": 4})),
    "ViT and CLIP": (("hf:vit-s", VIT), ("hf:clip-text", CLIP)),
}


def a_step(image, text, recompute):
    """Loss, gradients and buffers after one forward and backward pass from the same weights and random numbers."""
    torch.manual_seed(0)
    (image, image_config), (text, text_config) = image, text
    config = ModelConfig(
        dim=6,
        head="vicreg",
        head_width=5,
        activation_checkpointing=recompute,
        image=EncoderConfig(name=image, config=image_config),
        text=EncoderConfig(name=text, config=text_config),
    )
    encoders = Encoders.create(config, "bimodal", 32, TOKENIZER).train()
    tokens = torch.randint(3, 50, (4, 9))
    tokens[:, 7] = 2
    first, second, *_ = encoders(Batch(torch.arange(4), (torch.randn(4, 3, 32, 32),), tokens))
    loss = -(first @ second.T).log_softmax(1).diagonal().mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in encoders.named_parameters()}
    return {"loss": loss.detach()} | gradients | dict(encoders.named_buffers())


@pytest.mark.parametrize("names", ENCODERS)
def test_loss_gradients_and_statistics_are_the_same_bit_for_bit(names):
    kept, recomputed = (a_step(*ENCODERS[names], recompute) for recompute in (False, True))
    assert kept.keys() == recomputed.keys()
    for name, value in kept.items():
        assert torch.equal(recomputed[name], value), name


@pytest.mark.parametrize(("name", "config"), [("conv", {}), ("hf:resnet-18", RESNET), ("hf:vit-s", VIT)])
def test_less_is_kept_for_backprop(name, config):
    pictures = torch.randn(8, 3, 32, 32)

    def kept(recompute):
        image = EncoderConfig(name=name, config=config)
        encoder = create_encoder("image", ModelConfig(activation_checkpointing=recompute, image=image), 32)
        weights = {parameter.data_ptr() for parameter in encoder.parameters()}
        saved = {}

        def note(tensor):
            if tensor.data_ptr() not in weights:
                saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = encoder.train()(pictures)
        del outputs
        return sum(saved.values())

    assert kept(True) < 0.8 * kept(False)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's tracer
def test_norms_over_all_ranks_count_a_batch_once_also_in_compiled_encoders(monkeypatch):
    def normalised(inputs, weight, bias, mean, var, momentum, eps):
        return F.batch_norm(inputs, mean, var, weight, bias, True, momentum, eps)

    monkeypatch.setattr(synced_batch_norm._Normalised, "apply", normalised)  # torch's kernels are for GPUs only
    image = EncoderConfig(name="hf:resnet-18", config=RESNET)
    encoder = create_encoder("image", ModelConfig(activation_checkpointing=True, image=image), 32).train()
    synced_batch_norm.synchronise_batch_norms(encoder)
    encoder.compile(backend="aot_eager")
    for _ in range(3):
        encoder(torch.randn(4, 3, 32, 32)).sum().backward()
    counts = {int(value) for name, value in encoder.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts == {3}
