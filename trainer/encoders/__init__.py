"""Encoders: images or tokens → features. Small built-ins, and transformers models as `hf:`, without downloads."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...pipeline.batch import Batch
from ...pipeline.dataset_index import TokenizerInfo
from ..config import ModelConfig
from ..errors import ConfigError
from .backbones import Backbone, conv, mean_embedding
from .projection_heads import HEADS

BUILT_IN: dict[str, dict[str, Callable[..., Backbone]]] = {
    "image": {"conv": conv},
    "text": {"mean_embedding": mean_embedding},
}
HF = "hf:"


def with_names(config: ModelConfig) -> ModelConfig:
    """Return the settings with `auto` resolved, and with a local model's architecture added to its name.

    Raises ConfigError if a local directory holds no model for its side.
    """
    named = {}
    for side, encoder in (("image", config.image), ("text", config.text)):
        first = next(iter(BUILT_IN[side]))
        named[side] = encoder.model_copy(update={"name": first}) if encoder.name == "auto" else encoder
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


def create_encoder(side: str, config: ModelConfig, given: int | TokenizerInfo, *, pretrained: bool = True) -> Encoder:
    """Create an image encoder float32 [b, 3, H, W] → [b, dim], or a text encoder int [b, L] → [b, dim].

    given: the side length of an image in pixels, or the tokenizer. pretrained: load the weights of a local directory;
    else initialise them, for a checkpoint to replace. Raises ConfigError for an unknown name or setting.
    """
    encoder, recompute = getattr(config, side), config.activation_checkpointing
    if encoder.name.startswith(HF):
        from .hf_encoders import HF_BACKBONES

        backbone: Backbone = HF_BACKBONES[side](encoder.name[len(HF) :], encoder.config, recompute, given, pretrained)
    elif encoder.name in (known := BUILT_IN[side]):
        sizes = {} if isinstance(given, int) else {"vocab_size": given.vocab_size, "end_id": given.end_id}
        try:
            backbone = known[encoder.name](recompute=recompute, **sizes, **encoder.config)
        except TypeError as error:
            raise ConfigError(f"model.{side}.config: {error}") from None
    else:
        raise ConfigError(
            f"model.{side}.name = {encoder.name!r}: unknown encoder; available: {', '.join(known)}, hf:<model>"
        )
    return Encoder(backbone, HEADS[config.head](backbone.width, config.dim, config.head_width or None))


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
    ) -> Self:  # fmt: skip
        """Create an image and a text encoder if bimodal, one image encoder for both views if unimodal.

        pretrained: as create_encoder. If False, a local model's directory need not exist any more.
        Raises ConfigError if the settings do not give encoders that fit into memory.
        """
        if mode == "bimodal" and tokenizer is None:
            raise ConfigError("objective.mode = 'bimodal' needs captions, but the dataset has only images")
        try:
            image = create_encoder("image", config, image_size, pretrained=pretrained)
            if mode == "unimodal" or tokenizer is None:
                return cls(image, None)
            return cls(image, create_encoder("text", config, tokenizer, pretrained=pretrained))
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
