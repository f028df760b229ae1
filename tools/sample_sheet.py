"""A contact sheet: stored pictures beside the views that training makes, with each sample's id, class and caption.

Drawn with Pillow, because matplotlib would read a `$` in a caption as mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from ..pipeline.loading.ffcv_loader import ViewMaker
from ..pipeline.opening import Dataset
from ..pipeline.views.recipes import RECIPES, Recipe, view_parameters
from .printing import plain_text
from .report.figures.lettering import Lettering

PAPER, INK, FAINT, FRAME = "#ffffff", "#33373d", "#767b83", "#e3e5e8"
VIEW_COLOURS = ("#0072b2", "#d55e00")
"""Okabe and Ito's blue and orange, for each view's name and its crop on the stored picture."""
SMALLEST_TILE, LARGEST_TILE = 128, 320
"""Side of a tile, in pixels; smaller views are enlarged by a whole factor, larger ones reduced."""
WIDEST = 1500
"""Width of a row of samples in pixels; fits a screen."""
MARGIN, GUTTER, GAP, LINE = 24, 28, 6, 20
CAPTION_LINES = 2


class ShownView(NamedTuple):
    """One view of a sample."""

    name: str
    picture: Image.Image
    box: tuple[int, int, int, int]
    """Left, top, right, bottom of its crop, in pixels of the stored picture."""


class ShownSample(NamedTuple):
    """One sample on a sheet. Texts are on one line and safe to print."""

    sample_id: int
    group: str
    """Empty if the sample has none, like the caption."""
    caption: str
    stored: Image.Image
    views: Sequence[ShownView]


def shown_samples(
    dataset: Dataset, sample_ids: NDArray[np.int64], recipe_name: str, *, seed: int, epoch: int, image_size: int
) -> list[ShownSample]:
    """Return the samples with two views each, as training with that seed sees them; sample_ids int64 [b].

    Images have two views per epoch; pairs have one, so this epoch's and the next one's are shown.
    """
    recipe, rows = RECIPES[recipe_name], dataset.rows(sample_ids.tolist())
    pairs = dataset.index.mode == "pairs"
    drawn = (
        [(epoch, 0, f"epoch {epoch}"), (epoch + 1, 0, f"epoch {epoch + 1}")]
        if pairs
        else [(epoch, 0, "view 1"), (epoch, 1, "view 2")]
    )
    heights, widths = (np.array([row[side] for row in rows], np.int64) for side in ("height", "width"))
    columns = []
    with ViewMaker(dataset, seed=seed, recipe=recipe, image_size=image_size, views=1 if pairs else 2) as maker:
        for of_epoch, view, name in drawn:
            pixels = maker.make(sample_ids, of_epoch).views[view]
            boxes = view_parameters(recipe, seed, of_epoch, sample_ids, heights, widths, view).box
            columns.append(
                [
                    ShownView(name, _picture(one, recipe), (left, top, left + width, top + height))
                    for one, (top, left, height, width) in zip(pixels, boxes.tolist(), strict=True)
                ]
            )
    return [
        ShownSample(
            row["sample_id"],
            plain_text(row["group"] or ""),
            plain_text(row["caption"] or ""),
            Image.open(BytesIO(dataset.jpeg(row["sample_id"])), formats=["JPEG"]),
            views,
        )
        for row, *views in zip(rows, *columns, strict=True)
    ]


def _picture(pixels: torch.Tensor, recipe: Recipe) -> Image.Image:
    """Undo the normalisation of a view, float32 [3, H, W]."""
    mean, std = (torch.tensor(channels).view(3, 1, 1) for channels in (recipe.mean, recipe.std))
    shown = ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy())


def draw_sheet(title: str, facts: str, samples: list[ShownSample]) -> Image.Image:
    """Draw at least one sample, in rows at most WIDEST wide, below a title and a line of facts."""
    small = Lettering.covering([title, facts, *(sample.group + sample.caption for sample in samples)], 15)
    image_size = samples[0].views[0].picture.width
    side = image_size * -(-SMALLEST_TILE // image_size) if image_size < SMALLEST_TILE else min(image_size, LARGEST_TILE)
    cell_width = side + len(samples[0].views) * (GAP + side)
    columns = max(1, min(len(samples), (WIDEST + GUTTER) // (cell_width + GUTTER)))
    caption_lines = CAPTION_LINES if any(sample.caption for sample in samples) else 0
    cell_height = LINE + side + GAP + LINE * (1 + caption_lines)
    width = columns * (cell_width + GUTTER) - GUTTER
    facts_lines = small.wrapped(small.drawable(facts), width, 3)
    top = MARGIN + 32 + LINE * len(facts_lines) + GUTTER // 2
    rows = -(-len(samples) // columns)
    sheet = Image.new("RGB", (width + 2 * MARGIN, top + rows * (cell_height + GUTTER) - GUTTER + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    headline = replace(small, size=22, bold=True)
    for line in headline.wrapped(small.drawable(title), width, lines=1):
        headline.draw(draw, (MARGIN, MARGIN), line, INK)
    for i, line in enumerate(facts_lines):
        small.draw(draw, (MARGIN, MARGIN + 34 + i * LINE), line, FAINT)
    for i, sample in enumerate(samples):
        at = (MARGIN + i % columns * (cell_width + GUTTER), top + i // columns * (cell_height + GUTTER))
        _draw_sample(sheet, draw, at, side, cell_width, sample, small)
    return sheet


def _draw_sample(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    corner: tuple[int, int],
    side: int,
    width: int,
    sample: ShownSample,
    small: Lettering,
) -> None:
    (left, top), below = corner, corner[1] + LINE + side + GAP
    tiny, bold = replace(small, size=13), replace(small, bold=True)
    tiny.draw(draw, (left, top), f"stored {sample.stored.width}×{sample.stored.height}", FAINT)
    _draw_stored(sheet, draw, left, top + LINE, side, sample)
    for i, (view, colour) in enumerate(zip(sample.views, VIEW_COLOURS, strict=False), start=1):
        at = left + i * (side + GAP)
        tiny.draw(draw, (at, top), view.name, colour)
        sheet.paste(_resized(view.picture, (side, side)), (at, top + LINE))
    bold.draw(draw, (left, below), f"id {sample.sample_id}", INK)
    group_at = left + round(bold.length(f"id {sample.sample_id}")) + 2 * GAP
    for line in small.wrapped(small.drawable(sample.group), width - (group_at - left), lines=1):
        small.draw(draw, (group_at, below), line, FAINT)
    for i, line in enumerate(small.wrapped(small.drawable(sample.caption), width, CAPTION_LINES), start=1):
        small.draw(draw, (left, below + i * LINE), line, INK)


def _draw_stored(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, left: int, top: int, side: int, sample: ShownSample
) -> None:
    """Draw the stored picture as large as the tile allows, on grey, with frames around the views' crops."""
    stored = sample.stored
    scale = side / max(stored.size)
    size = max(1, round(stored.width * scale)), max(1, round(stored.height * scale))
    draw.rectangle((left, top, left + side - 1, top + side - 1), FRAME)
    x, y = left + (side - size[0]) // 2, top + (side - size[1]) // 2
    sheet.paste(_resized(stored, size), (x, y))
    for view, colour in zip(sample.views, VIEW_COLOURS, strict=False):
        left_edge, top_edge, right_edge, bottom_edge = (round(edge * scale) for edge in view.box)
        # In a long, thin picture a crop may be thinner than its frame.
        right_edge, bottom_edge = max(right_edge, left_edge + 4), max(bottom_edge, top_edge + 4)
        frame = (x + left_edge, y + top_edge, x + right_edge - 1, y + bottom_edge - 1)
        draw.rectangle(frame, outline=PAPER, width=4)
        draw.rectangle((frame[0] + 1, frame[1] + 1, frame[2] - 1, frame[3] - 1), outline=colour, width=2)


def _resized(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize a picture; small ones are enlarged without smoothing, so that pixels show as squares."""
    magnified = size[0] >= 2 * picture.width
    return picture.resize(size, Image.Resampling.NEAREST if magnified else Image.Resampling.LANCZOS)
