"""Draw a contact sheet: stored pictures beside their augmented views, with each sample's id, class and caption.

Drawn with Pillow, because matplotlib would read a `$` in a caption as mathematics.
"""

from __future__ import annotations

from typing import NamedTuple

from PIL import Image, ImageDraw

from .lettering import Lettering, Letters

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
    views: tuple[ShownView, ...]


def draw_sheet(title: str, facts: str, samples: list[ShownSample]) -> Image.Image:
    """Draw at least one sample, in rows at most WIDEST wide, below a title and a line of facts."""
    letters = Lettering.covering([title, facts, *(sample.group + sample.caption for sample in samples)])
    side = _tile_side(samples[0].views[0].picture.width)
    tiles = 1 + len(samples[0].views)
    cell_width = tiles * side + (tiles - 1) * GAP
    columns = max(1, min(len(samples), (WIDEST + GUTTER) // (cell_width + GUTTER)))
    caption_lines = CAPTION_LINES if any(sample.caption for sample in samples) else 0
    cell_height = LINE + side + GAP + LINE * (1 + caption_lines)
    width = columns * (cell_width + GUTTER) - GUTTER
    headline, small = letters.line(22, bold=True), letters.line(15)
    facts_lines = wrapped(letters.drawable(facts), small, width, 3)
    top = MARGIN + 32 + LINE * len(facts_lines) + GUTTER // 2
    rows = -(-len(samples) // columns)
    sheet = Image.new("RGB", (width + 2 * MARGIN, top + rows * (cell_height + GUTTER) - GUTTER + MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    for line in wrapped(letters.drawable(title), headline, width, lines=1):
        headline.draw(draw, (MARGIN, MARGIN), line, INK)
    for i, line in enumerate(facts_lines):
        small.draw(draw, (MARGIN, MARGIN + 34 + i * LINE), line, FAINT)
    for i, sample in enumerate(samples):
        at = (MARGIN + i % columns * (cell_width + GUTTER), top + i // columns * (cell_height + GUTTER))
        _draw_sample(sheet, draw, at, side, cell_width, sample, letters)
    return sheet


def _draw_sample(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, corner: tuple[int, int], side: int, width: int, sample: ShownSample,
    letters: Lettering,
) -> None:  # fmt: skip
    (left, top), below = corner, corner[1] + LINE + side + GAP
    tiny, small, bold = letters.line(13), letters.line(15), letters.line(15, bold=True)
    tiny.draw(draw, (left, top), f"stored {sample.stored.width}×{sample.stored.height}", FAINT)
    _draw_stored(sheet, draw, left, top + LINE, side, sample)
    for i, (view, colour) in enumerate(zip(sample.views, VIEW_COLOURS, strict=False), start=1):
        at = left + i * (side + GAP)
        tiny.draw(draw, (at, top), view.name, colour)
        sheet.paste(_resized(view.picture, (side, side)), (at, top + LINE))
    bold.draw(draw, (left, below), f"id {sample.sample_id}", INK)
    group_at = left + round(bold.length(f"id {sample.sample_id}")) + 2 * GAP
    for line in wrapped(letters.drawable(sample.group), small, width - (group_at - left), lines=1):
        small.draw(draw, (group_at, below), line, FAINT)
    for i, line in enumerate(wrapped(letters.drawable(sample.caption), small, width, CAPTION_LINES), start=1):
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


def wrapped(text: str, letters: Letters, width: int, lines: int) -> list[str]:
    """Wrap `text` into at most `lines` lines of `width` pixels, at spaces if possible; cut with an ellipsis."""
    broken: list[str] = []
    while text and len(broken) < lines:
        if letters.length(text) <= width:
            return [*broken, text]
        last, mark = len(broken) == lines - 1, "…"
        fits = next(n for n in range(len(text) - 1, -1, -1) if n <= 1 or letters.length(text[:n] + mark) <= width)
        space = text.rfind(" ", 1, fits + 1)
        end = fits if last or space < 0 else space
        broken.append(text[:end].rstrip() + (mark if last else ""))
        text = text[end:].lstrip()
    return broken


def _tile_side(image_size: int) -> int:
    if image_size < SMALLEST_TILE:
        return image_size * -(-SMALLEST_TILE // image_size)
    return min(image_size, LARGEST_TILE)
