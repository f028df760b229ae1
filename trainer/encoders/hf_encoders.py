"""Encoders from Hugging Face transformers: untrained by name, or any model of a local directory."""

import copy
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig

from ...pipeline.dataset.index import TokenizerInfo
from ..errors import ConfigError, refusing
from ..plugins import HF
from .backbones import Backbone, caption_mask, recompute_alone, refuse_absurd, refuse_too_large
from .hf_directory import MODEL_TYPE, PROJECTION, built, folder_of, load_model, model_class, refuse_type, stored_tensor

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
_MASKS = {"bert": 4, "distilbert": 4, "roberta": 4, "xlm-roberta": 4, "clip_text_model": 0, "siglip_text_model": 0}
"""Type → 4 for an attention mask [b, 1, L, L], which other models may misread, or 0 for none; the others take [b, L].

SigLIP reads padding, as it was trained; with CLIP it follows the token that is read.
"""
STEMS = ("imagenet", "cifar")
_INTERPOLATE = "interpolate_pos_encoding"


class HFBackbone(Backbone):
    """A model of transformers, whose width, unused weights and groups of layers are found in the model itself."""

    output = "`pooler_output`"
    """What the features are of the model's outputs, as Python."""
    reads_mask = False
    """Whether the model looks at the values of its attention mask, which a tensor without values does not have."""

    def __init__(self, where: str, name: str, own: dict[str, Any], config: Any, pretrained: bool) -> None:
        """where: the setting that names the model, for messages. own: its settings. config: transformers'."""
        super().__init__(0)
        self._where, self._own = where, own
        self._is_trained = "/" in name and bool(own.get("pretrained", True))
        self._folder = folder_of(HF + name) if self._is_trained and pretrained else None
        clashes = AssertionError, ZeroDivisionError, LookupError, TypeError, ValueError  # of settings
        with refusing(where, *clashes):
            made = model_class(config.model_type)
            refuse_too_large(lambda: made(copy.deepcopy(config)))
            self.model: nn.Module = load_model(where, self._folder, config) if self._folder else made(config)

    def features(self, model: Any, inputs: Tensor) -> Tensor:
        """Return the features of images or tokens, [b, width]."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """float32 [b, 3, H, W], or int [b, L], → [b, width]."""
        return self.features(self.model, inputs)

    def probe(self, *shape: int, dtype: torch.dtype) -> None:
        """Find the width by a pass without values; weights on which the features do not depend are not trained."""
        model: Any = self.model
        with refusing(f"{self._where} gives no features of inputs {[*shape]}"):
            with torch.device("meta"):
                tried: Any = model_class(model.config.model_type)(copy.deepcopy(model.config)).eval()
            # With fakes transformers does not look at a mask; without them the pass takes a third of the time.
            with torch.device("meta"), FakeTensorMode(allow_non_fake_inputs=True) if self.reads_mask else nullcontext():
                features = self.features(tried, torch.zeros(shape, dtype=dtype))
                weights = dict(tried.named_parameters())
                gradients = torch.autograd.grad(features.sum(), [*weights.values()], allow_unused=True)
                self.width = features.shape[1]
                for weight, gradient in zip(weights, gradients, strict=True):
                    model.get_parameter(weight).requires_grad &= gradient is not None

    def groups(self) -> list[nn.Module]:
        """Return what comes before the blocks, as one group, the blocks or stages, and what comes after them.

        The blocks are the list of layers that holds the most weights. A model without one is one group.
        """
        before, blocks, after = _around_blocks(self.model)
        listed = [nn.ModuleList(before), *blocks, nn.ModuleList(after)]
        grouped = [id(each) for group in listed for each in (*group.parameters(), *group.buffers())]
        if sorted(grouped) != sorted(id(each) for each in (*self.model.parameters(), *self.model.buffers())):
            return [self.model]
        return [group for group in listed if [*group.parameters(), *group.buffers()]]

    def recompute(self) -> None:
        """Recompute the activations of what comes before the blocks, and of each of their layers, in backprop."""
        before, blocks, _ = _around_blocks(self.model)
        for block in (*before, *blocks):
            lists = [
                layers
                for name, layers in block.named_children()
                if isinstance(layers, nn.ModuleList) or (name == "layers" and isinstance(layers, nn.Sequential))
            ]
            for layer in [layer for layers in lists for layer in layers] or [block]:
                recompute_alone(layer)

    def projection(self, dim: int) -> nn.Module | None:
        """Return the head of a tower of a whole CLIP or SigLIP into its space, None for another number of dimensions.

        CLIP's is a matrix. SigLIP's towers end in the space.
        """
        if self._own.get(PROJECTION) != dim:
            return None
        if self._own[MODEL_TYPE].startswith("siglip"):
            return nn.Identity()
        head = nn.Linear(self.width, dim, bias=False)
        if self._folder:
            name = "visual_projection.weight" if isinstance(self, HFImageBackbone) else "text_projection.weight"
            head.load_state_dict({"weight": stored_tensor(self._where, self._folder, name)})
        return head


def _around_blocks(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Return the modules before the list of layers that holds the most weights, its layers, and those after it."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    if not lists:
        return [model], [], []
    blocks = max(lists, key=lambda each: sum(weight.numel() for weight in each.parameters()))
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    parent = model
    while parent is not blocks:
        children = [*parent.children()]
        place = next(i for i, child in enumerate(children) if any(each is blocks for each in child.modules()))
        before, parent, after = [*before, *children[:place]], children[place], [*children[place + 1 :], *after]
    return before, [*blocks], after


class HFImageBackbone(HFBackbone):
    """A vision model's pooled output. `own`: settings of its config; for a ResNet `stem`, otherwise `fixed_patches`."""

    output = "`pooler_output.flatten(1)`"

    def __init__(self, name: str, own: dict[str, Any], recompute: bool, image_size: int, pretrained: bool) -> None:
        where, model_type, defaults = _kind("image", IMAGE_MODELS, name, own)
        is_resnet = model_type == "resnet"
        stem = own.get("stem", STEMS[0]) if is_resnet else None
        settings = {key: value for key, value in own.items() if key != ("stem" if is_resnet else "fixed_patches")}
        # Only these have positions for one size of images.
        self_sized = _INTERPOLATE in inspect.signature(model_class(model_type).forward).parameters
        if self_sized and "/" not in name:
            settings = {"image_size": image_size} | settings
        config = _config(where, model_type, defaults, settings)
        if self_sized and config.image_size not in (image_size, [image_size] * 2, (image_size,) * 2):
            raise ConfigError(
                f"{where} expects images of {config.image_size} pixels, but data.image_size = "
                f"{image_size}; set data.image_size={config.image_size}"
            )
        super().__init__(where, name, own, config, pretrained)
        self.image_size = image_size if self_sized else None
        self.probe(2, 3, image_size, image_size, dtype=torch.float32)
        if stem not in (None, *STEMS):
            raise ConfigError(f"model.image.config.stem = {stem!r}; available: {', '.join(STEMS)}")
        if stem == "cifar":  # for images of 32 pixels: SimCLR, appendix B.9; AUC-CL
            resnet: Any = self.model
            old = resnet.embedder.embedder.convolution
            new = nn.Conv2d(old.in_channels, old.out_channels, 3, stride=1, padding=1, bias=False)
            nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")  # as transformers the others
            resnet.embedder.embedder.convolution, resnet.embedder.pooler = new, nn.Identity()
        if not isinstance(fixed := own.get("fixed_patches", False), bool):
            raise ConfigError(f"model.image.config.fixed_patches = {fixed!r}; use true or false")
        if fixed and not is_resnet:
            _fix_patches(self.model, drawn=not self._is_trained)
        if recompute:
            self.recompute()

    def features(self, model: Any, inputs: Tensor) -> Tensor:
        # Local views are smaller than the size for which a ViT's positions are made.
        positions = {} if self.image_size in (None, inputs.shape[-1]) else {_INTERPOLATE: True}
        pooled: Tensor = model(pixel_values=inputs, **positions).pooler_output.flatten(1)
        return pooled

    def check_side(self, pixels: int) -> None:
        model: Any = self.model
        patch = 1 if self.image_size is None else model.config.patch_size
        if pixels % patch:
            raise ConfigError(f"data.local_size = {pixels} is no multiple of model.image.name's patch, {patch} pixels")
        self.probe(2, 3, pixels, pixels, dtype=torch.float32)


