"""Classes by their names alone: no training sample's class is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

TEMPLATES = ("a photo of a {}",)
PLACE = re.compile(r"\{(lower)?\}")
"""Where a template has the class's name: {} as it is, {lower} in lower case, for tokenizers that tell the two apart."""


def prompts(names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Every template with every name, all templates of the first name first."""
    return [_prompt(template, name) for name in names for template in templates]


def _prompt(template: str, name: str) -> str:
    return PLACE.sub(lambda place: name.lower() if place[1] else name, template)


@torch.inference_mode()
def predict(
    images: Tensor, names: Sequence[str], templates: Sequence[str], encode: Callable[[list[str]], Tensor]
) -> Tensor:
    """For each picture the place of its class in `names`, int64 [m].

    images: float32 [m, d], rows of norm 1. encode: texts → float32 [texts, d], rows of norm 1. A class's features are
    the mean over the templates, of norm 1 again. Source: CLIP (Radford et al. 2021), section 3.1.4.
    """
    texts = encode(prompts(names, templates)).view(len(names), len(templates), -1)
    return (images @ F.normalize(texts.mean(1), dim=-1).T).argmax(1)
