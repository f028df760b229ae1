"""RUN/report/samples.html: everything about single samples, with their history over the snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...pipeline.errors import DatasetError
from ...trainer.files import write_atomically
from ..inspection import summary
from ..inspection.details import Details
from ..inspection.history import History
from ..inspection.run import Inspection
from .document import document
from .figures.over_time import draw_history
from .html import Cell, data_uri, facts_list, figure, table
from .pictures import EDGES, reduced
from .sheets import facts, state_word

PAGE = "samples.html"


def write_samples(
    inspection: Inspection, details: dict[int, Details], histories: Sequence[History], notes: list[str]
) -> Path:
    """Write the page, whole or not at all, and return its path; notes: in plain words, what is missing."""
    folder, said = inspection.run.report, list(notes)
    folder.mkdir(exist_ok=True)
    parts = {
        f"Sample {history.sample_id}": _sample(inspection, details[history.sample_id], history, said)
        for history in histories
    }
    ids = ", ".join(str(history.sample_id) for history in histories)
    name = inspection.run.path.resolve().name
    lede = f"All that is known of the samples {ids}, and what became of them."
    page = document("Samples of {}", name, lede, summary.settings(inspection), said, parts)
    write_atomically(folder / PAGE, page.encode())
    return folder / PAGE


def _sample(inspection: Inspection, details: Details, history: History, notes: list[str]) -> str:
    content = _picture(inspection, details.sample_id, notes)
    content += facts_list([*facts(details), *ranks(inspection, history)])
    if not history.states:
        return content
    caption = (
        f"Tau of sample {history.sample_id} at every snapshot; hollow where it was not visited yet. "
        f"{summary.settings(inspection)}."
    )
    content += figure(partial(draw_history, history, inspection.labels), f"Tau of sample {history.sample_id}", caption)
    return content + table("Its row of the state at every snapshot.", *history_table(history))


def _picture(inspection: Inspection, sample_id: int, notes: list[str]) -> str:
    if inspection.dataset is None:
        return ""
    try:
        uri = data_uri(reduced(inspection.dataset.jpeg(sample_id), EDGES[0]), "image/jpeg")
    except (DatasetError, OSError) as error:
        notes.append(f"The picture of sample {sample_id} cannot be shown: {error}")
        return ""
    return f'<p class="picture"><img src="{uri}" alt="picture of sample {sample_id}"></p>'


def ranks(inspection: Inspection, history: History) -> list[tuple[str, str]]:
    """Where the sample's tau lies among all, as pairs of a word and a text."""
    words = "higher than that of {} of the visited samples"
    return [
        (f"{inspection.labels[side]} tau among all", words.format(summary.share(rank)))
        for side, rank in history.ranks.items()
    ]


def history_table(history: History) -> tuple[list[str], list[list[str | Cell]]]:
    """Head and rows of a table, a row for each snapshot, oldest first; of at least one."""
    columns = list(history.states[0].values)
    rows: list[list[str | Cell]] = [
        [state.snapshot.tag, *(_cell(state.values[column]) for column in columns)] for state in history.states
    ]
    return ["snapshot", *map(state_word, columns)], rows


def _cell(value: float | int) -> Cell:
    return Cell(f"{value:,}" if isinstance(value, int) else f"{value:.4g}", float(value))
