"""Preprocessing of pixels for a model: transformers' image processor, timm's and open_clip's data configuration."""

import logging
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from ..config import EncoderConfig
from ..errors import ConfigError
from ..plugins import OPEN_CLIP, TIMM
from .hf_directory import folder_of, read_object
from .timm_encoders import imported

_FILES = ("processor_config.json", "preprocessor_config.json")
"""If both are there, transformers 5 takes the first, provided that it holds an image processor."""
_OF_LIBRARY = {TIMM: ("config.json", "pretrained_cfg"), OPEN_CLIP: ("open_clip_config.json", "preprocess_cfg")}
"""The file beside the weights, and its part."""
_RESAMPLED = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_LEAST_CONTRAST, _MOST = 0.01, 1000.0
"""How far black and white must be apart in a model's input, also as a share of the larger one, and from 0 at most.

Raw pixels are 0 to 255.
"""
_log = logging.getLogger(__name__)

Channels = Annotated[
    list[float],
    Field(min_length=3, max_length=3),
    BeforeValidator(lambda value: [value] * 3 if isinstance(value, int | float) else value),
]


def _either(ours: str, theirs: str, default: Any = None) -> Any:
    """Return a field that transformers calls `ours`, and timm or open_clip `theirs`."""
    return Field(default, validation_alias=AliasChoices(ours, theirs))


class _Processor(BaseModel):
    do_rescale: bool = True
    rescale_factor: float = Field(1 / 255, gt=0)
    rescale_offset: bool = False
    """Whether 1 is subtracted from the scaled pixels, as for EfficientNet."""
    do_normalize: bool = True
    image_mean: Channels | None = _either("image_mean", "mean")
    image_std: Channels | None = _either("image_std", "std")
    size: dict[str, int | None] | list[int] | int | None = _either("size", "input_size")
    crop_size: dict[str, int | None] | int | None = None
    do_center_crop: bool = False
    resample: int | str = _either("resample", "interpolation", 2)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for mean, std in zip(*self.normalisation.values(), strict=True):
            black, white = (-mean / std, (1 - mean) / std) if std > 0 else (0.0, 0.0)
            largest = max(abs(black), abs(white))
            if not (white - black >= _LEAST_CONTRAST * max(1.0, largest) and largest <= _MOST):
                raise ValueError(f"no model is meant for the mean {self.image_mean} and std {self.image_std}")
        return self

    @property
    def normalisation(self) -> dict[str, list[float]]:
        """The equivalent `mean` and `std` of pixels in [0, 1]; empty without them."""
        mean, std = (self.image_mean, self.image_std) if self.do_normalize else ([0.0] * 3, [1.0] * 3)
        scale = 255 * (self.rescale_factor if self.do_rescale else 1.0)
        shift = float(self.do_rescale and self.rescale_offset)
        if mean is None or std is None:
            return {}
        return {"mean": [(each + shift) / scale for each in mean], "std": [each / scale for each in std]}

    @property
    def side(self) -> int | None:
        """The shorter side of the pictures that it makes, in pixels."""
        size = self.crop_size if self.do_center_crop and self.crop_size else self.size
        sides = [*size.values()] if isinstance(size, dict) else size[-2:] if isinstance(size, list) else [size]
        return min((side for side in sides if side), default=None)


def normalisation(image: EncoderConfig, image_size: int, *, quiet: bool = False) -> dict[str, Any]:
    """Return `mean` and `std` of pixels that a model was trained with, for a recipe; empty if nothing tells them.

    image_size: side of this run's views in pixels; warns if the model's pictures have another one, and if a file lacks
    mean or std, unless `quiet`. Raises ConfigError if its file cannot be read, or says what cannot be meant.
    """
    where, stored = _stored(image)
    if stored is None:
        return {}
    try:
        processor = _Processor.model_validate(stored)
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"])) or "settings"
        raise ConfigError(f"{where}: its image processor's {place}: {wrong['msg']}") from None
    if processor.side not in (None, image_size) and not quiet:
        kind = processor.resample if isinstance(processor.resample, str) else _RESAMPLED.get(processor.resample)
        other = "%s has an image processor for pictures of %d pixels (%s); here they have %d (bilinear)"
        _log.warning(other, where, processor.side, kind or "of unknown resampling", image_size)
    if not processor.normalisation and not quiet:
        _log.warning(
            "%s tells no mean and std of pictures, so those of the recipe are taken; if the model was trained with "
            "others, set data.recipe.mean and data.recipe.std",
            where,
        )
    return processor.normalisation


def _stored(image: EncoderConfig) -> tuple[str, object]:
    """Return a name for messages, and the image processor of a directory, or what timm or open_clip has of the weights.

    Of a file of weights, what its library wrote beside it counts. None without weights that are known.
    """
    prefix = next((each for each in _OF_LIBRARY if image.name.startswith(each)), None)
    arch, _, weights = image.name.removeprefix(prefix or "").partition(":")
    stored: dict[str, Any] = {}
    if prefix is None:
        folder = folder_of(image.name)
        for name in (name for name in reversed(_FILES) if (folder / name).is_file()):
            found = read_object(f"hf:{folder}", folder, name)
            stored = found.get("image_processor", stored) if name == _FILES[0] else found
        return f"hf:{folder}", stored
    if weights.endswith(".safetensors"):
        (name, part), folder = _OF_LIBRARY[prefix], Path(weights).parent
        stored = read_object(image.name, folder, name) if (folder / name).is_file() else {}
        return image.name, stored.get(part, stored)
    if prefix == TIMM and image.config.get("pretrained"):
        models = imported(image.name, "timm").models
        stored = vars(models.get_pretrained_cfg(arch)) if models.is_model_pretrained(arch) else {}
    elif prefix == OPEN_CLIP and weights:
        stored = imported(image.name, "open_clip").get_pretrained_cfg(arch, weights)
    return image.name, stored or None
