"""Encoders: pictures or tokens → features. Small built-ins, and `hf:` models built from a config without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..pipeline.batch import Batch
from ..pipeline.dataset import TokenizerInfo
from .config import EncoderConfig, ModelConfig
from .errors import ConfigError


class ConvEncoder(nn.Module):
    """Three strided convolutions and a linear layer: for small pictures, 32 pixels or so."""

    def __init__(self, dim: int, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(4 * width * 16, dim)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels float32 [b, 3, H, W] → [b, dim]."""
        features: Tensor = self.head(self.body(pixels))
        return features


class MeanEmbedding(nn.Module):
    """The mean of the token embeddings and a two-layer perceptron; word order does not count."""

    def __init__(self, dim: int, vocab_size: int, end_id: int, width: int = 128) -> None:
        super().__init__()
        self.end_id = end_id
        self.embedding = nn.Embedding(vocab_size, width)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int [b, L] → [b, dim]."""
        real = caption_mask(tokens, self.end_id).unsqueeze(-1)
        mean = (self.embedding(tokens) * real).sum(1) / real.sum(1).clamp(min=1)
        features: Tensor = self.head(mean)
        return features


def caption_mask(tokens: Tensor, end_id: int) -> Tensor:
    """Which tokens are a caption's, bool [b, L]: those up to its first closing token. Everything behind is padding.

    tokens: int [b, L]. Not told by a pad id: CLIP's tokenizer, for one, pads with the closing token itself.
    """
    is_end = tokens == end_id
    return (is_end.cumsum(1) - is_end.long()) == 0


IMAGE_ENCODERS: dict[str, Callable[..., nn.Module]] = {"conv": ConvEncoder}
TEXT_ENCODERS: dict[str, Callable[..., nn.Module]] = {"mean_embedding": MeanEmbedding}


def with_names(config: ModelConfig) -> ModelConfig:
    """The settings with `auto` replaced by the built-in encoder that it stands for."""
    named = {
        side: encoder.model_copy(update={"name": default}) if encoder.name == "auto" else encoder
        for side, encoder, default in (("image", config.image, "conv"), ("text", config.text, "mean_embedding"))
    }
    return config.model_copy(update=named)


def create_image_encoder(config: EncoderConfig, dim: int, image_size: int) -> nn.Module:
    """A module float32 [b, 3, H, W] → [b, dim]. Raises ConfigError for an unknown name or setting."""
    name = config.name
    if name.startswith("hf:"):
        from .hf_encoders import HFImageEncoder

        return HFImageEncoder(name.removeprefix("hf:"), config.config, dim, image_size)
    return _build(IMAGE_ENCODERS, "model.image", name, config.config, dim=dim)


def create_text_encoder(config: EncoderConfig, dim: int, tokenizer: TokenizerInfo) -> nn.Module:
    """A module int [b, L] → [b, dim]. Raises ConfigError for an unknown name or setting."""
    name = config.name
    if name.startswith("hf:"):
        from .hf_encoders import HFTextEncoder

        return HFTextEncoder(name.removeprefix("hf:"), config.config, dim, tokenizer)
    sizes = {"vocab_size": tokenizer.vocab_size, "end_id": tokenizer.end_id}
    return _build(TEXT_ENCODERS, "model.text", name, config.config, dim=dim, **sizes)


def _build(known: dict[str, Callable[..., nn.Module]], where: str, name: str, config: dict[str, Any],
           **sizes: int) -> nn.Module:  # fmt: skip
    if name not in known:
        raise ConfigError(
            f"{where}.name = {name!r}: there is no such encoder; there are: {', '.join(known)}, hf:<model>"
        )
    try:
        return known[name](**sizes, **config)
    except TypeError as error:
        raise ConfigError(f"{where}.config: {error}") from None


class Encoders(nn.Module):
    """Both encoders of a run: a batch in, the objective's two sets of unit-norm features out."""

    def __init__(self, image: nn.Module, text: nn.Module | None) -> None:
        super().__init__()
        self.image = image
        self.text = text

    @classmethod
    def create(cls, config: ModelConfig, mode: str, image_size: int, tokenizer: TokenizerInfo | None) -> Encoders:
        """Image and text encoder where the mode is bimodal, one image encoder for both views where it is unimodal."""
        image = create_image_encoder(config.image, config.dim, image_size)
        if mode == "unimodal":
            return cls(image, None)
        if tokenizer is None:
            raise ConfigError("objective.mode = 'bimodal' needs captions, but the dataset has pictures alone")
        return cls(image, create_text_encoder(config.text, config.dim, tokenizer))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """first, second: [b, d], rows of norm 1; image and text features, or the features of the two views."""
        if self.text is None:
            first, second = self.image(torch.cat(batch.views)).chunk(2)
        else:
            first, second = self.image(batch.views[0]), self.text(batch.tokens)
        return F.normalize(first, dim=-1), F.normalize(second, dim=-1)
