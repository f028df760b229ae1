"""The neighbours and hardest negatives of a sample, as lists for the terminal and for the pages."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..inspection.features.neighbours import PICTURES, Neighbours, Ranking
from ..inspection.summary import share
from ..inspection.temperatures.samples import InspectedSample
from ..printing import plain_text
from .sheets import number

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
    words = "" if pair is None else f"The sample's own picture and caption have a similarity of {pair:.3f}."
    shown = [
        Listing(f"Nearest {kind}", words if kind == PICTURES else "", ranking)
        for kind, ranking in found.nearest.items()
    ]
    for side, ranking in found.negatives.items():
        of_side = {"image": ": captions for its picture", "text": ": pictures for its caption"}.get(side, "")
        words = "Without a temperature of the sample's own, they have no weights."
        if ranking.weights is not None:
            words = (
                f"p* is the weight of a negative among all of them at {side} tau {number(sample.state[f'{side}/tau'])}"
                f"; these have {share(float(ranking.weights.sum()))} together."
            )
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
