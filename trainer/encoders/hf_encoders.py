"""Encoders from Hugging Face transformers: untrained by name, or from a local directory. Nothing is downloaded."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from ...pipeline.dataset_index import TokenizerInfo
from ..errors import ConfigError
from .backbones import Backbone, caption_mask, run_blocks
from .hf_directory import MODEL_TYPE, MODEL_TYPES, load_model

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
"""Name → transformers' model type, and settings that differ from its defaults."""
STEMS = ("imagenet", "cifar")


class HFImageBackbone(Backbone):
    """A vision model's pooled output. `own`: settings of its config; for a ResNet `stem`, for a ViT `fixed_patches`."""

    def __init__(self, name: str, own: dict[str, Any], recompute: bool, image_size: int, pretrained: bool) -> None:
        where, model_type, defaults = _kind("image", IMAGE_MODELS, name, own)
        is_resnet = model_type == "resnet"
        stem = own.get("stem", STEMS[0]) if is_resnet else None
        extra = "stem" if is_resnet else "fixed_patches"
        settings = {key: value for key, value in own.items() if key != extra}
        if not is_resnet and not _is_directory(name):
            settings = {"image_size": image_size} | settings
        config = _config(where, model_type, defaults, settings)
        if not is_resnet and config.image_size != image_size:
            raise ConfigError(
                f"{where} expects images of {config.image_size} pixels, but data.image_size = "
                f"{image_size}; set data.image_size={config.image_size}"
            )
        super().__init__(config.hidden_sizes[-1] if is_resnet else config.pooler_output_size)
        self.model = _model(where, name, config, pretrained)
        self.image_size = None if is_resnet else image_size
        if stem not in (None, *STEMS):
            raise ConfigError(f"model.image.config.stem = {stem!r}; available: {', '.join(STEMS)}")
        if stem == "cifar":
            _put_cifar_stem(self.model)
        if not is_resnet and _is_true(own, "fixed_patches"):
            _fix_patches(self.model, drawn=not _is_directory(name))
        self.recomputes_resnet = recompute and is_resnet
        if recompute and not is_resnet:
            _recompute(self.model)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels float32 [b, 3, H, W] → [b, width]."""
        if self.recomputes_resnet:
            return self._resnet_recomputed(pixels)
        # Local views are smaller than the size for which a ViT's positions are made.
        positions = {} if self.image_size in (None, pixels.shape[-1]) else {"interpolate_pos_encoding": True}
        pooled: Tensor = self.model(pixel_values=pixels, **positions).pooler_output.flatten(1)
        return pooled

    def groups(self) -> list[nn.Module]:
        """Return a ResNet's embedder and stages; a ViT's embeddings, blocks, and final norm with pooler."""
        model: Any = self.model
        if self.image_size is None:
            return [model.embedder, *model.encoder.stages]
        return [model.embeddings, *model.layers, nn.ModuleList([model.layernorm, model.pooler])]

    def check_side(self, pixels: int) -> None:
        model: Any = self.model
        patch = 1 if self.image_size is None else model.config.patch_size
        if pixels % patch:
            raise ConfigError(
                f"model.image.name has patches of {patch} pixels, of which data.local_size = {pixels} is no multiple"
            )

    def _resnet_recomputed(self, pixels: Tensor) -> Tensor:
        """Run the model's own forward layer by layer; transformers has no activation checkpointing for ResNet."""
        model: Any = self.model
        layers = [layer for stage in model.encoder.stages for layer in stage.layers]
        pooled: Tensor = model.pooler(run_blocks([model.embedder, *layers], pixels, recompute=True)).flatten(1)
        return pooled


def _put_cifar_stem(model: Any) -> None:
    """Use a 3×3 convolution of stride 1 without max-pool, for images of 32 pixels: SimCLR, appendix B.9; AUC-CL."""
    old = model.embedder.embedder.convolution
    new = nn.Conv2d(old.in_channels, old.out_channels, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")  # as transformers initialises the others
    model.embedder.embedder.convolution = new
    model.embedder.pooler = nn.Identity()


def _is_true(own: dict[str, Any], key: str) -> bool:
    value = own.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"model.image.config.{key} = {value!r}; use true or false")
    return value


def _fix_patches(model: Any, *, drawn: bool) -> None:
    """Exclude a ViT's patch projection from training, for stability: MoCo v3, section 4.2. drawn: random weights."""
    projection = model.embeddings.patch_embeddings.projection
    if drawn:  # as MoCo v3's code; transformers' own weights would make its outputs half as large
        inputs, outputs = projection.weight[0].numel(), len(projection.weight)
        bound = math.sqrt(6 / (inputs + outputs))
        nn.init.uniform_(projection.weight, -bound, bound)
        nn.init.zeros_(projection.bias)
    projection.requires_grad_(False)


