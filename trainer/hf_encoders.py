"""Encoders of Hugging Face transformers, with fresh weights from a config: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from ..pipeline.dataset import TokenizerInfo
from .encoders import caption_mask
from .errors import ConfigError

_BASIC = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
IMAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet-18": ("resnet", _BASIC),
    "resnet-50": ("resnet", {}),
    "vit-s": ("vit", {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}),
    "vit-b": ("vit", {}),
}
TEXT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": ("distilbert", {}),
    "clip-text": ("clip_text_model", {"num_hidden_layers": 12}),
}
"""Name → transformers' model type, and what differs from its defaults."""


class HFImageEncoder(nn.Module):
    """A vision model's pooled output and a linear layer."""

    def __init__(self, name: str, overrides: dict[str, Any], dim: int, image_size: int) -> None:
        super().__init__()
        sizes = {"image_size": image_size} if name.startswith("vit") else {}
        self.body = _build("model.image", IMAGE_MODELS, name, sizes | overrides)
        config: Any = self.body.config
        width = config.hidden_sizes[-1] if name.startswith("resnet") else config.hidden_size
        self.head = nn.Linear(width, dim)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels float32 [b, 3, H, W] → [b, dim]."""
        features: Tensor = self.head(self.body(pixel_values=pixels).pooler_output.flatten(1))
        return features


class HFTextEncoder(nn.Module):
    """A text model's output at one token and a linear layer."""

    def __init__(self, name: str, overrides: dict[str, Any], dim: int, tokenizer: TokenizerInfo) -> None:
        super().__init__()
        sizes = {
            "vocab_size": tokenizer.vocab_size,
            "max_position_embeddings": tokenizer.context_length,
            # No id is padding by itself: the attention mask says where padding is.
            "pad_token_id": None,
            "eos_token_id": tokenizer.end_id,
        }
        self.body = _build("model.text", TEXT_MODELS, name, sizes | overrides)
        self.end_id = tokenizer.end_id
        # A causal tower has seen the whole caption only at its end; the others read it all at its start.
        self.reads_at_end = name == "clip-text"
        config: Any = self.body.config
        self.head = nn.Linear(config.hidden_size, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int [b, L] → [b, dim]."""
        tokens = tokens.long()
        real = caption_mask(tokens, self.end_id).long()
        states = self.body(input_ids=tokens, attention_mask=real).last_hidden_state
        place = real.sum(1) - 1 if self.reads_at_end else 0
        pooled = states[torch.arange(len(tokens), device=tokens.device), place]
        features: Tensor = self.head(pooled)
        return features


def _build(where: str, known: dict[str, tuple[str, dict[str, Any]]], name: str, overrides: dict[str, Any]) -> nn.Module:
    if name not in known:
        raise ConfigError(f"{where}.name = 'hf:{name}': not known; there are: {', '.join(f'hf:{n}' for n in known)}")
    model_type, defaults = known[name]
    published = AutoConfig.for_model(model_type, **defaults)
    for key in overrides:
        if not hasattr(published, key):
            raise ConfigError(f"{where}.config.{key}: transformers' {type(published).__name__} has no such setting")
    config = AutoConfig.for_model(model_type, **(defaults | overrides))
    model: nn.Module = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    return model
