"""The page's section on the kinds of the samples: how many there are of each, which they are, who decided it."""

from __future__ import annotations

from ..inspection import summary
from ..inspection.confirmation import Confirmation
from ..inspection.kinds import MIN_VISITS, SampleKinds
from ..inspection.samples import Sample
from ..inspection.survey import Survey
from ..inspection.whole_run import PRECISION
from .html import per_side, table
from .sheets import Cards, state_word

MEANING = {
    "too_few_visits": f"Fewer than {MIN_VISITS} visits: tau and log s say little yet. The least visited:",
    "stuck": "Tau is at tau_min although the negatives outweigh the positive, and u is at its bound: a sample that "
             "fell there too fast and hardly learns. The highest log s:",
    "misfit": "The negatives outweigh the positive: the model has not matched the two. A wrong caption, a label error, "
              f"or a hard sample. The highest log s over the whole run first. {PRECISION}",
    "crowded": "Tau is low, but because more negatives than rho leaves room for are as close as the positive: "
               "near-copies, such as many pictures with one caption. Not rare. The coldest:",
    "rare": "Tau is among the lowest 5% of a side, and the negatives that count lie well below the positive: few "
            "others resemble the sample. The coldest:",
    "ordinary": "None of these. Random ones:",
}  # fmt: skip
"""Kind -> what it means, and which samples its sheet shows."""
_VISITS, _LOG_S, _TAU = ("visits", "{:,}"), ("log_s", "{:+.2f}"), ("tau", "{:.4f}")
_FIGURES = {"too_few_visits": (_VISITS,), "stuck": (_LOG_S,), "misfit": (_LOG_S,), "crowded": (_TAU,),
            "rare": (_TAU,), "ordinary": (_TAU, _LOG_S, _VISITS)}  # fmt: skip
"""Kind -> field of the state and format of the figure on a card; the first that the state has."""


def kinds(survey: Survey, confirmation: Confirmation | None, cards: Cards) -> str:
    """Return a table of the kinds and a contact sheet of each; empty if the state says too little."""
    found = survey.kinds
    if found is None or not found.worth_showing:
        return ""
    caption = "Every sample has the first of these kinds that applies, decided from its row of state alone"
    caption += f" or by a forward pass: {summary.confirmation(confirmation)}." if confirmation else "."
    head, rows = summary.kinds_table(found)
    content, margins = table(caption, head, rows), {}
    if confirmation:
        pairs = zip(confirmation.sample_ids.tolist(), confirmation.margin.tolist(), strict=True)
        margins = {id: f", margin {margin:+.3f}" for id, margin in pairs}
    for name, ids in found.sheets.items():
        if ids:
            shown = [(id, _figure(name, cards.samples[id]) + margins.get(id, "")) for id in ids]
            content += cards.sheet(_title(found, name), MEANING[name], shown)
    return content


def _title(found: SampleKinds, name: str) -> str:
    return f"{summary.kind_words(name)}: {len(found.sheets[name])} of {found.counts[name]:,} samples"


def _figure(kind: str, sample: Sample) -> str:
    """Return the figure that a sample of this kind is known by, per side."""
    state = sample.state
    for field, form in _FIGURES[kind]:
        sides = {column.rpartition("/")[0]: form.format(state[column])
                 for column in state if column.rpartition("/")[2] == field}  # fmt: skip
        if sides:
            return f"{state_word(field)} {per_side(sides)}"
    return ""
