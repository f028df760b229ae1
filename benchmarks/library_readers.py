"""How transformers, timm and open_clip read an export for benchmarks.libraries: by their own entry points alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, normalize

from thermopile.pipeline.dataset.tokenizer import encode, load_tokenizer
from thermopile.trainer.encoders import Encoders

from .exported import load_facts
from .library_models import CONTEXT


class Read(NamedTuple):
    """An export as a library reads it."""

    pixels: Callable[[Sequence[Image.Image]], Tensor]
    compared: Callable[[Tensor, Sequence[str]], tuple[Tensor, Tensor, Tensor]]
    """Features of pixels and texts, in rows of norm 1, and their logits."""
    bias: float = 0.0


def whole(folder: Path, ours: Encoders) -> Read:
    """clip/ or siglip/, by AutoProcessor and AutoModel; `pipeline` must give the same probabilities."""
    from transformers import AutoModel, AutoProcessor, pipeline

    (place,) = [folder / kind for kind in ("clip", "siglip") if (folder / kind).is_dir()]
    read: Any = AutoProcessor
    model: Any = AutoModel.from_pretrained(place).eval()
    processor, piped = read.from_pretrained(place), pipeline("zero-shot-image-classification", model=str(place))
    bias = model.logit_bias.item() if hasattr(model, "logit_bias") else 0.0

    def pixels(pictures: Sequence[Image.Image]) -> Tensor:
        texts = ["a picture", "the character", "a letter"]
        found: Tensor = processor(images=list(pictures), return_tensors="pt")["pixel_values"]
        piped_scores = {one["label"]: one["score"] for one in piped(pictures[0], texts, hypothesis_template="{}")}
        logits = compared(found[:1], texts)[2]
        own = (logits.sigmoid() if bias else logits.softmax(1))[0]
        torch.testing.assert_close(torch.tensor([piped_scores[each] for each in texts]), own, atol=1e-4, rtol=0)
        return found

    def compared(pixels: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        words = processor(text=list(texts), padding="max_length", truncation=True, return_tensors="pt")
        found = model(pixel_values=pixels, **words)
        return found.image_embeds, found.text_embeds, found.logits_per_image

    return Read(pixels, compared, bias)


def apart(folder: Path, ours: Encoders) -> Read:
    """image/ and text/, by AutoModel, AutoImageProcessor and AutoTokenizer, with the heads beside them."""
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    read: Any = AutoImageProcessor
    processor, tokenizer = read.from_pretrained(folder / "image"), AutoTokenizer.from_pretrained(folder / "text")
    image, text = (AutoModel.from_pretrained(folder / side).eval() for side in ("image", "text"))
    end = json.loads(load_facts(folder / "text")["end_id"])

    def compared(pixels: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        words = tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt")
        states = text(**words).last_hidden_state
        place = (words["input_ids"] == end).int().argmax(1) if text.config.model_type == "clip_text_model" else 0
        first = _headed(folder / "image", image(pixels).pooler_output.flatten(1))
        second = _headed(folder / "text", states[torch.arange(len(texts)), place])
        return first, second, first @ second.T * _scale(folder / "image") + _bias(folder / "image")

    return Read(lambda pictures: processor(images=list(pictures), return_tensors="pt")["pixel_values"], compared,
                _bias(folder / "image"))  # fmt: skip


def of_timm(folder: Path, ours: Encoders) -> Read:
    """image/, by timm; timm has no texts, so their features are the run's."""
    import timm

    model = timm.create_model(f"local-dir:{folder}/image", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    tokenizer = load_tokenizer(folder / "tokenizer.json", context_length=CONTEXT)

    def compared(pixels: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        assert ours.text is not None
        tokens = torch.from_numpy(encode(tokenizer, texts).tokens)
        first, second = _headed(folder / "image", model(pixels)), normalize(ours.text(tokens))
        return first, second, first @ second.T * _scale(folder / "image") + _bias(folder / "image")

    return Read(lambda pictures: torch.stack([transform(picture) for picture in pictures]), compared,
                _bias(folder / "image"))  # fmt: skip


def of_open_clip(folder: Path, ours: Encoders) -> Read:
    """Both towers, by create_model_and_transforms and get_tokenizer."""
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    model.eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")

    def compared(pixels: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        image, text, scale, *bias = model(pixels, tokenizer(list(texts)))
        return image, text, scale * image @ text.T + (bias[0] if bias else 0.0)

    bias = 0.0 if model.logit_bias is None else model.logit_bias.item()
    return Read(lambda pictures: torch.stack([transform(picture) for picture in pictures]), compared, bias)


def _headed(place: Path, features: Tensor) -> Tensor:
    head = load_file(place / "head.safetensors")
    return normalize(linear(features, head["weight"], head["bias"]))


def _scale(place: Path) -> float:
    return math.exp(float(load_facts(place)["log_logit_scale"]))


def _bias(place: Path) -> float:
    return float(load_facts(place).get("logit_bias", 0.0))


READERS: dict[str, Callable[[Path, Encoders], Read]] = {
    "hf whole": whole, "hf": apart, "timm": of_timm, "open_clip": of_open_clip,
}  # fmt: skip
