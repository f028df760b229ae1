"""Judge what `thermopile inspect` says of the runs that benchmarks.kinds has made in FOLDER.

Every kept snapshot is inspected once, into FOLDER/judged, and a line with what was found is added to
benchmarks/kinds_judged.jsonl, so that the runs can be made, judged and removed one after another. The evidence on the
cards is recomputed by code that shares nothing with the product: features are read from their file as its
documentation says, words and classes from the dataset's tables.

With --wrong, the runs with wrong captions are judged instead, with a line for each snapshot in
benchmarks/wrong_judged.jsonl: by each score, the true and the expected number of wrong captions of the first samples.

\b
Examples:
  python -m benchmarks.kinds_judged kinds                    # judge what is there; a Markdown page of all lines
  python -m benchmarks.kinds_judged kinds --sentences        # every first sentence, to be read one by one
  python -m benchmarks.kinds_judged kinds --solved           # solved temperatures beside float64 over all others
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import spearmanr

from thermopile.pipeline.opening import Dataset
from thermopile.state_store.durable import list_snapshots
from thermopile.storage.local import LocalPath
from thermopile.tools.inspection import silent
from thermopile.tools.inspection.feature_findings.by_features import NEAR_OF, by_features
from thermopile.tools.inspection.feature_findings.properties import OF_FEATURES, properties
from thermopile.tools.inspection.features.features_file import FeaturesFile
from thermopile.tools.inspection.features.run_features import Asked, drawn_features, visited_features
from thermopile.tools.inspection.features.solving import compared_views, solved_temperatures
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.summary import first_sentences
from thermopile.tools.inspection.temperatures.associations import SMALL, associations
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.run_directory import RunDirectory

from .kinds import RUNS, WRONG_RUNS, Run, is_finished
from .markdown import table
from .misfits import said_of_wrong, wrong_judged
from .reproduction.running import commit

LINES = Path(__file__).with_suffix(".jsonl")
WRONG_LINES = Path(__file__).with_name("wrong_judged.jsonl")
WORD = re.compile(r"\w+")
EXACT, ALL = 1000, 1 << 40


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
@click.option("--only", multiple=True, metavar="TEXT", help="Only runs whose names begin so. Repeatable.")
@click.option("--sentences", is_flag=True, help="Print the first sentences of every snapshot instead.")
@click.option("--solved", "is_solved", is_flag=True, help="Compare solved temperatures with exact ones instead.")
@click.option("--wrong", is_flag=True, help="Judge the runs with wrong captions instead.")
def main(folder: Path, only: tuple[str, ...], sentences: bool, is_solved: bool, wrong: bool) -> None:
    folder = folder.absolute()
    if is_solved:
        runs = [run for run in RUNS if run.name.startswith(only or "") and is_finished(folder / "runs" / run.name)]
        heading = ("run", "side", "rank correlation", "median deviation of the log ratio", "bias")
        click.echo(table(heading, [row for run in runs for row in beside_all(folder, run)]))
        return
    runs, file_of_lines, judge = (WRONG_RUNS, WRONG_LINES, wrong_judged) if wrong else (RUNS, LINES, judged)
    lines = (
        [json.loads(line) for line in file_of_lines.read_text("utf-8").splitlines()] if file_of_lines.exists() else []
    )
    found: dict[str, dict[str, Any]] = {line.pop("snapshot"): line for line in lines}
    for run in runs:
        path = folder / "runs" / run.name
        if not run.name.startswith(only or "") or not is_finished(path):
            continue
        directory = RunDirectory(LocalPath(path))
        every = directory.config().checkpoint.keep_every or 1
        snapshots = list_snapshots(directory.state)
        last = max(snapshot.step for snapshot in snapshots)
        for snapshot in snapshots:
            name = f"{run.name}@{snapshot.tag}"
            is_kept = snapshot.step > 0 and snapshot.step % every == 0
            if name not in found and (is_kept or snapshot.step == last):
                found[name] = judge(folder, run, snapshot.tag)
                with file_of_lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"snapshot": name, "commit": commit(), **found[name]}) + "\n")
    found = {name: told for name, told in sorted(found.items()) if name.startswith(only or "")}
    if wrong:
        click.echo(said_of_wrong(found))
        return
    if sentences:
        for name, told in found.items():
            click.echo("\n".join([f"{name}:", *(f"  {sentence}" for sentence in told["sentences"])]))
        return
    click.echo(page(found))


def judged(folder: Path, run: Run, at: str) -> dict[str, Any]:
    """Inspect a snapshot."""
    out = folder / "judged" / f"{run.name}@{at}"
    click.echo(out.name, err=True)
    out.mkdir(parents=True, exist_ok=True)
    inspection = read_run(RunDirectory(LocalPath(folder / "runs" / run.name)), at=at)
    found = survey(inspection)
    assert found is not None
    told = by_features(inspection, found, out, Asked(), None, lambda what, done, total: None)
    assert told is not None, inspection.notes
    assert inspection.dataset is not None
    assert inspection.reader is not None
    kept = _features(folder, run.name, at)
    features = visited_features(kept, inspection.reader)
    of = properties(inspection, features, found.pool, lambda what, done, total: None)
    random = np.random.default_rng(len(run.name))
    permuted = 0
    for side, tau in told.tau.items():
        asked = {
            name: values for name, values in of.values.items() if name not in NEAR_OF.values() or name == NEAR_OF[side]
        }
        groups = {} if of.classes is None else {"class_size": of.classes}
        permuted += any(each.is_notable for each in associations(random.permutation(tau), asked, NEAR_OF[side], groups))
    planted = pq.read_table(folder / "runs" / f"{run.name}.parquet")
    of_kind = {kind: set(planted.filter(planted["planted"].to_numpy() == kind)["sample_id"].to_pylist())
               for kind in ("crowd", "tail")} if len(planted) else {"crowd": set(), "tail": set()}  # fmt: skip
    rare = told.kinds.sample_ids[told.kinds.codes == 6].tolist()
    copied = told.kinds.sample_ids[told.kinds.codes == 4].tolist()
    return {
        "sentences": first_sentences(told),
        "associations": {
            side: {f"{each.end} {each.of}": [each.area, each.is_notable] for each in of_side}
            for side, of_side in told.associations.items()
        },
        "permuted_says": bool(permuted),
        "moves": told.moves,
        "counts": told.kinds.counts,
        "rare_by": told.kinds.rare_by,
        "rare": len(rare),
        "rare_elsewhere": _rare_elsewhere(folder, run, at, told.kinds.rare_by, rare),
        "rare_planted": [len(of_kind["tail"] & set(rare)), len(of_kind["tail"]), inspection.dataset.n],
        "largest_class": _largest_class(inspection.dataset, rare),
        "copied_planted": [len(of_kind["crowd"] & set(copied)), len(copied)],
        "evidence_right": _evidence_right(kept.path, inspection.dataset, told.kinds.rare_by, rare),
    }


def beside_all(folder: Path, run: Run) -> list[tuple[str, ...]]:
    """Compare solved temperatures of EXACT samples with those in float64 against all others."""
    inspection = read_run(RunDirectory(LocalPath(folder / "runs" / run.name)))
    assert inspection.reader is not None
    out = folder / "judged" / f"{run.name}-all"
    file = drawn_features(inspection, out, Asked(ALL))
    features = visited_features(file, inspection.reader)
    every = features.rows(np.arange(len(features))).astype(np.float64)
    places = np.sort(np.random.default_rng(1).permutation(len(features))[:EXACT])
    rho, low = inspection.config.objective.settings["rho"], inspection.config.objective.settings["tau_min"]
    found = solved_temperatures(inspection, features, rho, places, silent).sides
    exact = dict[str, list[NDArray[np.float64]]]()
    for side, anchors, others in compared_views(features):
        of_draw = np.empty(len(places))
        for row, place in enumerate(places):
            h = np.concatenate(
                [np.delete(every[:, view], place, 0) @ every[place, own] for own in anchors for view in others]
            )
            is_solvable = _divergence(h, low) > rho
            root = partial(brentq, lambda log_tau, h=h: _divergence(h, np.exp(log_tau)) - rho, np.log(low), 3)
            of_draw[row] = root() if is_solvable else np.nan
        exact.setdefault(side, []).append(of_draw)
    rows = list[tuple[str, ...]]()
    for side, of_draws in exact.items():
        log_exact, log_found = np.mean(of_draws, axis=0), np.log(found[side].tau)
        inside = np.isfinite(log_found) & np.isfinite(log_exact)
        ratio = log_found[inside] - log_exact[inside]
        rows.append((run.name, side, f"{spearmanr(log_found[inside], log_exact[inside]).statistic:.3f}",
                     f"{np.median(abs(ratio)):.1%}", f"{ratio.mean():+.1%}"))  # fmt: skip
    return rows


def _divergence(h: NDArray[np.float64], tau: float) -> float:
    log_q = h / tau - logsumexp(h / tau)
    return float((np.exp(log_q) * (log_q + np.log(len(h)))).sum())


def _largest_class(dataset: Dataset, rare: list[int]) -> list[float] | None:
    """The share of the largest class among the rare samples, and among all."""
    if "group" not in dataset.schema.names:
        return None
    groups = np.array([group or "" for group in dataset.column("group").to_pylist()])
    names, counts = np.unique(groups, return_counts=True)
    if len(names) < 2:
        return None
    largest = groups == names[counts.argmax()]
    return [float(largest[rare].mean()) if rare else 0.0, float(largest.mean())]


def _features(folder: Path, run: str, at: str) -> FeaturesFile:
    """The features of a snapshot: of the last one the run's own, of others those that judging made."""
    inspection = read_run(RunDirectory(LocalPath(folder / "runs" / run)), at=at)
    return drawn_features(inspection, folder / "judged" / f"{run}@{at}", Asked())


