"""Which samples `thermopile inspect` calls misfits, on glyphs some of whose captions were swapped.

For every seed: glyphs with a share of the captions swapped between classes and 2 % of near-duplicates, trained with the
demo's preset and a snapshot every 20 steps. n is the number of swapped captions; a list's precision is the share of its
first n that are swapped. Rules were chosen on seeds 1 and 2. Datasets and runs stay in FOLDER, so a later call makes
only what is missing.

Examples:
  python -m benchmarks.misfits misfits
  python -m benchmarks.misfits misfits --swap 0.4
  python -m benchmarks.misfits misfits --set epochs=40
"""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.state_store.durable import Repository, list_snapshots
from thermopile.storage.local import LocalPath
from thermopile.tools.bench.machine import describe_machine, words_of
from thermopile.tools.inspection import silent
from thermopile.tools.inspection.features.confirmation import Confirmation, confirm
from thermopile.tools.inspection.features.run_features import Asked, features_of
from thermopile.tools.inspection.opening import Inspection, read_run
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES, MISFIT, STUCK, KindRules
from thermopile.tools.inspection.temperatures.misfits import MAX_SNAPSHOTS, WholeRun, is_known, wrong_captions
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.config import CheckpointConfig
from thermopile.trainer.run.checkpoint_writer import KEEP_EARLY
from thermopile.trainer.run_directory import RunDirectory

from .glyph_runs import converted, trained
from .kinds import Run
from .markdown import table

DUPLICATES = 0.02
SNAPSHOTS = {"every_steps": 20, "keep_every": 20, "every_minutes": 0}
Ids = NDArray[np.int64]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", "seeds", multiple=True, default=(3, 4, 5), show_default=True, type=click.IntRange(min=0))
@click.option("--swap", "share", default=0.02, show_default=True, type=click.FloatRange(0, 0.9), help="Share swapped.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Another setting than the preset's.")
def main(folder: Path, seeds: tuple[int, ...], share: float, changes: tuple[str, ...]) -> None:
    folder.mkdir(exist_ok=True)
    settings: dict[str, object] = {f"checkpoint.{key}": value for key, value in SNAPSHOTS.items()}
    settings |= dict(change.split("=", 1) for change in changes)
    lists: dict[str, list[list[float]]] = {}
    """By list: for every seed its precision, and the share of near-duplicates in it."""
    visits: dict[str, list[tuple[float, float]]] = {}
    """By snapshot: for every seed its visits, and the precision of the state's misfits then."""
    sizes: list[str] = []
    for seed in seeds:
        source = GlyphSource(seed, swap=share, duplicate=DUPLICATES)
        data = LocalPath(converted(source, folder / f"glyphs-{share:g}-{seed}", seed))
        out = folder / "-".join(["run", f"{share:g}", str(seed), *changes])
        run = RunDirectory(trained(data, out, settings | {"seed": seed}))
        inspection = read_run(run, data=data)
        told = _told(inspection)
        swapped, duplicate = told == "swapped", np.char.startswith(told, "duplicate")
        n, ranked = int(swapped.sum()), _lists(inspection, seed)
        for name, ids in ranked.items():
            lists.setdefault(name, []).append([float(of[ids[:n]].sum() / n) for of in (swapped, duplicate)])
        for snapshot in list_snapshots(run.state)[5::10]:
            then = read_run(run, at=snapshot.tag, data=data)
            precision = float(swapped[_by_log_s(then)[:n]].sum() / n)
            visits.setdefault(snapshot.tag, []).append((_visits(then), precision))
        sizes.append(_sizes(inspection, swapped, duplicate, n))
    click.echo(words_of(describe_machine("torch")) + "\n\n" + "\n".join(sizes) + "\n")
    of_seeds = ", ".join(map(str, seeds))
    rows = []
    for name, found in lists.items():
        precisions, copies = zip(*found, strict=True)
        of_each = ", ".join(f"{value:.3f}" for value in precisions)
        rows.append((name, f"{fmean(precisions):.3f}", of_each, f"{fmean(copies):.3f}"))
    click.echo(table((f"list, seeds {of_seeds}", "swapped", "of each seed", "near-duplicates"), rows) + "\n")
    then_rows = [(tag, f"{of_seeds[0][0]:.0f}", ", ".join(f"{precision:.3f}" for _, precision in of_seeds))
                 for tag, of_seeds in visits.items()]  # fmt: skip
    click.echo(table(("snapshot", "visits, median", "first n by log s that are swapped"), then_rows))


