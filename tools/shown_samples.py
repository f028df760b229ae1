"""Samples of a dataset with the views that training makes of them."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ..pipeline.augment import RECIPES, Recipe, view_parameters
from ..pipeline.dataset import Dataset
from ..pipeline.loading.ffcv_loader import ViewMaker
from .plain_text import plain_text
from .sample_sheet import ShownSample, ShownView


def shown_samples(
    dataset: Dataset, sample_ids: NDArray[np.int64], recipe_name: str, *, seed: int, epoch: int, image_size: int
) -> list[ShownSample]:
    """Return the samples with two views each, as training with that seed sees them; sample_ids int64 [b].

    Images have two views per epoch; pairs have one, so this epoch's and the next one's are shown.
    """
    recipe = RECIPES[recipe_name]
    rows = dataset.rows(sample_ids.tolist())
    columns = _views(dataset, sample_ids, recipe, seed, epoch, image_size, rows)
    return [_shown(dataset, row, views) for row, views in zip(rows, zip(*columns, strict=True), strict=True)]


def _shown(dataset: Dataset, row: dict[str, Any], views: tuple[ShownView, ...]) -> ShownSample:
    stored = Image.open(BytesIO(dataset.jpeg(row["sample_id"])), formats=["JPEG"])
    return ShownSample(
        row["sample_id"], plain_text(row["group"] or ""), plain_text(row["caption"] or ""), stored, views
    )


def _views(
    dataset: Dataset, sample_ids: NDArray[np.int64], recipe: Recipe, seed: int, epoch: int, image_size: int,
    rows: list[dict[str, Any]],
) -> list[list[ShownView]]:  # fmt: skip
    """Return two lists of views, one view per sample in each."""
    pairs = dataset.index.mode == "pairs"
    drawn = [(epoch, 0, f"epoch {epoch}"), (epoch + 1, 0, f"epoch {epoch + 1}")] if pairs else [
        (epoch, 0, "view 1"), (epoch, 1, "view 2"),
    ]  # fmt: skip
    heights, widths = (np.array([row[side] for row in rows], np.int64) for side in ("height", "width"))
    found = []
    with ViewMaker(dataset, seed=seed, recipe=recipe, image_size=image_size, views=1 if pairs else 2) as maker:
        for of_epoch, view, name in drawn:
            pixels = maker.make(sample_ids, of_epoch).views[view]
            boxes = view_parameters(recipe, seed, of_epoch, sample_ids, heights, widths, view).box
            found.append([ShownView(name, _picture(one, recipe), (left, top, left + width, top + height))
                          for one, (top, left, height, width) in zip(pixels, boxes.tolist(), strict=True)])  # fmt: skip
    return found


def _picture(pixels: torch.Tensor, recipe: Recipe) -> Image.Image:
    """Undo the normalisation of a view, float32 [3, H, W]."""
    mean, std = (torch.tensor(channels).view(3, 1, 1) for channels in (recipe.mean, recipe.std))
    shown = ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy())
