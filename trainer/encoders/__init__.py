"""Encoders: images or tokens → features. Small built-ins, and those of transformers, timm and open_clip."""

import copy
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...pipeline.batch import Batch
from ...pipeline.dataset.index import TokenizerInfo
from ..config import ModelConfig
from ..errors import ConfigError, refusing
from ..plugins import HF, OPEN_CLIP, TIMM, installed, is_directory, is_own_encoder
from .backbones import Backbone, conv, mean_embedding
from .locking import refuse_impossible_locks
from .own_backbone import own_backbone
from .projection_heads import HEADS, PREDICTORS

BUILT_IN: dict[str, dict[str, Callable[..., Backbone]]] = {
    "image": {"conv": conv},
    "text": {"mean_embedding": mean_embedding},
}


def with_names(config: ModelConfig, mode: str = "bimodal") -> ModelConfig:
    """Return the settings with `auto` resolved, and with a local model's architecture added to its name.

    mode: `unimodal` leaves out the text's. Raises ConfigError if a local directory holds no model for its side.
    """
    named = {}
    for side, encoder in (("image", config.image), ("text", config.text)):
        first = next(iter(BUILT_IN[side]))
        named[side] = encoder.model_copy(update={"name": first}) if encoder.name == "auto" else encoder
        if is_directory(encoder.name) and (side == "image" or mode == "bimodal"):
            from .hf_directory import with_architecture

            named[side] = with_architecture(side, encoder)
    return config.model_copy(update=named)


class Encoder(nn.Module):
    """A backbone followed by the projection head into the objective's space."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self._locked_groups = 0

    def groups(self) -> list[nn.Module]:
        """Return the backbone's groups of layers, input first, and the head, if there is one."""
        return [*self.backbone.groups(), *([] if isinstance(self.head, nn.Identity) else [self.head])]

    def lock(self, unlocked_groups: int) -> None:
        """Keep all groups but the last `unlocked_groups` from changing: weights, and buffers of batch norms.

        Builds no graph and computes no gradients for them. Raises ValueError if there are fewer groups.
        Source: LiT (Zhai et al., CVPR 2022); the groups follow open_clip.
        """
        if unlocked_groups > (count := len(self.groups())):
            raise ValueError(f"the encoder has {count} groups, the head included; set at most {count}")
        self._locked_groups = count - unlocked_groups
        for group in self._locked():
            group.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode, except for locked groups."""
        super().train(mode)
        if self._locked_groups and self._locked_groups >= len(self.backbone.groups()):
            self.backbone.eval()  # also what has no weights, such as dropout
        for group in self._locked():
            group.eval()
        return self

    def _locked(self) -> list[nn.Module]:
        return self.groups()[: self._locked_groups] if self._locked_groups else []

    def forward(self, inputs: Tensor) -> Tensor:
        """float32 [b, 3, H, W], or int [b, L], → [b, dim]."""
        features: Tensor = self.head(self.backbone(inputs))
        return features


def create_encoder(side: str, config: ModelConfig, given: int | TokenizerInfo, *, pretrained: bool = True) -> Encoder:
    """Create an image encoder float32 [b, 3, H, W] → [b, dim], or a text encoder int [b, L] → [b, dim].

    given: the side length of an image in pixels, or the tokenizer. pretrained: load the weights of a local directory;
    otherwise initialise them for a checkpoint to replace. Raises ConfigError for an unknown name or setting.
    """
    encoder, recompute = getattr(config, side), config.activation_checkpointing
    if encoder.name.startswith(HF):
        from .hf_encoders import HF_BACKBONES

        backbone: Backbone = HF_BACKBONES[side](encoder.name[len(HF) :], encoder.config, recompute, given, pretrained)
    elif encoder.name.startswith(TIMM) and isinstance(given, int):
        from .timm_encoders import TimmBackbone

        backbone = TimmBackbone(encoder.name.removeprefix(TIMM), encoder.config, recompute, given, pretrained)
    elif encoder.name.startswith(OPEN_CLIP):
        from .open_clip_encoders import OpenClipBackbone

        name = encoder.name.removeprefix(OPEN_CLIP)
        backbone = OpenClipBackbone(side, name, encoder.config, recompute, given, pretrained)
    elif encoder.name in (known := BUILT_IN[side]):
        sizes = {} if isinstance(given, int) else {"vocab_size": given.vocab_size, "end_id": given.end_id}
        with refusing(f"model.{side}.config", TypeError):
            backbone = known[encoder.name](recompute=recompute, **sizes, **encoder.config)
    elif is_own_encoder(encoder.name) or encoder.name in installed("encoders"):
        backbone = own_backbone(side, encoder, recompute, given)
    else:
        raise ConfigError(
            f"model.{side}.name = {encoder.name!r}: unknown encoder; available: {', '.join(known)}, hf:<model>, "
            f"{'timm:<model>, ' if side == 'image' else ''}open_clip:<model>, module:name"
        )
    if config.head == "none" and backbone.width != config.dim:
        raise ConfigError(f"model.head = 'none' keeps the {side} encoder's features; set model.dim={backbone.width}")
    head = backbone.projection(config.dim) if config.head == "linear" else None
    made = Encoder(backbone, head or HEADS[config.head](backbone.width, config.dim, config.head_width or None))
    if encoder.locked:
        with refusing(f"model.{side}.unlocked_groups = {encoder.unlocked_groups}", ValueError):
            made.lock(encoder.unlocked_groups)
    return made


class Features(NamedTuple):
    """The objective's input from a batch; each tensor is float32 [b, d]."""

    first: Tensor
    """Features of the images, or of the first views."""
    second: Tensor
    """Features of the captions, or of the second views."""
    keys: tuple[Tensor, Tensor] | None = None
    """The momentum network's features of both views, without gradient; None without such a network."""
    local: tuple[Tensor, ...] = ()
    """Features of the local views."""

    def tensors(self) -> list[Tensor]:
        return [self.first, self.second, *(self.keys or ()), *self.local]


