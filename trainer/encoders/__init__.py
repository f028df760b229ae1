"""Encoders: images or tokens → features. Small built-ins, and transformers models as `hf:`, without downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...pipeline.batch import Batch
from ...pipeline.dataset_index import TokenizerInfo
from ..config import ModelConfig
from ..errors import ConfigError
from .backbones import Backbone, conv, mean_embedding
from .projection_heads import HEADS

IMAGE_ENCODERS: dict[str, Callable[..., Backbone]] = {"conv": conv}
TEXT_ENCODERS: dict[str, Callable[..., Backbone]] = {"mean_embedding": mean_embedding}
HF = "hf:"


def with_names(config: ModelConfig) -> ModelConfig:
    """Return the settings with `auto` resolved, and with a local model's architecture added to its name.

    Raises ConfigError if a local directory holds no model for its side.
    """
    named = {}
    for side, encoder, default in (("image", config.image, "conv"), ("text", config.text, "mean_embedding")):
        named[side] = encoder.model_copy(update={"name": default}) if encoder.name == "auto" else encoder
        if is_directory(encoder.name):
            from .hf_directory import with_architecture

            named[side] = with_architecture(side, encoder)
    return config.model_copy(update=named)


def is_directory(name: str) -> bool:
    """Return whether an encoder's name is `hf:` and a path, rather than a model name of transformers."""
    return name.startswith(HF) and "/" in name


class Encoder(nn.Module):
    """A backbone followed by the projection head into the objective's space."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, inputs: Tensor) -> Tensor:
        """float32 [b, 3, H, W], or int [b, L], → [b, dim]."""
        features: Tensor = self.head(self.backbone(inputs))
        return features


def create_image_encoder(config: ModelConfig, image_size: int, *, pretrained: bool = True) -> Encoder:
    """Create an encoder float32 [b, 3, H, W] → [b, dim]. Raises ConfigError for an unknown name or setting.

    pretrained: load the weights of a local directory; else initialise them, for a checkpoint to replace.
    """
    name, own = config.image.name, config.image.config
    if name.startswith(HF):
        from .hf_encoders import HFImageBackbone

        backbone: Backbone = HFImageBackbone(
            name.removeprefix(HF), own, config.activation_checkpointing, image_size, pretrained
        )
    else:
        backbone = _built_in(IMAGE_ENCODERS, "model.image", name, own, recompute=config.activation_checkpointing)
    return _with_head(backbone, config)


def create_text_encoder(config: ModelConfig, tokenizer: TokenizerInfo, *, pretrained: bool = True) -> Encoder:
    """Create an encoder int [b, L] → [b, dim]. Raises, and pretrained, as create_image_encoder."""
    name, own = config.text.name, config.text.config
    if name.startswith(HF):
        from .hf_encoders import HFTextBackbone

        backbone: Backbone = HFTextBackbone(
            name.removeprefix(HF), own, config.activation_checkpointing, tokenizer, pretrained
        )
    else:
        sizes = {"vocab_size": tokenizer.vocab_size, "end_id": tokenizer.end_id}
        backbone = _built_in(TEXT_ENCODERS, "model.text", name, own, recompute=config.activation_checkpointing, **sizes)
    return _with_head(backbone, config)


def _with_head(backbone: Backbone, config: ModelConfig) -> Encoder:
    return Encoder(backbone, HEADS[config.head](backbone.width, config.dim, config.head_width or None))


def _built_in(known: dict[str, Callable[..., Backbone]], where: str, name: str, config: dict[str, Any],
              **given: int) -> Backbone:  # fmt: skip
    if name not in known:
        raise ConfigError(f"{where}.name = {name!r}: unknown encoder; available: {', '.join(known)}, hf:<model>")
    try:
        return known[name](**given, **config)
    except TypeError as error:
        raise ConfigError(f"{where}.config: {error}") from None


class Encoders(nn.Module):
    """Both encoders of a run; maps a batch to the objective's two sets of unit-norm features."""

    def __init__(self, image: Encoder, text: Encoder | None) -> None:
        super().__init__()
        self.image = image
        self.text = text

    @classmethod
    def create(
        cls, config: ModelConfig, mode: str, image_size: int, tokenizer: TokenizerInfo | None, *,
        pretrained: bool = True,
    ) -> Encoders:  # fmt: skip
        """Create an image and a text encoder if bimodal, one image encoder for both views if unimodal.

        pretrained: as create_image_encoder. If False, a local model's directory need not exist any more.
        Raises ConfigError if the settings do not give encoders that fit into memory.
        """
        if mode == "bimodal" and tokenizer is None:
            raise ConfigError("objective.mode = 'bimodal' needs captions, but the dataset has only images")
        try:
            image = create_image_encoder(config, image_size, pretrained=pretrained)
            if mode == "unimodal" or tokenizer is None:
                return cls(image, None)
            return cls(image, create_text_encoder(config, tokenizer, pretrained=pretrained))
        except (RuntimeError, OverflowError) as error:  # torch raises these for negative sizes and when out of memory
            reason = str(error).splitlines()[0][:200]
            raise ConfigError(f"the encoders cannot be created from the settings of `model`: {reason}") from error

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return first and second, [b, d] with rows of norm 1: image and text features, or those of the two views."""
        if self.text is None:
            first, second = self.image(torch.cat(batch.views)).chunk(2)
        else:
            first, second = self.image(batch.views[0]), self.text(batch.tokens)
        # Autocast returns half precision, in which no norm is exactly 1.
        return F.normalize(first.float(), dim=-1), F.normalize(second.float(), dim=-1)
