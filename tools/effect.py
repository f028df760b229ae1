"""`thermopile effect`: differences of two runs' scores on the same test samples, with their errors."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import TypeAdapter

from ..storage.files import write_atomically
from ..storage.place import Place, Places
from ..trainer.errors import RunError
from ..trainer.run_directory import RunDirectory
from .arguments import ANY_PLACE, DATASET
from .eval import PROBES, eval_, label, scored, training_set
from .printing import print_facts, print_table
from .progress import working

if TYPE_CHECKING:
    from markupsafe import Markup

    from .inspection.opening import Inspection
    from .inspection.temperatures.drift import Drift


@click.command(
    epilog="\b\nExamples:\n"
    "  thermopile effect runs/glyphs runs/without-tail --test data/glyphs-test --out effect.html\n"
    "  thermopile effect runs/a0 runs/b0 runs/a1 runs/b1 --test data/glyphs-test --at step-400 --json"
)
@click.argument("runs", nargs=-1, required=True, type=ANY_PLACE, metavar="A B [A B]...")
@click.option("--train", type=DATASET, help="As for eval. Default: the dataset of the first A.")
@click.option("--out", type=click.Path(path_type=Path), help="Page (.html): a figure, and where tau is furthest apart.")
def effect(runs: tuple[Place, ...], train: Place | None, out: Path | None, **asked: Any) -> None:
    """Show how far the scores of B are above those of A on the same test samples. More pairs are of other seeds.

    The scores are eval's, without linear probes. Errors are standard errors: of test samples, for retrieval in clusters
    that share a caption, and of seeds if several pairs are given. Works while the runs train and changes nothing.
    """
    if len(runs) % 2:
        raise click.UsageError("the number of runs is odd; give A and B, then A and B of another seed")
    from ..pipeline.opening import opened
    from .inspection.rows_export import check_target
    from .inspection.temperatures.drift import Drift
    from .report.html import document, part
    from .report.page import MAX_PAGE_BYTES

    if out:
        check_target(out, [".html"], overwrite=True)
    as_json, tars, at, data = asked.pop("as_json"), asked.pop("tars"), asked["at"], asked.pop("data")
    test, configs = opened(asked.pop("test"), tars), [RunDirectory(run).config() for run in runs]
    trained = training_set(RunDirectory(runs[0]), train, tars, data)
    pairs, room = list(zip(runs[::2], runs[1::2], strict=True)), 2 * MAX_PAGE_BYTES // len(runs) if out else 0
    drifts, sheets, of_pairs = zip(*(_taus(a, b, at, data, room) for a, b in pairs), strict=True)
    every = {run: scored(run, trained, test, **asked) for run in dict.fromkeys(runs)}
    from ..trainer.evaluation.paired import differences

    bands, classes = differences([(every[a], every[b]) for a, b in pairs])
    rows = {label(method, variant): found for method, of in bands.items() for variant, found in of.items()}
    notes = [*dict.fromkeys(note for found in (*(each.notes for each in every.values()), *of_pairs) for note in found)]
    if min(len({config.seed for config in side}) for side in (configs[::2], configs[1::2])) < max(2, len(pairs)):
        notes.append("The errors leave out how another seed would change a run; for that, give pairs of other seeds.")
    without_error = [name for name, of in rows.items() if not of["all"]]
    notes += [f"No error of {name}: it takes two queries without a common caption." for name in without_error]
    if not rows:
        raise RunError(f"nothing to compare: {' '.join(notes)}")
    names = [f"{run}, {every[run].checkpoint}, {every[run].weights} {asked['network']} weights" for run in runs]
    facts = list(zip("AB" * len(pairs), names, strict=True))
    if out:
        tags = [f"{found.earlier.tag} → {found.later.tag}" if found else "no temperatures" for found in drifts]
        parts = {"Scores": part("sections.html", "effect", rows)}
        parts |= {f"Tau in A → tau in B, pair {i}: {of}": sheets[i - 1] for i, of in enumerate(tags, 1)}
        page = document("B − A", "", "", "", [*map(": ".join, facts), *notes], parts)
        write_atomically(out, page.encode())
    if as_json:
        taus = TypeAdapter(tuple[Drift | None, ...]).dump_python(drifts, mode="json", by_alias=True)
        found = {"runs": names, "scores": bands, "classes": classes, "temperatures": taus, "notes": notes}
        click.echo(json.dumps(found, allow_nan=False))
        return
    print_facts(facts, notes)
    lines = [[name, *map(_cell, of.values())] for name, of in rows.items()]
    print_table(["B − A, points ± error (unpaired)", *(f">{band}" for band in next(iter(rows.values())))], lines)
    firsts = {label(method, next(iter(of))): next(iter(of.values())) for method, of in classes.items()}
    apart = [(one, name, score) for score, of in firsts.items() for name, one in of.items() if one and one["mean"]]
    apart.sort(key=lambda each: -abs(each[0]["mean"]) * each[0]["queries"])
    lines = [[name, score, _cell(one), f"{one['queries']:,}"] for one, name, score in apart[:10]]
    if lines:
        print_table(["classes furthest apart", "score", ">points ± error (unpaired)", ">queries"], lines)


def _cell(of: dict[str, float] | None) -> str:
    return f"{100 * of['mean']:+.1f} ± {100 * of['error']:.1f} ({100 * of['unpaired_error']:.1f})" if of else "–"


def _taus(a: Place, b: Place, at: str, data: Places | None, room: int) -> tuple[Drift | None, Markup, list[str]]:
    """Return how far tau is apart, sheets of the samples where it is furthest, pictures in `room` bytes, and notes."""
    from .inspection.findings import read_again
    from .inspection.temperatures.drift import drift
    from .inspection.temperatures.samples import read_samples
    from .report.html import part
    from .report.sheets import Cards, data_uris, read_pictures

    def read(first: Inspection, second: Inspection) -> tuple[Drift | None, Markup, list[str]]:
        with working("comparing temperatures"):
            found, dataset = drift(first, second), first.dataset if room else None
        sides = found.sides if found else ()
        ids = [sample.sample_id for side in sides for sample in (*side.most_risen, *side.most_fallen)]
        pictures = data_uris(read_pictures(dataset, ids, first.notes) if dataset else {}, ids, room)
        cards = Cards(read_samples(replace(second, dataset=dataset), ids), pictures, longest=100)
        return found, part("sections.html", "movers", found, cards), [*first.notes, *second.notes]

    return read_again(lambda first: read_again(partial(read, first), b, at, None), a, at, data)


effect.params += [option for option in eval_.params if option.name not in {"run", "train", *PROBES}]
