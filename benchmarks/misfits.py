"""Which samples `thermopile inspect` calls misfits, on glyphs some of whose captions were swapped.

For every seed: glyphs with 2 % of the captions swapped between classes and 2 % of near-duplicates, trained with the
demo's preset. n is the number of swapped captions; a list's precision is the share of its first n that are swapped.
Datasets and runs stay in FOLDER, so a later call makes only what is missing.

Examples:
  python benchmarks/misfits.py misfits
  python benchmarks/misfits.py misfits --seeds 1 --set objective.tau_step=none
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import click
import numpy as np
import torch
from numpy.typing import NDArray

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store import list_snapshots
from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.cli import main as thermopile
from thermopile.tools.inspection.checkpoint_encoders import load_encoders
from thermopile.tools.inspection.confirmation import Confirmation, confirm
from thermopile.tools.inspection.kinds import KIND_NAMES, MISFIT, RARE, STUCK, names_of, read_rules
from thermopile.tools.inspection.run import Inspection, read_run
from thermopile.tools.inspection.survey import survey
from thermopile.trainer.build import recipe_named
from thermopile.trainer.evaluation.features import sample_features
from thermopile.trainer.preemption import EXIT_CODE
from thermopile.trainer.run_directory import RunDirectory

SHARE = 0.02
Ids = NDArray[np.int64]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Another setting than the preset's.")
def main(folder: Path, seeds: int, changes: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    lists: dict[str, list[list[float]]] = {}
    """By list: for every seed its precision, and the share of near-duplicates in it."""
    visits: dict[str, list[list[float]]] = {}
    """By snapshot: for every seed its visits, and the precision of the state's misfits then."""
    sizes: list[str] = []
    for seed in range(seeds):
        if (run := _trained(folder, seed, changes)) is None:
            return
        inspection = read_run(run, data=folder / f"glyphs-{seed}")
        told = _told(inspection)
        swapped, duplicate = told == "swapped", np.char.startswith(told, "duplicate")
        n, ranked = int(swapped.sum()), _lists(inspection, seed)
        for name, ids in ranked.items():
            lists.setdefault(name, []).append([float(of[ids[:n]].sum() / n) for of in (swapped, duplicate)])
        for snapshot in list_snapshots(run.state)[1:]:
            then = read_run(run, at=snapshot.tag, data=folder / f"glyphs-{seed}")
            found = [_visits(then), float(swapped[_misfits(then)[:n]].sum() / n)]
            visits.setdefault(snapshot.tag, []).append(found)
        sizes.append(_sizes(inspection, swapped, duplicate, n))
    click.echo(words_of(describe_machine("torch")) + "\n\n" + "\n".join(sizes) + "\n")
    click.echo(f"| list, {seeds} seeds | first n that are swapped | of each seed | near-duplicates\n|---|---|---|---|")
    for name, found in lists.items():
        precision, copies = zip(*found, strict=True)
        of_each = ", ".join(f"{value:.3f}" for value in precision)
        click.echo(f"| {name} | {fmean(precision):.3f} | {of_each} | {fmean(copies):.3f} |")
    click.echo("\n| snapshot | visits, median | first n misfits by the state that are swapped |\n|---|---|---|")
    for tag, found in visits.items():
        click.echo(f"| {tag} | {found[0][0]:.0f} | {', '.join(f'{of_seed[1]:.3f}' for of_seed in found)} |")


def _trained(folder: Path, seed: int, changes: tuple[str, ...]) -> RunDirectory | None:
    """Return the run of a seed, trained; None if training was stopped."""
    data, run = folder / f"glyphs-{seed}", folder / "-".join(["run", str(seed), *changes])
    if not data.exists():
        convert(GlyphSource(seed, swap=SHARE, duplicate=SHARE), data, ConvertSettings(seed=seed), workers=1)
    words = [word for change in (f"seed={seed}", *changes) for word in ("--set", change)]
    given = ["train", "--preset", "glyphs", "--data", str(data), "--out", str(run), "--resume", *words]
    stopped = thermopile(given, standalone_mode=False) == EXIT_CODE
    return None if stopped else RunDirectory(run)


def _told(inspection: Inspection) -> NDArray[np.str_]:
    """How each sample was altered; empty if it was not."""
    return np.array([altered or "" for altered in _dataset(inspection).column("altered").to_pylist()])


def _dataset(inspection: Inspection) -> Dataset:
    assert inspection.dataset is not None
    return inspection.dataset


def _lists(inspection: Inspection, seed: int) -> dict[str, Ids]:
    """Ids by list, the most suspicious first."""
    n = _dataset(inspection).n
    found = survey(inspection, (), suspects=n)
    assert found is not None
    confirmation = confirm(inspection, found)
    assert confirmation is not None, inspection.notes
    return {
        "misfits, by the state alone": _misfits(inspection),
        "misfits, by a forward pass": _confirmed(confirmation),
        "lowest cosine of picture and caption": np.argsort(_cosine(inspection), kind="stable"),
        "random": np.random.default_rng(seed).permutation(n),
    }


def _misfits(inspection: Inspection) -> Ids:
    """The misfits by the state alone, as the report shows them."""
    rules, reader = read_rules(inspection), inspection.reader
    assert reader is not None
    rows = reader.rows(0, reader.samples, rules.columns)
    ids = np.flatnonzero(names_of(rules.kinds(rows)) == KIND_NAMES[MISFIT])
    return ids[np.argsort(-rules.score(rows)[ids], kind="stable")]


def _confirmed(found: Confirmation) -> Ids:
    own = np.flatnonzero(found.kinds == MISFIT)
    return found.sample_ids[own[np.argsort(-found.score[own], kind="stable")]]


def _visits(inspection: Inspection) -> float:
    assert inspection.reader is not None
    return float(np.median(inspection.reader.column("visits")))


def _sizes(inspection: Inspection, swapped: NDArray[np.bool_], duplicate: NDArray[np.bool_], n: int) -> str:
    """How many samples are of each kind by the state alone, and how many of those were altered."""
    rules, reader = read_rules(inspection), inspection.reader
    assert reader is not None
    kinds = rules.kinds(reader.rows(0, reader.samples, rules.columns))
    words = [f"{KIND_NAMES[kind]} {(of := kinds == kind).sum()} ({(of & swapped).sum()} swapped, "
             f"{(of & duplicate).sum()} near-duplicates)" for kind in (STUCK, MISFIT, RARE)]  # fmt: skip
    return f"{inspection.run.path.name}: n = {n}; {', '.join(words)}"


def _cosine(inspection: Inspection) -> NDArray[np.float32]:
    """The cosine of every sample's picture and caption, float32 [n], by the trained encoders."""
    dataset, data, reader = _dataset(inspection), inspection.config.data, inspection.reader
    assert reader is not None
    encoders = load_encoders(inspection, reader.snapshot, dataset, None, False).encoders
    pictures, captions = sample_features(
        encoders, dataset, np.arange(dataset.n), recipe_named(data.recipe), data.image_size, torch.device("cpu"),
        lambda done, total: None,
    )  # fmt: skip
    cosine: NDArray[np.float32] = (pictures * captions).sum(1).numpy()
    return cosine


if __name__ == "__main__":
    main()
