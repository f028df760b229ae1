"""Zero-shot classification by class names; no labels of training samples are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

TEMPLATES = ("a photo of a {}",)
PLACE = re.compile(r"\{(lower)?\}")
"""Placeholder for the class name: {} unchanged, {lower} in lower case, for tokenizers that distinguish case."""


def prompts(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Return every template filled with every name, ordered by name."""
    return [_prompt(template, name) for name in names for template in templates]


def _prompt(template: str, name: str) -> str:
    return PLACE.sub(lambda place: name.lower() if place[1] else name, template)


@torch.inference_mode()
def predict(
    images: Tensor, names: Sequence[str], templates: Sequence[str], encode: Callable[[list[str]], Tensor]
) -> Tensor:
    """Return the index in `names` of each image's class, int64 [m].

    images: float32 [m, d], rows of norm 1. encode: texts → float32 [texts, d], rows of norm 1. A class's feature is the
    normalised mean over the templates. Source: CLIP (Radford et al. 2021), section 3.1.4.
    """
    texts = encode(prompts(names, templates)).view(len(names), len(templates), -1)
    return (images @ F.normalize(texts.mean(1), dim=-1).T).argmax(1)
