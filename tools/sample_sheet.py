"""A page of samples: stored pictures beside the views that training makes, with each sample's id, class and caption."""

from collections.abc import Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ..pipeline.loading.ffcv_loader import ViewMaker
from ..pipeline.opening import Dataset
from ..pipeline.views.recipes import Recipe, view_parameters
from ..trainer.run.build import recipe_named
from .report.sheets import data_uri

FRAME_COLOURS = ("#0072b2", "#d55e00")
"""Colours of the views' crops on the stored picture; Okabe and Ito's blue and vermilion."""
LARGEST = 384
"""Longer side of the stored picture as shown, in pixels."""


class ShownView(NamedTuple):
    name: str
    picture: Image.Image
    box: tuple[int, int, int, int]
    """Left, top, right, bottom of its crop, in pixels of the stored picture."""


class ShownSample(NamedTuple):
    sample_id: int
    group: str | None
    caption: str | None
    stored: Image.Image
    views: Sequence[ShownView]

    @property
    def pictures(self) -> list[tuple[str, Markup, bool]]:
        """Names and data URIs of the stored picture with its crops and of the views, and whether each is small."""
        scale = LARGEST / max(self.stored.size)
        size = max(8, round(self.stored.width * scale)), max(8, round(self.stored.height * scale))
        how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS
        draw = ImageDraw.Draw(stored := self.stored.convert("RGB").resize(size, how))
        for view, colour in zip(self.views, FRAME_COLOURS, strict=False):
            left, top, right, bottom = (round(edge * scale) for edge in view.box)
            # In a long, thin picture a crop may be thinner than its frame.
            frame = left, top, max(right, left + 6) - 1, max(bottom, top + 6) - 1
            draw.rectangle(frame, outline="#ffffff", width=8)
            draw.rectangle((frame[0] + 2, frame[1] + 2, frame[2] - 2, frame[3] - 2), outline=colour, width=5)
        shown = [(f"stored {self.stored.width}×{self.stored.height}", stored)]
        shown += [(view.name, view.picture) for view in self.views]
        found = []
        for name, picture in shown:
            picture.save(jpeg := BytesIO(), "JPEG", quality=95, subsampling=0)
            found.append((name, data_uri(jpeg.getvalue(), "image/jpeg"), max(picture.size) < 128))
        return found


def shown_samples(
    dataset: Dataset, sample_ids: NDArray[np.int64], recipe_name: str, *, seed: int, epoch: int, image_size: int
) -> list[ShownSample]:
    """Return the samples with two views each, as training with that seed sees them; sample_ids int64 [b].

    Images have two views per epoch; pairs have one, so this epoch's and the next one's are shown. Raises ConfigError.
    """
    recipe, rows = recipe_named(recipe_name), dataset.rows(sample_ids.tolist())
    drawn = [(epoch, 0, "view 1"), (epoch, 1, "view 2")]
    if pairs := dataset.index.mode == "pairs":
        drawn = [(each, 0, f"epoch {each}") for each in (epoch, epoch + 1)]
    heights, widths = (np.array([row[side] for row in rows], np.int64) for side in ("height", "width"))
    columns = []
    with ViewMaker(dataset, seed=seed, recipe=recipe, image_size=image_size, views=1 if pairs else 2) as maker:
        for of_epoch, view, name in drawn:
            pixels = maker.make(sample_ids, of_epoch).views[view]
            boxes = view_parameters(recipe, seed, of_epoch, sample_ids, heights, widths, view).box
            shown = []
            for one, (top, left, height, width) in zip(pixels, boxes.tolist(), strict=True):
                shown.append(ShownView(name, _picture(one, recipe), (left, top, left + width, top + height)))
            columns.append(shown)
    found = []
    for row, *views in zip(rows, *columns, strict=True):
        stored = Image.open(BytesIO(dataset.jpeg(row["sample_id"])), formats=["JPEG"])
        found.append(ShownSample(row["sample_id"], row["group"], row["caption"], stored, views))
    return found


def _picture(pixels: torch.Tensor, recipe: Recipe) -> Image.Image:
    """Undo the normalisation of a view, float32 [3, H, W]."""
    mean, std = (torch.tensor(channels).view(3, 1, 1) for channels in (recipe.mean, recipe.std))
    shown = ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy())