def _fix_patches(model: Any, *, drawn: bool) -> None:
    """Exclude a ViT's patch projection from training, for stability: MoCo v3, section 4.2. drawn: random weights."""
    projection = next(layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    if drawn:  # as MoCo v3's code; transformers' own weights would make its outputs half as large
        inputs, outputs = projection.weight[0].numel(), len(projection.weight)
        bound = math.sqrt(6 / (inputs + outputs))
        nn.init.uniform_(projection.weight, -bound, bound)
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)
    projection.requires_grad_(False)


class HFTextBackbone(HFBackbone):
    """A text model's output at one token, or its own pooled output."""

    def __init__(
        self, name: str, own: dict[str, Any], recompute: bool, tokenizer: TokenizerInfo, pretrained: bool
    ) -> None:
        where, model_type, defaults = _kind("text", TEXT_MODELS, name, own)
        # No token id alone means padding: the attention mask marks it, and models that read it record its id.
        settings: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": tokenizer.end_id}
        if "/" not in name:
            settings |= {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": tokenizer.context_length}
        config = _config(where, model_type, defaults, settings | own)
        longest = getattr(config, "max_position_embeddings", tokenizer.context_length)
        pools = model_type == "siglip_text_model"  # at the last token of its context, padding or not, as it was trained
        shortest = longest if pools else 0
        if config.vocab_size < tokenizer.vocab_size or not shortest <= tokenizer.context_length <= longest:
            raise ConfigError(
                f"{where} has {config.vocab_size:,} tokens and a context of {longest}, but the dataset has "
                f"{tokenizer.vocab_size:,} and captions of {tokenizer.context_length}: convert it with the model's own "
                f"tokenizer (--tokenizer) and --context-length {longest}{'' if pools else ' or less'}"
            )
        super().__init__(where, name, own, config, pretrained)
        self.end_id, self.pad_id = tokenizer.end_id, getattr(config, "pad_token_id", None)
        # A model without a masked language model reads from left to right: at its end it has read the whole caption.
        self.pools, self.reads_at_end = pools, not pools and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
        self.mask_dimensions = _MASKS.get(model_type, 2)
        self.reads_mask = self.mask_dimensions == 2
        if self.reads_at_end:
            self.output = (
                f"`last_hidden_state` at the first token {tokenizer.end_id}, which closes a text (not `pooler_output`: "
                "transformers pools elsewhere where the end token's id is 2)"
            )
        elif not self.pools:
            self.output = "`last_hidden_state[:, 0]`"
        self.probe(2, tokenizer.context_length, dtype=torch.int32)
        if recompute:
            self.recompute()

    def features(self, model: Any, inputs: Tensor) -> Tensor:
        tokens = inputs.long()
        real = caption_mask(tokens, self.end_id)
        if self.pad_id is not None:
            tokens = tokens.masked_fill(~real, self.pad_id)
        # To check whether a mask [b, L] hides any token, transformers reads from the device in every step.
        whole = real[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        outputs = model(input_ids=tokens, attention_mask={0: None, 2: real, 4: whole}[self.mask_dimensions])
        rows, place = torch.arange(len(tokens), device=tokens.device), real.sum(1) - 1 if self.reads_at_end else 0
        features: Tensor = outputs.pooler_output if self.pools else outputs.last_hidden_state[rows, place]
        return features


HF_BACKBONES: dict[str, Callable[..., Backbone]] = {"image": HFImageBackbone, "text": HFTextBackbone}


def _kind(
    side: str, known: dict[str, tuple[str, dict[str, Any]]], name: str, own: dict[str, Any]
) -> tuple[str, str, dict[str, Any]]:
    """Return the model's name for errors, its type, and its differences from the type's default."""
    where = f"model.{side}.name = 'hf:{name}'"
    if "/" in name:
        refuse_type(where, side, own.get(MODEL_TYPE))
        return where, str(own[MODEL_TYPE]), {}
    if name not in known:
        raise ConfigError(
            f"{where}: unknown model; available: {', '.join(f'hf:{n}' for n in known)}, or a local "
            "directory, as hf:/path/to/model or hf:./model"
        )
    return where, *known[name]


def _config(where: str, model_type: str, defaults: dict[str, Any], settings: dict[str, Any]) -> Any:
    published = AutoConfig.for_model(model_type)
    ours = (MODEL_TYPE, PROJECTION, "pretrained") if MODEL_TYPE in settings else ()
    own = {key: value for key, value in settings.items() if key not in ours}
    refuse_absurd(where, own)
    for key in own:
        # Keys with an underscore are internal to transformers; _attn_implementation can fetch code and run it.
        if key.startswith("_") or not hasattr(published, "rope_parameters" if key == "rope_theta" else key):
            kind = type(published).__name__
            raise ConfigError(f"{where.split('.name')[0]}.config.{key}: transformers' {kind} has no such setting")
    return built(where, model_type, defaults | own)
