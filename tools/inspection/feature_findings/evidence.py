"""The kinds of samples that features show, each with its evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..json_fields import AsJson, Hidden, named
from ..temperatures import kinds
from ..temperatures.associations import Association, ends_of
from .properties import NEAREST, OF_FEATURES, Properties

RARE_BY = ("class_size", "rarest_word", "near_pictures", "near_captions")
"""Properties of which little means that few samples are like this one."""
LITTLE = 0.1
"""A rare sample's property is among the lowest tenth."""
APART = 0.5
"""Correlation of two aligned pictures below which they are not alike."""
TOO_NEAR = 0.9
"""Cosine of the three nearest above which a model hardly tells a sample from them."""


class Evidence(NamedTuple):
    """Evidence for the kind of a sample."""

    words: str
    nearest: str
    """The ids of the nearest samples, and their cosine."""


@dataclass(frozen=True)
class EvidentKinds:
    """The kinds of m samples whose features were looked at."""

    sample_ids: Annotated[NDArray[np.int64], AsJson(len), named("samples")]
    """int64 [m], ascending."""
    codes: Hidden[kinds.Codes]
    """int8 [m]: by the state alone, unless that is `ordinary`."""
    counts: dict[str, int]
    """Kind -> number of samples; only those that need features."""
    evident: Hidden[dict[str, int]]
    """Kind -> number of samples that are so, whichever kind comes first for them."""
    sheets: dict[str, list[int]]
    """Kind -> ids to show, the most typical first."""
    evidence: Hidden[dict[int, Evidence]]
    """Evidence for the kinds of the samples shown, by id."""
    rare_by: str | None
    """The property by which samples are rare, one of RARE_BY; None if none goes with this run's temperatures."""


def evident_kinds(
    found: Properties,
    tau: Mapping[str, NDArray[np.float32]],
    associations: Mapping[str, Sequence[Association]],
    of_state: kinds.Codes,
) -> EvidentKinds:
    """Decide the kinds of m samples, the first that applies.

    tau: by side, float32 [m], solved. associations: by side, of these temperatures. of_state: int8 [m], as KindRules.

    Crowded: no temperature from tau_min on is low enough. Copied: a near-copy was seen, by the test of `--duplicates`,
    or the same file. Not told apart: the three nearest pictures are TOO_NEAR, and neither those nor their captions are
    alike. Rare: at an end of the temperatures that goes with little of a property of RARE_BY, and with little of it.
    """
    around, copies = found.around["pictures"], found.values["copies"]
    applies: dict[int, NDArray[np.bool_]] = {
        kinds.CROWDED: np.any([of_side == 0 for of_side in tau.values()], axis=0),
        kinds.COPIED: copies > 0,
        kinds.NOT_TOLD_APART: _not_told_apart(found),
    }
    order: dict[int, NDArray[np.floating]] = {
        kinds.CROWDED: -around.near,
        kinds.COPIED: -copies,
        kinds.RARE: around.near,
    }
    order[kinds.NOT_TOLD_APART] = -around.similarity[:, -1]
    notable = [  # ends that go with low values of a property of RARE_BY
        (side, each)
        for side, of_side in associations.items()
        for each in of_side
        if each.of in RARE_BY and each.is_notable and each.area < 0.5 and (each.of in OF_FEATURES or each.stands)
    ]
    if rare_by := min(notable, key=lambda one: one[1].area, default=None):
        side, told_by = rare_by
        order[kinds.RARE] = values = found.values[told_by.of]
        at_end = ends_of(tau[side])[told_by.end]
        applies[kinds.RARE] = at_end & (values <= np.nanquantile(values, LITTLE)) & (values < np.nanmedian(values))
    codes = of_state.copy()
    for code in reversed(applies):
        codes[applies[code] & (of_state == kinds.ORDINARY)] = code
    evident = {kinds.KIND_NAMES[code]: int(applies[code].sum()) for code in applies}
    counts, sheets, evidence = dict[str, int](), dict[str, list[int]](), dict[int, Evidence]()
    for code in kinds.BY_FEATURES:
        places = np.flatnonzero(codes == code)
        shown = places[np.argsort(order[code][places], kind="stable")][: kinds.KIND_SHEET_SAMPLES]
        counts[kinds.KIND_NAMES[code]] = len(places)
        sheets[kinds.KIND_NAMES[code]] = found.sample_ids[shown].tolist()
        for place in shown.tolist():
            evidence[int(found.sample_ids[place])] = _evidence(found, place, code, rare_by and rare_by[1].of)
    return EvidentKinds(found.sample_ids, codes, counts, evident, sheets, evidence, rare_by and rare_by[1].of)


def _not_told_apart(found: Properties) -> NDArray[np.bool_]:
    around, agreed = found.around["pictures"], found.agreement
    assert agreed is not None
    correlation = agreed.correlation.reshape(-1, NEAREST)
    apart = np.asarray((around.similarity > TOO_NEAR).all(1) & (correlation < APART).all(1))
    if found.words:
        for place in np.flatnonzero(apart).tolist():
            others = [found.words[other] for other in around.nearest[place].tolist()]
            apart[place] = not any(found.words[place] & other for other in others)
    return apart


def _evidence(found: Properties, place: int, code: int, rare_by: str | None) -> Evidence:
    captions = rare_by == "near_captions" and code == kinds.RARE
    around = found.around["captions" if captions else "pictures"]
    similar = ", ".join(f"{similarity:.2f}" for similarity in around.similarity[place])
    nearest = f"ids {', '.join(map(str, found.sample_ids[around.nearest[place]].tolist()))}, cosine {similar}"
    words = f"{around.near[place]:,.0f} of {len(found.places):,} are near"
    if code == kinds.COPIED:
        copies = f"{found.values['copies'][place]:,.0f}"
        words = f"{copies} near-cop{'y' if copies == '1' else 'ies'}"
    elif code == kinds.NOT_TOLD_APART:
        words += ", and the nearest do not look alike"
    elif code == kinds.RARE and rare_by == "class_size" and found.classes is not None:
        size = f"{found.values['class_size'][place]:,.0f}"
        words = f"“{found.class_names[found.classes[place]]}” has {size} sample{'s' * (size != '1')}"
    elif code == kinds.RARE and rare_by == "rarest_word":
        count = f"{found.values['rarest_word'][place]:,.0f}"
        words = f"“{found.rarest[place]}” stands in {count} caption{'s' * (count != '1')}"
    return Evidence(words, nearest)
