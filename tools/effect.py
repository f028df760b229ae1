"""`thermopile effect`: how far the scores of runs are apart on the same test samples, with the errors of that."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from markupsafe import Markup
from pydantic import TypeAdapter

from ..pipeline.mixture import open_dataset, opened
from ..storage.files import write_atomically
from ..storage.place import Place, Places
from ..trainer.errors import RunError
from ..trainer.run_directory import RunDirectory
from .arguments import ANY_PLACE, DatasetPath
from .eval import eval_, label, scored
from .inspection.findings import read_again
from .inspection.reading.opening import Inspection
from .inspection.temperatures.drift import Drift, drift
from .inspection.temperatures.samples import read_samples
from .printing import print_facts, print_table
from .report.figures.effect import draw_effect
from .report.figures.style import LIGHT, png_of
from .report.html import document, part
from .report.page import MAX_BYTES
from .report.sheets import Cards, data_uris, read_pictures

Apart = tuple[Drift | None, Markup, list[str]]


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile effect runs/glyphs runs/without-tail --test data/glyphs-test --out effect.png\n"
    "  thermopile effect runs/a0 runs/b0 runs/a1 runs/b1 --test data/glyphs-test --at step-400 --json"
)
@click.argument("runs", nargs=-1, required=True, type=ANY_PLACE, metavar="A B [A B]...")
@click.option("--train", type=DatasetPath(), help="As for eval. Default: the dataset of the first A.")
@click.option("--out", type=click.Path(path_type=Path), help="PNG to draw; .html beside it: tau furthest apart.")
def effect(runs: tuple[Place, ...], train: Place | None, out: Path | None, **asked: Any) -> None:
    """Show how far the scores of B are above those of A on the same test samples. More pairs are of other seeds.

    The scores are eval's, without linear probes. Errors are standard errors: of test samples, in clusters where they
    share a caption, and of seeds where several pairs are given. Works while the runs train and changes nothing.
    """
    if len(runs) % 2:
        raise click.UsageError("the number of runs is odd; give A and B, then A and B of another seed")
    if out and (out.suffix.lower() != ".png" or not out.parent.is_dir()):
        raise click.UsageError(f"--out {out} is not a .png file in an existing folder")
    as_json, tars, at, data = asked.pop("as_json"), asked.pop("tars"), asked["at"], asked["data"]
    test, (own, *_) = opened(asked.pop("test"), tars), [RunDirectory(run).config().data for run in runs]
    trained = opened(train, tars) if train else open_dataset(data or own.places, own.tars)
    every = {run: scored(run, trained, test, with_probes=False, **asked) for run in dict.fromkeys(runs)}
    from ..trainer.evaluation.paired import differences

    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    bands, classes = differences([(every[a], every[b]) for a, b in pairs])
    drifts, sheets, said = zip(*(_temperatures(a, b, at, data, MAX_BYTES // len(pairs)) for a, b in pairs), strict=True)
    notes = [*dict.fromkeys(note for found in (*(each.notes for each in every.values()), *said) for note in found)]
    if len(every) < max(4, len(runs)):
        notes.append("The errors leave out how another seed would change a run; for that, give pairs of other seeds.")
    if not bands:
        raise RunError(f"nothing to compare: {' '.join(notes)}")
    names = [f"{run}, {every[run].checkpoint}, {every[run].weights} {asked['network']} weights" for run in runs]
    rows = {label(method, variant): found for method, of in bands.items() for variant, found in of.items()}
    if out:
        write_atomically(out, png_of(partial(draw_effect, rows), LIGHT, "95 % intervals; thin: if not paired"))
        parts = {f"Pair {number}": sheet for number, sheet in enumerate(sheets, start=1)}
        page = document("Temperatures of", ", ".join(names), "Tau in A → tau in B.", "", notes, parts).encode()
        write_atomically(out.with_suffix(".html"), page)
    if as_json:
        taus = TypeAdapter(tuple[Drift | None, ...]).dump_python(drifts, mode="json", by_alias=True)
        found = {"runs": names, "scores": bands, "classes": classes, "temperatures": taus, "notes": notes}
        click.echo(json.dumps(found, allow_nan=False))
        return
    print_facts([*zip("AB" * len(pairs), names, strict=True), *(("note", note) for note in notes)])
    firsts = {label(method, next(iter(of))): next(iter(of.values())) for method, of in classes.items()}
    by_class = {name: {head: of[name] for head, of in firsts.items()} for name in every[runs[0]].classes.names}
    order = sorted(by_class, key=lambda name: -max(abs(of["mean"]) if of else 0 for of in by_class[name].values()))
    for title, table in (("B − A", rows), ("10 classes furthest apart", {name: by_class[name] for name in order[:10]})):
        for of_first in [*table.values()][:1]:
            lines = [[name, *map(_cell, of.values())] for name, of in table.items()]
            print_table([f"{title}, points ± error (unpaired)", *(f">{head}" for head in of_first)], lines)


def _cell(of: dict[str, float] | None) -> str:
    return f"{100 * of['mean']:+.1f} ± {100 * of['error']:.1f} ({100 * of['unpaired_error']:.1f})" if of else "–"


def _temperatures(a: Place, b: Place, at: str, data: Places | None, room: int) -> Apart:
    """Return how far tau is apart, sheets of the samples where it is furthest, and notes on what is missing."""

    def read(first: Inspection, second: Inspection) -> Apart:
        found, dataset = drift(first, second), first.dataset
        ids = [
            one.sample_id for side in (found.sides if found else ()) for one in (*side.most_risen, *side.most_fallen)
        ]
        pictures = data_uris(read_pictures(dataset, ids, first.notes) if dataset else {}, ids, room)
        cards = Cards(read_samples(replace(second, dataset=dataset), ids), pictures, longest=100)
        return found, part("sections.html", "movers", found, cards), [*first.notes, *second.notes]

    return read_again(lambda first: read_again(partial(read, first), b, at, None), a, at, data)


effect.params += [option for option in eval_.params if option.name not in {"run", "train"}]
