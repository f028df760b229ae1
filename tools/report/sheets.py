"""Contact sheets of samples with their pictures and facts. The page's script adds paging and enlarging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..inspection.samples import Sample
from ..inspection.summary import share
from .html import facts_list, text

_TABLE = {"group": "class", "caption": "caption", "uri": "uri", "key": "key", "width": "width (pixels)",
          "height": "height (pixels)"}  # fmt: skip
"""Columns of the samples table shown on a card -> their labels."""


@dataclass(frozen=True)
class Cards:
    """Builds the cards of samples."""

    samples: Mapping[int, Sample]
    pictures: Mapping[int, str]
    """Id -> data URI; some may be missing."""
    longest: int
    """Characters of a text shown in full."""

    def sheet(self, title: str, words: str, cards: Sequence[tuple[int, str]]) -> str:
        """Return a heading, a sentence (may be empty), and a card per id with its figure, such as `tau 0.0050`."""
        items = "".join(self._card(sample_id, figure) for sample_id, figure in cards)
        sentence = f"<p>{text(words, most=1000)}</p>" if words else ""
        return f'<h3>{text(title)}</h3>{sentence}<ul class="sheet" aria-label="{text(title)}">{items}</ul>'

    def _card(self, sample_id: int, figure: str) -> str:
        sample, picture = self.samples[sample_id], self.pictures.get(sample_id)
        group, caption = sample.table.get("group"), sample.table.get("caption")
        image = f'<img src="{picture}" alt="picture of sample {sample_id}" loading="lazy">' if picture else ""
        named = f'<bdi class="group">{text(group)}</bdi>' if group is not None else ""
        said = f'<bdi class="caption">{text(caption)}</bdi>' if caption is not None else ""
        return (
            f'<li>{image}<b>{text(figure)}</b>{named}{said}<span class="id">id {sample_id}</span>'
            f"<details><summary>all</summary>{facts_list(facts(sample), self.longest)}</details></li>"
        )


def facts(sample: Sample) -> list[tuple[str, str]]:
    """Return everything known about a sample, as (label, text) pairs."""
    known = [("id", str(sample.sample_id))]
    known += [(word, str(sample.table[name])) for name, word in _TABLE.items() if sample.table.get(name) is not None]
    # Tau first: it is what readers look for.
    state = sorted(sample.state.items(), key=lambda item: not item[0].endswith("tau"))
    known += [(state_word(name), number(value)) for name, value in state]
    return known + [
        (f"{side} tau among all", f"higher than {share(rank)} of the visited samples")
        for side, rank in sample.ranks.items()
    ]


def state_word(column: str) -> str:
    """Return the label of a column of the state: `image tau` for `image/tau`."""
    side, _, field = column.rpartition("/")
    return f"{side} {field}".strip().replace("_", " ")


def number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
