"""Samples on contact sheets: their pictures, facts and neighbours. The page's script adds paging and enlarging."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import NamedTuple

from markupsafe import Markup
from PIL import Image, UnidentifiedImageError

from ...pipeline.errors import DatasetError
from ...pipeline.opening import Dataset
from ...state_store.schema import VISITS
from ..inspection.features.neighbours import PICTURES, Neighbours, Ranking
from ..inspection.summary import kind_words, per_side, share
from ..inspection.temperatures.samples import InspectedSample
from ..printing import plain_text

_TABLE = {
    "part": "part",
    "id_in_part": "id in the part",
    "group": "class",
    "caption": "caption",
    "uri": "uri",
    "key": "key",
    "width": "width (pixels)",
    "height": "height (pixels)",
    "altered": "altered",
}
"""Columns of the samples table shown on a card -> their labels."""
_VISITS, _LOG_S, _TAU = ("visits", "{:,}"), ("log_s", "{:+.2f}"), ("tau", "{:.4f}")
_FIGURES = {"too_few_visits": (_VISITS,), "stuck": (_LOG_S,), "misfit": (_LOG_S,), "ordinary": (_TAU, _LOG_S, _VISITS)}
"""Kind -> field of the state and format of the figure on a card; the first that the state has."""
EDGES = (384, 288, 224, 160, 112, 80, 48)
"""Sizes to try for a picture's longer side, in pixels, from clear to barely recognisable."""
SMALL_BYTES = 1 << 15
"""A small picture in a larger file is re-encoded to drop what else the file holds."""


@dataclass(frozen=True)
class Cards:
    samples: Mapping[int, InspectedSample]
    pictures: Mapping[int, Markup]
    """Id -> data URI; some may be missing."""
    longest: int
    """Characters of a text shown in full."""


def facts(sample: InspectedSample) -> list[tuple[str, str]]:
    """Return everything known about a sample, as (label, text) pairs."""
    known = [("id", str(sample.sample_id))]
    known += [(word, str(sample.table[name])) for name, word in _TABLE.items() if sample.table.get(name) is not None]
    if sample.kind:
        known.append(("kind", kind_words(sample.kind)))
    # Tau first: it is what readers look for.
    state = sorted(sample.state.items(), key=lambda item: not item[0].endswith("tau"))
    known += [(state_word(name), number(value)) for name, value in state]
    others = "visited samples" if VISITS in sample.state else "samples"
    ranks = {side: f"higher than {share(rank)} of the {others}" for side, rank in sample.ranks.items()}
    return known + [(f"{side} tau among all", words) for side, words in ranks.items()]


def state_word(column: str) -> str:
    """Return the label of a column of the state: `image tau` for `image/tau`."""
    side, _, field = column.rpartition("/")
    return f"{side} {field}".strip().replace("_", " ")


def by_side(sample: InspectedSample, field: str, form: str) -> str:
    """Return a field of the state of each side, `+0.93 (image) and +0.92 (text)`; empty if no side has it."""
    columns = {column: value for column, value in sample.state.items() if column.rpartition("/")[2] == field}
    return per_side({column.rpartition("/")[0]: form.format(value) for column, value in columns.items()})


def kind_figure(kind: str, sample: InspectedSample) -> str:
    """Return the figure that a sample of this kind is known by, per side."""
    shown = ((state_word(field), by_side(sample, field, form)) for field, form in _FIGURES[kind])
    return next((f"{word} {figures}" for word, figures in shown if figures), "")


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


def data_uri(data: bytes, kind: str) -> Markup:
    """Return a file as an attribute of HTML."""
    return Markup(f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}")


def data_uris(pictures: Mapping[int, bytes], shown: Sequence[int], max_bytes: int) -> dict[int, Markup]:
    """Return pictures by id at the largest of EDGES at which all fit `max_bytes`; empty if none fits.

    pictures: JPEGs by id, from `read_pictures`. shown: ids, repeated as often as shown; some may have no picture.
    """
    for edge in EDGES:
        found: dict[int, Markup] = {}
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
            plain.save(smaller, "JPEG", quality=80)
    except Image.DecompressionBombError as error:
        raise OSError(str(error)) from error
    except UnidentifiedImageError as error:
        raise OSError("not a readable JPEG") from error
    return smaller.getvalue()


Around = Mapping[int, Neighbours]
"""Sample id -> its neighbours."""


class Listing(NamedTuple):
    """One ranking with its heading."""

    title: str
    words: str
    """A remark on it; may be empty."""
    ranking: Ranking


def listings(sample: InspectedSample, found: Neighbours) -> list[Listing]:
    """Return every ranking of a sample in the order shown."""
    pair = found.pair_similarity
    own = "" if pair is None else f"The sample's own picture and caption have a similarity of {pair:.3f}."
    shown = [Listing(f"Nearest {kind}", own * (kind == PICTURES), ranking) for kind, ranking in found.nearest.items()]
    for side, ranking in found.negatives.items():
        of_side = {"image": ": captions for its picture", "text": ": pictures for its caption"}.get(side, "")
        words = "Without a temperature of the sample's own, they have no weights."
        if ranking.weights is not None:
            tau = number(sample.state[f"{side}/tau"])
            together = f"these have {share(float(ranking.weights.sum()))} together"
            words = f"p* is the weight of a negative among all of them at {side} tau {tau}; {together}."
        shown.append(Listing(f"Hardest negatives{of_side}", words, ranking))
    return shown


def table_of(listing: Listing, samples: Mapping[int, InspectedSample]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table for the terminal; samples: those listed, by id."""
    ids, weights = listing.ranking.sample_ids.tolist(), listing.ranking.weights
    columns = {">id": list(map(str, ids)), ">similarity": [f"{value:.4f}" for value in listing.ranking.similarity]}
    if weights is not None:
        columns[">p*"] = [f"{weight:.3g}" for weight in weights]
    for name, title in (("group", "class"), ("caption", "caption")):
        texts = [samples[id].table.get(name) for id in ids]
        if any(text is not None for text in texts):
            columns[title] = [plain_text(text or "", 80) for text in texts]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def figures(ranking: Ranking) -> list[str]:
    """Return the figures on the card of each sample of a ranking."""
    similarities = [f"similarity {value:.3f}" for value in ranking.similarity]
    if ranking.weights is None:
        return similarities
    return [f"p* {share(float(weight))}, {words}" for weight, words in zip(ranking.weights, similarities, strict=True)]


def listed_ids(found: Iterable[Neighbours]) -> list[int]:
    """Return the ids of all samples listed, repeated as often as they are shown."""
    rankings = [ranking for each in found for ranking in (*each.nearest.values(), *each.negatives.values())]
    return [id for ranking in rankings for id in ranking.sample_ids.tolist()]
