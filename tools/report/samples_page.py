"""RUN/report/samples.html: everything about single samples, with their history over snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ...files import write_atomically
from ..inspection import summary
from ..inspection.run import Inspection
from ..inspection.samples import Sample
from ..inspection.survey import Survey
from .figures.over_time import draw_history
from .html import Cell, Row, data_uri, document, facts_list, figure, table
from .pictures import read_pictures
from .sheets import facts, number, state_word

PAGE = "samples.html"


def write_samples(inspection: Inspection, survey: Survey | None, samples: Sequence[Sample], folder: Path) -> Path:
    """Write the page into `folder` atomically and return its path. Pictures that cannot be shown are noted."""
    folder.mkdir(exist_ok=True)
    ids = [sample.sample_id for sample in samples]
    pictures = read_pictures(inspection.dataset, ids, inspection.notes) if inspection.dataset else {}
    parts = {f"Sample {sample.sample_id}": _part(inspection, sample, pictures) for sample in samples}
    name, lede = inspection.run.path.resolve().name, f"Everything recorded about {len(ids):,} samples."
    shown = summary.what(inspection, survey) if survey else ""
    html = document("Samples of {}", name, lede, shown, inspection.notes, parts)
    write_atomically(folder / PAGE, html.encode())
    return folder / PAGE


def _part(inspection: Inspection, sample: Sample, pictures: Mapping[int, bytes]) -> str:
    content = ""
    if jpeg := pictures.get(sample.sample_id):
        uri, words = data_uri(jpeg, "image/jpeg"), f"picture of sample {sample.sample_id}"
        content = f'<p class="picture"><img src="{uri}" alt="{words}"></p>'
    content += facts_list(facts(sample))
    if not sample.history:
        return content
    if inspection.sides:
        caption = (
            f"Tau of sample {sample.sample_id} at every snapshot ({len(sample.history)}); hollow before its first "
            f"visit. {summary.settings(inspection)}."
        )
        draw = partial(draw_history, sample.history, inspection.sides)
        content += figure(draw, f"Tau of sample {sample.sample_id}", caption)
    return content + table("Its state at every snapshot.", *history_table(sample))


def history_table(sample: Sample) -> tuple[list[str], list[Row]]:
    """Return head and rows of a table, one row per snapshot (at least one), oldest first."""
    rows: list[Row] = [
        [at.snapshot.tag, *(Cell(number(value), float(value)) for value in at.values.values())] for at in sample.history
    ]
    return ["snapshot", *map(state_word, sample.history[0].values)], rows