class Encoders(nn.Module):
    """All networks of a run; maps a batch to the objective's features.

    Bimodal: an image and a text encoder. Unimodal: one image encoder for all views, optionally with a predictor after
    its head, and a momentum network: a moving average of the encoder, head included, that gives the keys.
    """

    def __init__(
        self,
        image: Encoder,
        text: Encoder | None = None,
        predictor: nn.Module | None = None,
        *,
        has_momentum: bool = False,
        unit_norm: bool = True,
    ) -> None:
        """unit_norm: whether features are divided by their norm, as most objectives require."""
        super().__init__()
        self.image = image
        self.text = text
        self.predictor = predictor
        self.momentum = copy.deepcopy(image).requires_grad_(False) if has_momentum else None
        self._unit_norm = unit_norm

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        mode: str,
        image_size: int,
        tokenizer: TokenizerInfo | None,
        *,
        pretrained: bool = True,
        unit_norm: bool = True,
    ) -> Self:
        """Create an image and a text encoder if bimodal, one image encoder for all views if unimodal.

        pretrained: as create_encoder. If False, a local model's directory need not exist any more.
        Raises ConfigError if the settings do not give encoders that fit into memory.
        """
        if mode == "bimodal" and tokenizer is None:
            raise ConfigError("objective.mode = 'bimodal' needs captions, but the dataset has only images")
        refuse_impossible_locks(config, mode)
        try:
            image = create_encoder("image", config, image_size, pretrained=pretrained)
            if mode == "bimodal" and tokenizer is not None:
                text = create_encoder("text", config, tokenizer, pretrained=pretrained)
                return cls(image, text, unit_norm=unit_norm)
            predictor = None
            if config.predictor != "none":
                predictor = PREDICTORS[config.predictor](config.dim, config.head_width or None)
            return cls(image, None, predictor, has_momentum=config.momentum > 0, unit_norm=unit_norm)
        except (RuntimeError, OverflowError) as error:  # torch raises these for negative sizes and when out of memory
            reason = str(error).splitlines()[0][:200]
            raise ConfigError(f"the encoders cannot be created from the settings of `model`: {reason}") from error

    def forward(self, batch: Batch, *, keys: bool = True) -> Features:
        """Return the batch's features, in rows of norm 1 unless the objective takes them raw.

        keys: whether to compute the momentum network's features, if there is one.
        """
        if self.text is not None:
            return Features(self._finished(self.image(batch.views[0])), self._finished(self.text(batch.tokens)))
        views, of_momentum = torch.cat(batch.views), None
        if self.momentum is not None and keys:  # first, while no activations are held
            with torch.no_grad():
                of_first, of_second = self._finished(self.momentum(views)).chunk(2)
            of_momentum = of_first, of_second
        first, second = self._queries(views).chunk(2)
        local = self._queries(torch.cat(batch.local)).chunk(len(batch.local)) if batch.local else ()
        return Features(first, second, of_momentum, tuple(local))

    def _queries(self, views: Tensor) -> Tensor:
        """float32 [b, 3, H, W] → [b, d], by the trained network."""
        features = self.image(views)
        return self._finished(features if self.predictor is None else self.predictor(features))

    def _finished(self, features: Tensor) -> Tensor:
        # Autocast returns half precision, in which no norm is exactly 1.
        precise = features.to(torch.promote_types(features.dtype, torch.float32))
        return F.normalize(precise, dim=-1) if self._unit_norm else precise

    def learning_rate_factors(self, layer_decay: float) -> dict[nn.Parameter, float]:
        """Return weight → layer_decay to the power of the number of groups from the weight's group to the head.

        Weights outside the encoders, such as a predictor's, are left out. Source: BEiT (Bao et al., ICLR 2022).
        """
        return {
            weight: layer_decay**distance
            for encoder in (self.image, self.text)
            if encoder is not None
            for distance, group in enumerate(reversed(encoder.groups()))
            for weight in group.parameters()
        }

    def move_momentum(self, momentum: float) -> None:
        """Move the momentum network, if any, to momentum · its weights + (1 - momentum) · the image encoder's.

        Its batch norms keep statistics of their own. Source: MoCo v3 (Chen et al., ICCV 2021), algorithm 1.
        """
        if self.momentum is not None:
            weights = list(self.momentum.parameters()), list(self.image.parameters())
            get_ema_multi_avg_fn(momentum)(*weights, None)  # type: ignore[no-untyped-call]