FIRST = (36, 100, 200, 500, 1_000, 2_000, 4_000)


def wrong_judged(folder: Path, run: Run, at: str) -> dict[str, Any]:
    """Compare the expected with the true number of wrong captions, by each score, at a snapshot of a run of kinds."""
    inspection = read_run(RunDirectory(LocalPath(folder / "runs" / run.name)), at=at)
    dataset, reader, rules = _dataset(inspection), inspection.reader, KindRules.of(inspection)
    assert reader is not None
    n, (planted, _) = dataset.n, inspection.planted
    rows = reader.rows(0, n, rules.columns)
    is_wrong = np.zeros(n, np.bool_)
    is_wrong[pq.read_table(folder / "runs" / f"{run.name}.parquet")["sample_id"].to_numpy()] = True
    is_planted = rules.are_planted(range(n))
    usable = ~rules.is_stuck(rows) & (rows["visits"] > 0)
    cosine, margin = _cosines(inspection)
    scores: dict[str, NDArray[Any]] = {
        "log s": -rules.score(rows),
        "log s over the run": WholeRun(inspection).ranks(range(n)),
        "cosine": cosine,
        "margin": margin,
    }
    scores["cosine and log s"] = (rankdata(scores["cosine"]) + rankdata(scores["log s over the run"])) / n
    line: dict[str, Any] = {"samples": n, "planted": len(planted), "wrong": int((is_wrong & ~is_planted).sum())}
    for name, score in scores.items():
        of_score = usable & np.isfinite(score)
        order = np.flatnonzero(of_score & ~is_planted)
        order = order[np.argsort(score[order], kind="stable")]
        found = wrong_captions(np.searchsorted(score[order], score[of_score & is_planted], "right"), len(order))
        if found is None:
            continue
        precision, hits = found.precision, np.cumsum(is_wrong[order])
        line[name] = {
            "share": [float(is_wrong[order].mean()), *found.share],
            "true": {first: float(hits[first - 1] / first) for first in FIRST if first <= len(order)},
            "expected": {first: float(precision[first - 1]) for first in FIRST if first <= len(order)},
            "lists": {first: [float(hits[first - 1]), *of] for first, of in found.lists.items()},
        }
    return line


def said_of_wrong(found: dict[str, dict[str, Any]]) -> str:
    """Return a table of each score's errors, and the true and expected precision of every snapshot by log s."""
    names = dict.fromkeys(name for line in found.values() for name in line if isinstance(line[name], dict))
    rows, shown = [], []
    for name in names:
        lines = [line[name] for line in found.values() if name in line]
        lists = [(int(first), *of) for line in lines for first, of in line["lists"].items() if int(first) <= 2_000]
        lists = [of for of in lists if is_known(of[0], *of[3:])]  # earlier lines have all
        errors = [(value - true) / first for first, true, value, _, _ in lists]
        inside = [low <= true <= high for _, true, _, low, high in lists]
        shares = [low <= true <= high for true, _, low, high in (line["share"] for line in lines)]
        bias = [value - true for true, value, _, _ in (line["share"] for line in lines)]
        if errors:
            width = fmean([(high - low) / 2 / first for first, _, _, low, high in lists if first == 500] or [np.nan])
            figures = (fmean(errors), fmean(map(abs, errors)), fmean(inside), width, fmean(bias), fmean(shares))
            rows.append((name, str(len(lines)), *(f"{value:+.3f}" for value in figures)))
    for snapshot, line in found.items():
        if of := line.get("log s over the run"):
            pairs = (f"{true:.2f} {of['expected'][first]:.2f}" for first, true in of["true"].items())
            shown.append(f"{snapshot}: true and expected, first {', '.join(map(str, of['true']))}: {'; '.join(pairs)}")
    heading = ("score", "snapshots", "error", "its size", "inside", "half-width at 500", "share's error", "inside")
    return "\n".join([table(heading, rows), "", *shown])


def _told(inspection: Inspection) -> NDArray[np.str_]:
    """How each sample was altered; empty if it was not."""
    return np.array([altered or "" for altered in _dataset(inspection).column("altered").to_pylist()])


def _dataset(inspection: Inspection) -> Dataset:
    assert inspection.dataset is not None
    return inspection.dataset


