"""RUN/report/samples.html: everything about single samples, with their history over snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ...files import write_atomically
from ..inspection import summary
from ..inspection.details import Details
from ..inspection.findings import Findings
from ..inspection.history import History
from ..inspection.run import Inspection
from .document import document
from .figures.over_time import draw_history
from .html import Cell, data_uri, facts_list, figure, table
from .pictures import read_pictures
from .sheets import facts, state_word

PAGE = "samples.html"


def write_samples(
    findings: Findings, details: Mapping[int, Details], histories: Sequence[History], folder: Path
) -> Path:
    """Write the page into `folder` atomically and return its path.

    Pictures that cannot be shown are added to the findings' notes.
    """
    folder.mkdir(exist_ok=True)
    inspection, survey, notes = findings.inspection, findings.survey, findings.notes
    ids = [history.sample_id for history in histories]
    pictures = read_pictures(inspection.dataset, ids, notes) if inspection.dataset else {}
    parts = {
        f"Sample {history.sample_id}": _sample(inspection, details[history.sample_id], history, pictures)
        for history in histories
    }
    name, lede = inspection.run.path.resolve().name, f"Everything recorded about {len(ids):,} samples."
    shown = summary.what(inspection, survey) if survey else ""
    write_atomically(folder / PAGE, document("Samples of {}", name, lede, shown, notes, parts).encode())
    return folder / PAGE


def _sample(inspection: Inspection, details: Details, history: History, pictures: Mapping[int, bytes]) -> str:
    content = ""
    if jpeg := pictures.get(history.sample_id):
        uri, words = data_uri(jpeg, "image/jpeg"), f"picture of sample {history.sample_id}"
        content = f'<p class="picture"><img src="{uri}" alt="{words}"></p>'
    content += facts_list([*facts(details), *ranks(inspection, history)])
    if not history.states:
        return content
    if inspection.sides:
        caption = (
            f"Tau of sample {history.sample_id} at every snapshot ({len(history.states)}); hollow before its first "
            f"visit. {summary.settings(inspection)}."
        )
        draw = partial(draw_history, history, inspection.sides)
        content += figure(draw, f"Tau of sample {history.sample_id}", caption)
    return content + table("Its state at every snapshot.", *history_table(history))


def ranks(inspection: Inspection, history: History) -> list[tuple[str, str]]:
    """Return the rank of the sample's tau among all, as (label, text) pairs."""
    words = "higher than {} of the visited samples"
    return [(f"{side} tau among all", words.format(summary.share(rank))) for side, rank in history.ranks.items()]


def history_table(history: History) -> tuple[list[str], list[list[str | Cell]]]:
    """Return head and rows of a table, one row per snapshot (at least one), oldest first."""
    columns = list(history.states[0].values)
    rows: list[list[str | Cell]] = [
        [state.snapshot.tag, *(_cell(state.values[column]) for column in columns)] for state in history.states
    ]
    return ["snapshot", *map(state_word, columns)], rows


def _cell(value: float | int) -> Cell:
    return Cell(f"{value:,}" if isinstance(value, int) else f"{value:.6g}", float(value))