class AveragedEncoders(Encoders):
    """Encoders with the moving averages of the trained weights, in evaluation mode; no predictor, no momentum network.

    Batch norms average the trained statistics: the newest statistics belong to weights that the average reaches only
    1 / (1 - decay) steps later. Other buffers are copied.
    """

    def __init__(self, trained: Encoders, decay: float) -> None:
        """trained: on their device, with their first weights. decay: weight of the old values, in (0, 1)."""
        super().__init__(copy.deepcopy(trained.image), copy.deepcopy(trained.text))
        self.requires_grad_(False).eval()
        self._decay = decay
        own, newest = _values(self), _values(trained)
        # A counter cannot be averaged, nor can a mask with -inf.
        statistics = [name for name in own if name.rpartition(".")[2] in ("running_mean", "running_var")]
        averaged = {*statistics, *dict(self.named_parameters())}
        self._averaged = [own[name] for name in averaged], [newest[name] for name in averaged]
        self._copied = [(own[name], newest[name]) for name in own.keys() - averaged]

    @torch.no_grad()
    def follow(self, steps_done: int) -> None:
        """Move towards the trained encoders after a step. Does not read from the device.

        The weight of the old values is at most (1 + n) / (10 + n) after n steps, as in TensorFlow's
        ExponentialMovingAverage, so that short runs forget their first weights.
        """
        average = get_ema_multi_avg_fn(min(self._decay, (1 + steps_done) / (10 + steps_done)))  # type: ignore[no-untyped-call]
        average(*self._averaged, None)
        for own, newest in self._copied:
            own.copy_(newest)


def _values(encoders: nn.Module) -> dict[str, Tensor]:
    return dict(encoders.named_parameters()) | dict(encoders.named_buffers())