def _evidence_right(file: Path, dataset: Dataset, rare_by: str | None, rare: list[int]) -> bool | None:
    """Whether every rare sample is among the lowest tenth of what it is called rare by."""
    if rare_by is None:
        return None
    ids, values = _plainly(file, dataset, rare_by)
    place = {id: place for place, id in enumerate(ids.tolist())}
    own = values[[place[id] for id in rare]]
    return bool((own <= np.quantile(values, 0.1)).all())


def _rare_elsewhere(folder: Path, run: Run, at: str, rare_by: str | None, rare: list[int]) -> float | None:
    """The share of the samples rare by features that are in the lowest quarter by the features of the first seed."""
    if not rare or rare_by is None or not rare_by.startswith("near") or run.variant != "plain" or run.seed == 0:
        return None
    other = _features(folder, f"{run.data}-plain-0", at).path
    dataset = Dataset(folder / "data" / run.data)
    ids, values = _plainly(other, dataset, rare_by)
    own = values[np.isin(ids, rare)]
    return float((own <= np.quantile(values, 0.25)).mean()) if len(own) else None


def _plainly(file: Path, dataset: Dataset, of: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of the samples with features, and a property of each, as docs/formats.md and docs/inspect.md define them."""
    raw = file.read_bytes()
    header = json.loads(raw[:4096])
    rows, sides, dim = header["rows"], header["sides"], header["dim"]
    at = 4096
    ids = np.arange(rows)
    if rows < header["samples"]:
        ids, at = np.frombuffer(raw, "<i8", rows, at), at + 8 * rows
    features = np.frombuffer(raw, "<f2", rows * sides * dim, at).reshape(rows, sides, dim).astype(np.float64)
    if of.startswith("near"):
        side = features[:, 1 if of == "near_captions" else 0]
        return ids, np.concatenate([(side[k : k + 500] @ side.T > 0.7).sum(1) - 1.0 for k in range(0, rows, 500)])
    column = dataset.column("group" if of == "class_size" else "caption").to_pylist()
    if of == "class_size":
        sizes = Counter(column)
        return ids, np.array([float(sizes[column[id]]) for id in ids])
    words = [set(WORD.findall((text or "").lower())) for text in column]
    stands = Counter(word for of_one in words for word in of_one)
    return ids, np.array([float(min((stands[word] for word in words[id]), default=10**9)) for id in ids])


def page(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures of all snapshots, and what they come to."""
    rows = []
    for name, told in found.items():
        planted, tail, n = told["rare_planted"]
        lift = f"{planted / told['rare'] / (tail / n):.1f} ×" if tail and told["rare"] else "–"
        elsewhere = told["rare_elsewhere"]
        largest = told["largest_class"]
        rows.append((
            name, str(len(told["sentences"])), told["rare_by"] or "–", str(told["rare"]), lift,
            "–" if elsewhere is None else f"{elsewhere:.2f}",
            f"{largest[0]:.0%} of {largest[1]:.0%}" if largest else "–", str(told["evidence_right"]),
            " ".join(str(told["counts"][kind]) for kind in ("crowded", "copied", "not_told_apart")),
            "{} of {}".format(*told["copied_planted"]), "yes" if told["permuted_says"] else "no",
        ))  # fmt: skip
    heading = ("snapshot", "sentences", "rare by", "rare", "planted, × share", "in the other seed's lowest quarter",
               "largest class", "evidence right",
               "crowded, copied, not told apart", "copied that were planted", "permuted says one")  # fmt: skip
    return f"{table(heading, rows)}\n\n{seeds(found)}"


def seeds(found: dict[str, dict[str, Any]]) -> str:
    """Say how many sentences of one seed hold in the other: same sign, and not small."""
    held = total = settings = outside = 0
    for name, told in found.items():
        said = [(side, what, area) for side, of_side in told["associations"].items()
                for what, (area, is_notable) in of_side.items() if is_notable]  # fmt: skip
        settings += 1
        outside += any(what.partition(" ")[2] not in OF_FEATURES for _, what, _ in said)
        if "-plain-0@" not in name or (other := found.get(name.replace("-plain-0@", "-plain-1@"))) is None:
            continue
        for side, what, area in said:
            there = other["associations"].get(side, {}).get(what, [0.5])[0]
            total += 1
            held += abs(there - 0.5) >= SMALL and (there > 0.5) == (area > 0.5)
    return (
        f"Of {total} associations said in seed 0, {held} have the same sign in seed 1 and are not small. In {outside} "
        f"of {settings} snapshots at least one is said that is not of the same features."
    )


if __name__ == "__main__":
    main()
