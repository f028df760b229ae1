"""Sentences for the top of the report, and about the list of misfits."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .feature_findings.by_features import ByFeatures
from .feature_findings.properties import OF_FEATURES
from .opening import Inspection
from .summary import per_side
from .temperatures.associations import Association
from .temperatures.misfits import LEAST_PLANTED, WrongCaptions

MAX_SENTENCES, MAX_PLANTED = 4, 0.1
"""Sentences, or lists; and share of the samples to plant."""
SETTLED = 1.15
"""Factor within which the update rule may still move the median temperature of a side that has settled."""
NAMES = {
    "rarest_word": ("rare words", "words that many captions have"),
    "word_frequency": ("rarer words on the whole", "more common words on the whole"),
    "class_size": ("small classes", "large classes"),
    "equal_captions": ("captions that few others share", "captions that many others share"),
    "copies": ("no near-copies", "near-copies"),
    "contrast": ("little contrast", "much contrast"),
    "pixels": ("small pictures", "large pictures"),
    "caption_length": ("short captions", "long captions"),
    "own_cosine": ("pictures that the model matches badly", "pictures that the model matches well"),
    "doubt": ("pairs that the model matches well over the run", "pairs that the model matches badly over the run"),
    "near_pictures": ("pictures that few others lie near in the features", "a heap of pictures in the features"),
    "near_captions": ("captions that few others lie near in the features", "a heap of captions in the features"),
}
"""Property -> words for low and for high values."""


def first_sentences(found: ByFeatures | None) -> list[str]:
    """Return sentences for the top of the report, the strongest first; empty without features."""
    if found is None:
        return []
    notable = sorted(
        ((side, each) for side, of_side in found.associations.items() for each in of_side if each.is_notable),
        key=lambda one: (one[1].of in OF_FEATURES, -abs(one[1].area - 0.5)),
    )
    sentences = [in_words(side, each) for side, each in notable[:MAX_SENTENCES]]
    moves = {side: f"{factor - 1:+.0%}" for side, factor in found.moves.items() if max(factor, 1 / factor) > SETTLED}
    if moves:
        sentences.append(
            "The temperatures have not settled: while features stay as they are, the run's own rule would still move "
            f"their median by {per_side(moves)}. Train longer."
        )
    return sentences


def misfit_sentences(inspection: Inspection, found: WrongCaptions | None) -> list[str]:
    """Return sentences about the list of misfits: the number of wrong captions, or how to measure it."""
    if found is not None:
        lists = [f"of the first {n:,}, about {_rounded(of)}" for n, of in [*found.lists.items()][:MAX_SENTENCES]]
        of_all = f"About {_rounded(100 * each for each in found.share)}% of captions are as wrong as another sample's"
        of_lists = [f"Wrong captions in the order of log s over the run: {'; '.join(lists)}."] if lists else []
        return [*of_lists, f"{of_all}; those that are wrong in part come on top."]
    pairs, planted = inspection.reader.kept if inspection.reader else 1, len(inspection.planted[0])
    why = "This is an order; the number of wrong captions is unknown"
    share = math.ceil(125 * LEAST_PLANTED / pairs) / 100
    if inspection.config.objective.mode != "bimodal" or planted >= LEAST_PLANTED or share > MAX_PLANTED:
        return [f"{why}{': planted samples have too few visits yet' if planted else ''}."]
    few = f": {planted:,} are planted, {LEAST_PLANTED} are needed" if planted else ""
    return [f"{why}{few}. To measure it, train with --set data.planted={share:g}."]


def _rounded(interval: Iterable[float]) -> str:
    return "{} ({} to {})".format(*(f"{float(f'{each:.2g}'):,g}" for each in interval))


def in_words(side: str, each: Association) -> str:
    """Return the sentence for an association, with its strength."""
    what, end = NAMES[each.of][each.area > 0.5], "Low" if each.end == "lowest" else "High"
    of_side = "" if side == "sample" else f"{side} "
    share, low, high = (100 * (value if each.area > 0.5 else 1 - value) for value in (each.area, each.low, each.high))
    figures = f"{share:.0f}% of comparisons with the rest, {min(low, high):.0f} to {max(low, high):.0f}%"
    if not each.stands:
        return (
            f"{end} {of_side}temperatures go with a heap in the features, and the model heaps up {what} ({figures}; "
            "within the heap hardly)."
        )
    return f"{end} {of_side}temperatures go with {what} ({figures})."
