"""What is said before all else of a run's coldest samples: whether they are a crowd, and what they have in common."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter

import numpy as np

from ...trainer.errors import RunError
from ..printing import plain_text
from .duplicates.finding import DUPLICATES, read_clusters
from .reading.opening import Inspection
from .temperatures.groups import CLASS_COLUMN
from .temperatures.kinds import CROWDED, KIND_NAMES, RARE
from .temperatures.samples import Sample
from .temperatures.survey import Survey

MANY_CROWDED = 0.01
"""Share of the samples."""
MIN_SAMPLES = 20
"""Fewer have something in common by chance."""
_LONGEST = 100
_MOST_PAIRS = 1 << 21
"""More would keep every inspection waiting for a second, and take 200 MB."""


def said_first(inspection: Inspection, survey: Survey, samples: Mapping[int, Sample]) -> list[str]:
    """Return sentences on the coldest samples, most often none. samples: those that the survey shows, by id."""
    kinds = survey.kinds
    if kinds is None or not kinds.worth_showing:
        return []
    said = []
    crowded, rho = kinds.counts.get(KIND_NAMES[CROWDED], 0), kinds.rules.rho
    if rho is not None and crowded >= MANY_CROWDED * survey.samples:
        said.append(
            f"{crowded:,} of {survey.samples:,} samples are crowded: more of the others than rho = {rho:g} leaves room "
            f"for ({100 * math.exp(-rho):.3g}%) are as close to them as their own positive, so they are cold without "
            "being rare."
        )
    ends = [id for sheet in survey.sheets if sheet.end == "lowest" for id in sheet.sample_ids]
    random = [id for sheet in survey.sheets if sheet.side is None for id in sheet.sample_ids]
    lists = {"coldest": list(dict.fromkeys(ends)), "coldest rare": kinds.sheets.get(KIND_NAMES[RARE], [])}
    columns = _columns(inspection, samples)
    for which, ids in lists.items():
        shared = [
            (*common, name)
            for name, values in columns.items()
            if (common := _in_common([values[id] for id in ids], [values[id] for id in random]))
        ]
        if shared:
            count, value, chance, name = max(shared, key=itemgetter(0))
            said.append(
                f"Of the {len(ids)} {which} samples, {count} have the {name} “{value}”, of {len(random)} "
                f"random ones {chance}."
            )
    return said


def _columns(inspection: Inspection, samples: Mapping[int, Sample]) -> dict[str, dict[int, str]]:
    """Return what samples may have in common, by its name: id -> value, empty without one."""
    found = {
        name: {id: plain_text(str(sample.table.get(column) or ""), _LONGEST) for id, sample in samples.items()}
        for name, column in (("caption", "caption"), ("class", CLASS_COLUMN))
    }
    if inspection.dataset:
        with suppress(RunError, OSError):  # most often none were looked for
            ids, of = read_clusters(inspection.run.report / DUPLICATES, inspection.dataset, _MOST_PAIRS)
            shown = np.flatnonzero(np.isin(ids, list(samples)))
            clusters = dict(zip(ids[shown].tolist(), map(str, of[shown].tolist()), strict=True))
            found["cluster of duplicates"] = {id: clusters.get(id, "") for id in samples}
    return found


def _in_common(values: Sequence[str], of_random: Sequence[str]) -> tuple[int, str, int] | None:
    """Return how many have the value that most have, and how many of the random ones; None if it is common anyway."""
    if len(values) < MIN_SAMPLES or not of_random:
        return None
    ((value, count),) = Counter(values).most_common(1)
    chance = of_random.count(value)
    concentrated = 2 * count >= len(values) and count / len(values) >= 2 * chance / len(of_random)
    return (count, value, chance) if value and concentrated else None