class HFTextBackbone(Backbone):
    """A text model's output at one token."""

    def __init__(
        self, name: str, own: dict[str, Any], recompute: bool, tokenizer: TokenizerInfo, pretrained: bool
    ) -> None:
        where, model_type, defaults = _kind("text", TEXT_MODELS, name, own)
        # No token id alone means padding: the attention mask marks it.
        settings: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": tokenizer.end_id}
        if not _is_directory(name):
            settings |= {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": tokenizer.context_length}
        config = _config(where, model_type, defaults, settings | own)
        if config.vocab_size < tokenizer.vocab_size or config.max_position_embeddings < tokenizer.context_length:
            raise ConfigError(
                f"{where} has {config.vocab_size:,} tokens and a context of "
                f"{config.max_position_embeddings}, but the dataset has {tokenizer.vocab_size:,} and "
                f"captions of {tokenizer.context_length}: convert it with the model's own tokenizer "
                "(--tokenizer) and a --context-length within the model's"
            )
        super().__init__(config.hidden_size)
        self.model = _model(where, name, config, pretrained)
        self.end_id = tokenizer.end_id
        # A causal model has read the whole caption only at its end; the others read it all at the first token.
        self.reads_at_end = model_type == "clip_text_model"
        if recompute:
            _recompute(self.model)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int [b, L] → [b, width]."""
        tokens = tokens.long()
        real = caption_mask(tokens, self.end_id)
        # transformers uses a mask [b, 1, L, L] unchanged; to check whether a mask [b, L] hides any token, it would read
        # from the device in every step. A causal model needs no mask: padding follows the token that is read.
        mask = None if self.reads_at_end else real[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        states = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        place = real.sum(1) - 1 if self.reads_at_end else 0
        pooled: Tensor = states[torch.arange(len(tokens), device=tokens.device), place]
        return pooled

    def groups(self) -> list[nn.Module]:
        """Return the embeddings, the blocks and, if there is one, the final norm."""
        model: Any = self.model
        if self.reads_at_end:
            return [model.embeddings, *model.encoder.layers, model.final_layer_norm]
        return [model.embeddings, *model.transformer.layer]


HF_BACKBONES: dict[str, Callable[..., Backbone]] = {"image": HFImageBackbone, "text": HFTextBackbone}


def _is_directory(name: str) -> bool:
    return "/" in name


def _kind(
    side: str, known: dict[str, tuple[str, dict[str, Any]]], name: str, own: dict[str, Any]
) -> tuple[str, str, dict[str, Any]]:
    """Return the model's name for errors, its type, and its differences from the type's default."""
    where = f"model.{side}.name = 'hf:{name}'"
    if _is_directory(name):
        if (model_type := own.get(MODEL_TYPE)) not in MODEL_TYPES[side]:  # other types may fetch models or code
            raise ConfigError(
                f"{where}: model.{side}.config.{MODEL_TYPE} = {model_type!r}; available: {', '.join(MODEL_TYPES[side])}"
            )
        return where, str(model_type), {}
    if name not in known:
        raise ConfigError(
            f"{where}: unknown model; available: {', '.join(f'hf:{n}' for n in known)}, or a local "
            "directory, as hf:/path/to/model or hf:./model"
        )
    return where, *known[name]


def _config(where: str, model_type: str, defaults: dict[str, Any], settings: dict[str, Any]) -> Any:
    published = AutoConfig.for_model(model_type)
    own = {key: value for key, value in settings.items() if key != MODEL_TYPE}
    for key in own:
        # Keys with an underscore are internal to transformers; _attn_implementation can fetch code and run it.
        if key.startswith("_") or not hasattr(published, key):
            kind = type(published).__name__
            raise ConfigError(f"{where.split('.name')[0]}.config.{key}: transformers' {kind} has no such setting")
    try:
        return AutoConfig.for_model(model_type, **(defaults | own))
    except Exception as error:  # transformers has no common class for invalid settings
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error


def _model(where: str, name: str, config: Any, pretrained: bool) -> nn.Module:
    if _is_directory(name) and pretrained:
        return load_model(where, Path(name), config)
    model: nn.Module = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    return model


def _recompute(model: Any) -> None:
    # transformers before 5.23 has only the older name, and later versions warn about it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
