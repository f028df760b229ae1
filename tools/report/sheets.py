"""Contact sheets of samples with their pictures and facts. The page's script adds paging and enlarging."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from ...pipeline.dataset import Dataset
from ...pipeline.errors import DatasetError
from ...state_store.schema import VISITS
from ..inspection.samples import Sample
from ..inspection.summary import kind_words, share
from .html import data_uri, facts_list, text

_TABLE = {"group": "class", "caption": "caption", "uri": "uri", "key": "key", "width": "width (pixels)",
          "height": "height (pixels)", "altered": "altered"}  # fmt: skip
"""Columns of the samples table shown on a card -> their labels."""
EDGES = (384, 288, 224, 160, 112, 80, 48)
"""Sizes to try for a picture's longer side, in pixels, from clear to barely recognisable."""
JPEG_QUALITY = 80
SMALL_BYTES = 1 << 15
"""A small picture in a larger file is re-encoded to drop what else the file holds."""


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
    if sample.kind:
        known.append(("kind", kind_words(sample.kind)))
    # Tau first: it is what readers look for.
    state = sorted(sample.state.items(), key=lambda item: not item[0].endswith("tau"))
    known += [(state_word(name), number(value)) for name, value in state]
    others = "visited samples" if VISITS in sample.state else "samples"
    return known + [
        (f"{side} tau among all", f"higher than {share(rank)} of the {others}") for side, rank in sample.ranks.items()
    ]


def state_word(column: str) -> str:
    """Return the label of a column of the state: `image tau` for `image/tau`."""
    side, _, field = column.rpartition("/")
    return f"{side} {field}".strip().replace("_", " ")


def number(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def read_pictures(dataset: Dataset, sample_ids: Iterable[int], notes: list[str]) -> dict[int, bytes]:
    """Return samples' JPEGs by id; those that cannot be read or decoded are left out and noted."""
    found: dict[int, bytes] = {}
    failed: dict[int, Exception] = {}
    for sample_id in dict.fromkeys(sample_ids):
        try:
            found[sample_id] = reduced(dataset.jpeg(sample_id), EDGES[0])
        except (DatasetError, OSError) as error:
            failed[sample_id] = error
    if failed:
        first, reason = next(iter(failed.items()))
        more = f", nor those of {len(failed) - 1:,} more" if len(failed) > 1 else ""
        notes.append(f"The picture of sample {first} cannot be shown{more}: {reason}")
    return found


def data_uris(pictures: Mapping[int, bytes], shown: Sequence[int], max_bytes: int) -> dict[int, str]:
    """Return pictures by id at the largest of EDGES at which all fit `max_bytes`; empty if none fits.

    pictures: JPEGs by id, from `read_pictures`. shown: ids, repeated as often as shown; some may have no picture.
    """
    for edge in EDGES:
        found: dict[int, str] = {}
        left = max_bytes
        for sample_id in shown:
            if sample_id in pictures and sample_id not in found:
                found[sample_id] = data_uri(reduced(pictures[sample_id], edge), "image/jpeg")
            left -= len(found.get(sample_id, ""))
            if left < 0:
                break
        else:
            return found
    return {}


def reduced(jpeg: bytes, edge: int) -> bytes:
    """Return a picture at most `edge` pixels wide and high. Raises OSError if it cannot be decoded."""
    try:
        with Image.open(BytesIO(jpeg), formats=["JPEG"]) as picture:
            is_small = max(picture.size) <= edge and len(jpeg) <= SMALL_BYTES
            picture.draft("RGB", (edge, edge))  # lets the decoder skip detail
            picture.load()
            if is_small:
                return jpeg
            picture.thumbnail((edge, edge))
            plain = picture.convert("RGB")
            plain.info.clear()  # comments and profiles would be written too
            smaller = BytesIO()
            plain.save(smaller, "JPEG", quality=JPEG_QUALITY)
    except Image.DecompressionBombError as error:
        raise OSError(str(error)) from error
    except UnidentifiedImageError as error:
        raise OSError("not a readable JPEG") from error
    return smaller.getvalue()