def _lists(inspection: Inspection, seed: int) -> dict[str, Ids]:
    """Ids by list, the most suspicious first."""
    n = _dataset(inspection).n
    found = survey(inspection, (), suspects=n, over_run=True)
    assert found is not None
    confirmation = confirm(inspection, found, silent, Asked())
    assert confirmation is not None, inspection.notes
    cosine, margin = _cosines(inspection)
    return {
        "log s of the last snapshot": _by_log_s(inspection),
        f"mean rank of log s over {MAX_SNAPSHOTS} snapshots or fewer": _by_rank(inspection),
        "the same, over the snapshots that the default settings keep": _by_rank(_as_kept_by_default(inspection)),
        "misfits by a forward pass, by margin": _confirmed(confirmation, confirmation.margin),
        "lowest cosine of picture and caption": np.argsort(cosine, kind="stable"),
        "lowest cosine minus that of the hardest negative": np.argsort(margin, kind="stable"),
        "random": np.random.default_rng(seed).permutation(n),
    }


def _by_log_s(inspection: Inspection) -> Ids:
    rules, reader = KindRules.of(inspection), inspection.reader
    assert reader is not None
    return np.argsort(-rules.score(reader.rows(0, reader.samples, rules.columns)), kind="stable")


def _by_rank(inspection: Inspection) -> Ids:
    return np.argsort(WholeRun(inspection).ranks(range(_dataset(inspection).n)), kind="stable")


def _as_kept_by_default(inspection: Inspection) -> Inspection:
    """A copy of the run with the snapshots that it would have without `keep_every`."""
    path, keep = inspection.run.path, CheckpointConfig()
    assert isinstance(path, Path)
    kept = path.with_name(f"kept-{path.name}")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(path, kept, ignore=shutil.ignore_patterns("checkpoints"))
    copy = RunDirectory(kept)
    Repository(copy.state).retain(keep.keep_last, keep.keep_every, KEEP_EARLY)
    return read_run(copy, data=_dataset(inspection).place)


def _confirmed(found: Confirmation, key: NDArray[np.floating]) -> Ids:
    own = np.flatnonzero(found.kinds == MISFIT)
    return found.sample_ids[own[np.argsort(key[own], kind="stable")]]


def _visits(inspection: Inspection) -> float:
    assert inspection.reader is not None
    return float(np.median(inspection.reader.column("visits")))


def _sizes(inspection: Inspection, swapped: NDArray[np.bool_], duplicate: NDArray[np.bool_], n: int) -> str:
    """How many samples are of each kind by the state alone, and how many of those were altered."""
    rules, reader = KindRules.of(inspection), inspection.reader
    assert reader is not None
    kinds = rules.kinds(reader.rows(0, reader.samples, rules.columns), range(reader.samples))
    words = [f"{KIND_NAMES[kind]} {(of := kinds == kind).sum()} ({(of & swapped).sum()} swapped, "
             f"{(of & duplicate).sum()} near-duplicates)" for kind in (STUCK, MISFIT)]  # fmt: skip
    return f"{inspection.run.path.name}: n = {n}; {', '.join(words)}"


def _cosines(inspection: Inspection) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """By the trained encoders, float32 [n]: the cosine of every sample's picture and caption, of planted ones the
    caption that they show; and that minus the largest with 4,096 drawn captions and pictures."""
    dataset = _dataset(inspection)
    _, sides = features_of(inspection, np.arange(dataset.n), 0, Asked(), lambda done, total: None)
    pictures, captions = map(torch.from_numpy, sides)
    shown, (planted, donors) = np.arange(dataset.n), inspection.planted
    shown[planted] = donors
    cosine, hardest = (pictures * captions[shown]).sum(1), torch.full((dataset.n,), -1.0)
    drawn = torch.from_numpy(np.random.default_rng(0).permutation(dataset.n)[:4096])
    for first in range(0, dataset.n, 4096):
        rows, own = torch.arange(dataset.n)[first : first + 4096], torch.from_numpy(shown)[first : first + 4096]
        is_own = (rows[:, None] == drawn) | (own[:, None] == drawn)
        for one, other in ((pictures[rows], captions[drawn]), (captions[own], pictures[drawn])):
            hardest[rows] = torch.maximum(hardest[rows], (one @ other.T).masked_fill(is_own, -1).amax(1))
    return cosine.numpy(), (cosine - hardest).numpy()


if __name__ == "__main__":
    main()
