"""Make the runs that judge what `thermopile inspect` says of rare and crowded samples, on data with known answers.

Rules are made on one half of the data and judged on the other. Every run of RUNS is made in FOLDER, one after another:
data in FOLDER/data, runs in FOLDER/runs, and beside each run RUN.parquet, with a row for each sample of a planted crowd
or tail (sample_id; planted, `crowd` or `tail`; name, of the crowd or the class; is_copy). A later call makes what is
missing, and resumes the run that was stopped. Checkpoints at every fourth epoch are kept: `inspect RUN --at step-N`.

\b
  crowd-S  S % of the samples are near-copies: heaps of different sizes of a few samples, a little shifted, lighter or
           darker, half of the heaps with the same caption, half with numbered captions
  tail     some classes are cut to 5 to 50 samples; without classes, the samples with some words

With --wrong, other runs are made instead, in which some captions are exchanged and some are planted (data.planted):

\b
  wrong-random-S   S % of the captions, among themselves
  wrong-class-S    the same, each with a sample of its class or set; not of emoji, which have none
  wrong-word-S     the same, each with a sample whose caption shares a word

\b
Examples:
  PYTHONPATH=build/resvg nice python -m benchmarks.kinds kinds     # icons need resvg: python -m benchmarks.icons --help
  python -m benchmarks.kinds kinds --plan                          # every run with its steps and hours; makes nothing
  python -m benchmarks.kinds kinds --only glyphs --only fashion    # only the runs whose names begin so
  python -m benchmarks.kinds kinds --wrong --plan
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageChops

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.dataset.samples_table import CAPTION
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources import Sample, Source

from . import fashion, icons, noto_emoji, openclipart
from .glyph_runs import thermopile, trained
from .markdown import table

Ids = NDArray[np.int64]
WORD = re.compile(r"[^\W\d_]{3,}")
NO_CLASS = {"and", "for", "from", "the", "with"}
"""Words that pictures do not show."""

BATCH, SNAPSHOT_EPOCHS, SEED = 256, 4, 0
"""Samples of a step, epochs between two kept checkpoints, and the seed of all that is planted."""
FEWEST, MOST, MAX_CLASSES = 5, 50, 30
"""Samples of a class that was cut, and how many classes are cut at most."""
CUT_FROM, CUT_SHARE = 60, 0.1
"""Samples of a class before it is cut, at least, and its share of all, at most: the others stay as they were."""
HEAP_SHARE = 0.75
"""Share of the copies in the largest heap: of 20 % copies, more than exp(-2) of all, so no temperature has KL = 2."""
SHIFT, FADE = 0.06, 0.15
"""A copy is shifted by up to this share of its side, and up to this share of a grey is blended in."""


@dataclass(frozen=True)
class Data:
    """A dataset, and how runs train on it."""

    half: Literal["made on", "judged on"]
    samples: int
    """About: for the plan, before it is converted."""
    rate: int
    """Samples that a core trains on in a second, of an AMD EPYC whose two cores others used too."""
    commands: tuple[str, ...]
    """Arguments of `thermopile convert`, with {source} and {out}; the last command makes the test set."""
    make: Callable[[Path], object] | None = None
    """Writes the source into a folder."""
    classes: Literal["group", "word"] = "group"
    """What a tail is cut from: sets of icons are no classes, as each has the same icons, and emoji have none."""
    epochs: int = 20
    preset: str = "small"
    settings: Mapping[str, object] = field(default_factory=dict)


SMALL_SIDE = {"data.image_size": 32}
DATA = {
    "glyphs": Data("made on", 10_847, 900, ("glyphs {out}",), preset="glyphs"),
    "emoji": Data("made on", 3_479, 290, ("csv {source}/pairs.csv {out} --holdout 0.1",), noto_emoji.make,
                  classes="word"),
    "icons-40000": Data("made on", 38_000, 750,
                        ("parquet {source}/icons-40000-0.parquet {out} --group set --holdout 2000",),
                        lambda folder: icons.make(folder, 40_000), classes="word", epochs=8, settings=SMALL_SIDE),
    "openclipart": Data("judged on", 3_782, 290,
                        ("csv {source}/pairs.csv {out} --group folder --holdout 0.1 --max-size 128",),
                        openclipart.make),
    "fashion": Data("judged on", 14_886, 400, ("parquet {source}/train.parquet {out} --longtail 100",
                                               "parquet {source}/test.parquet {out}-test"),
                    fashion.make, epochs=8, settings=SMALL_SIDE),
    "icons": Data("judged on", 376_693, 750, ("parquet {source}/icons.parquet {out} --group set --holdout 2000",),
                  icons.make, classes="word", epochs=2, settings=SMALL_SIDE),
}  # fmt: skip
"""Larger data are trained for fewer epochs, as 20 epochs of all would take 25 core-hours."""


class Planted(NamedTuple):
    """The samples of a dataset that is made of another one."""

    ids: Ids
    """int64 [n]: the sample of the other dataset that each is, or is a copy of."""
    copy: Ids
    """int64 [n]: 0 for the sample itself, else the number of the copy, from 1."""
    told: dict[int, str]
    """What was planted, `crowd NAME`, `tail NAME` or `wrong HOW`, by place in ids."""
    captions: Ids | None = None
    """int64 [n]: the sample whose caption each has; None: its own."""


def crowds(dataset: Dataset, share: float) -> Planted:
    """Add near-copies of some samples, so that they are `share` of all."""
    rng = np.random.default_rng([SEED, 1])
    sizes = heap_sizes(round(dataset.n * share / (1 - share)), rng)
    originals = rng.permutation(dataset.n)[: len(sizes)]
    heap = np.repeat(np.arange(len(sizes)), sizes)
    told = {int(original): f"crowd {number}" for number, original in enumerate(originals)}
    told |= {dataset.n + place: f"crowd {number}" for place, number in enumerate(heap.tolist())}
    numbers = np.concatenate([np.arange(1, 1 + size) for size in sizes])
    ids = np.concatenate([np.arange(dataset.n), originals[heap]])
    return Planted(ids, np.concatenate([np.zeros(dataset.n, np.int64), numbers]), told)


def heap_sizes(copies: int, rng: np.random.Generator) -> list[int]:
    """Return the copies in each heap: HEAP_SHARE in the first, then as many scales as there are left."""
    sizes = [round(HEAP_SHARE * copies)]
    while left := copies - sum(sizes):
        sizes.append(min(left, round(np.exp(rng.uniform(0, np.log(left + 1))))))
    return sizes


def tail(dataset: Dataset, classes: Mapping[str, Ids]) -> Planted:
    """Leave out most samples of some classes: up to MAX_CLASSES, a third of those that are neither small nor large.

    A sample of two of these classes is left out, so that each class has the number of samples that was drawn.
    """
    rng = np.random.default_rng([SEED, 2])
    fit = sorted(name for name, ids in classes.items() if CUT_FROM <= len(ids) <= CUT_SHARE * dataset.n)
    names = [fit[place] for place in rng.permutation(len(fit))[: min(MAX_CLASSES, -(-len(fit) // 3))]]
    times = np.zeros(dataset.n, np.int64)
    for name in names:
        times[classes[name]] += 1
    kept, is_in = {}, times == 0
    for name, size in zip(names, np.geomspace(FEWEST, MOST, len(names)).round().astype(int), strict=True):
        alone = classes[name][times[classes[name]] == 1]
        kept[name] = rng.permutation(alone)[:size]
        is_in[kept[name]] = True
    ids = np.flatnonzero(is_in)
    told = {int(place): f"tail {name}" for name in names for place in np.searchsorted(ids, kept[name])}
    return Planted(ids, np.zeros(len(ids), np.int64), told)


def wrong(dataset: Dataset, share: float, how: str, classes: Mapping[str, Ids]) -> Planted:
    """Exchange the captions of some samples: `random` among all of them, or with any sample of a class of theirs.

    A sample of no such class, and one that would get an equal caption, keeps its own.
    """
    rng, n = np.random.default_rng([SEED, 4]), dataset.n
    chosen, texts, captions = rng.permutation(n)[: round(share * n)], dataset.column(CAPTION).to_pylist(), np.arange(n)
    if how == "random":
        captions[chosen] = np.roll(chosen, 1)
    else:
        of_sample: dict[int, list[str]] = {}
        for name, ids in classes.items():
            for sample_id in ids.tolist() if len(ids) > 1 else ():
                of_sample.setdefault(sample_id, []).append(name)
        for sample_id in chosen.tolist():
            if names := of_sample.get(sample_id):
                captions[sample_id] = rng.choice(classes[names[rng.integers(len(names))]])
    told = {place: f"wrong {how}" for place in chosen.tolist() if texts[captions[place]] != texts[place]}
    return Planted(np.arange(n), np.zeros(n, np.int64), told, captions)


def members(dataset: Dataset, by: Literal["group", "word"]) -> dict[str, Ids]:
    """Return the ids of each class, or of each word of three letters or more in the captions."""
    if by == "group":
        names = [{name} - {None} for name in dataset.column("group").to_pylist()]
    else:
        names = [set(WORD.findall(caption.lower())) - NO_CLASS for caption in dataset.column(CAPTION).to_pylist()]
    found: dict[str, list[int]] = {}
    for sample_id, of_sample in enumerate(names):
        for name in of_sample:
            found.setdefault(name, []).append(sample_id)
    return {name: np.array(ids) for name, ids in found.items()}


class PlantedSource(Source):
    """The samples of a dataset with what was planted: their pictures as they are, or near-copies."""

    alters = True

    def __init__(self, dataset: Dataset, variant: str, planted: Planted) -> None:
        self.dataset, self.mode, self.variant, self.planted = dataset, dataset.index.mode, variant, planted
        self.columns = dataset.take(np.arange(dataset.n), ["uri", "key", "group", CAPTION]).combine_chunks()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"dataset": Dataset(self.dataset.place)}  # with no file open, for a worker

    def __len__(self) -> int:
        return len(self.planted.ids)

    def __getitem__(self, index: int) -> Sample:
        original, number = int(self.planted.ids[index]), int(self.planted.copy[index])
        jpeg = self.dataset.jpeg(original)
        picture = near_copy(jpeg, np.random.default_rng([SEED, 3, index])) if number else jpeg
        group, told = self.columns["group"][original].as_py(), self.planted.told.get(index)
        return Sample(self.uri(index), self.key(index), picture, self.caption(index), group, altered=told)

    def caption(self, index: int) -> str | None:
        """Return the original's caption; the copies of every other original have numbered ones."""
        original, number = int(self.planted.ids[index]), int(self.planted.copy[index])
        if self.planted.captions is not None:
            original = int(self.planted.captions[index])
        caption: str | None = self.columns[CAPTION][original].as_py()
        return f"{caption} {number}" if caption is not None and number and original % 2 else caption

    def captions(self, indices: Ids) -> Iterator[str]:
        return (self.caption(index) or "" for index in indices.tolist())

    def uri(self, index: int) -> str:
        return self._named("uri", index)

    def key(self, index: int) -> str:
        return self._named("key", index)

    def _named(self, column: str, index: int) -> str:
        name, number = self.columns[column][int(self.planted.ids[index])].as_py(), self.planted.copy[index]
        return f"{name}~{number}" if number else str(name)

    def describe(self) -> dict[str, Any]:
        return {"kind": "planted", "variant": self.variant, "listing": self.dataset.index.fingerprint}


def near_copy(jpeg: bytes, rng: np.random.Generator) -> Image.Image:
    """Return a picture a little shifted, and lighter or darker."""
    with Image.open(BytesIO(jpeg)) as opened:
        picture = opened.convert("RGB")
    reach = max(1, round(SHIFT * min(picture.size)))
    across, down = rng.integers(-reach, reach + 1, 2).tolist()
    grey = int(rng.integers(256))
    flat = Image.new("RGB", picture.size, (grey, grey, grey))
    return Image.blend(ImageChops.offset(picture, across, down), flat, rng.uniform(0, FADE))


@dataclass(frozen=True)
class Run:
    """A run to make."""

    data: str
    variant: str
    """`plain`, `crowd-PERCENT` or `tail`."""
    seed: int

    @property
    def of(self) -> Data:
        return DATA[self.data]

    @property
    def name(self) -> str:
        return f"{self.data}-{self.variant}-{self.seed}"

    @property
    def samples(self) -> int:
        """About: a tail has fewer."""
        kind, _, percent = self.variant.partition("-")
        return round(self.of.samples / (1 - float(percent) / 100)) if kind == "crowd" else self.of.samples

    @property
    def planted(self) -> float:
        """Setting data.planted: 1 % from 20,000 samples on, else as many as make 280."""
        return max(0.01, round(280 / self.of.samples, 2)) if self.variant.startswith("wrong") else 0.0

    @property
    def hours(self) -> float:
        """On one core."""
        return self.samples * self.of.epochs / self.of.rate / 3600


SEEDS = {"plain": (0, 1), "crowd-1": (0,), "crowd-5": (0,), "crowd-20": (0,), "tail": (0,)}
"""The seeds that each variant is trained with."""
RUNS = [Run(data, variant, seed) for data in DATA for variant, seeds in SEEDS.items() for seed in seeds]


WRONG = [f"wrong-{how}-{percent}" for how in ("random", "class", "word") for percent in (0, 1, 5, 20)]
WRONG_RUNS = [
    Run(data, variant, seed)
    for data in ("emoji", "openclipart", "icons-40000")
    for variant in WRONG
    for seed in range(3)
    if not variant.endswith(("class-0", "word-0")) and (data, variant.split("-")[1]) != ("emoji", "class")
]
"""The half of openclipart is judged on; seeds 1 and 2 of the others too."""


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
@click.option("--plan", is_flag=True, help="Print the runs with their hours on one core, and make nothing.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only runs whose names begin so. Repeatable.")
@click.option("--wrong", "with_wrong", is_flag=True, help="The runs with wrong captions instead.")
def main(folder: Path, plan: bool, only: tuple[str, ...], with_wrong: bool) -> None:
    folder = folder.absolute()
    runs = [run for run in (WRONG_RUNS if with_wrong else RUNS) if run.name.startswith(only or "")]
    if plan:
        click.echo(plan_of(folder, runs))
        return
    os.nice(10)
    for run in runs:
        click.echo(f"{run.name}, about {run.hours:.2f} core-hours", err=True)
        make(folder, run)


def plan_of(folder: Path, runs: list[Run]) -> str:
    """Return a table of the runs with their sizes, and whether they are made."""
    rows = []
    for run in runs:
        state = "made" if is_finished(folder / "runs" / run.name) else ""
        steps = ", ".join(f"{run.samples // BATCH * epoch:,}" for epoch in (2, 4, 8, 20) if epoch <= run.of.epochs)
        sizes = f"{run.samples:,}", str(run.of.epochs), steps, f"{run.hours:.2f}"
        rows.append((run.of.half, run.data, run.variant, str(run.seed), *sizes, state))
    heading = (
        "half",
        "data",
        "variant",
        "seed",
        "samples, about",
        "epochs",
        "steps after 2, 4, 8, 20, about",
        "core-hours",
    )
    return f"{table((*heading, ''), rows)}\n{sum(run.hours for run in runs):.1f} core-hours"


def is_finished(run: Path) -> bool:
    return run.exists() and json.loads(thermopile("status", run, "--json"))["state"] == "finished"


def make(folder: Path, run: Run) -> Path:
    """Make a run, unless it is there, with its data and the record of what was planted; return its path."""
    out = folder / "runs" / run.name
    if is_finished(out):
        return out
    data = planted_data(folder, run)
    out.parent.mkdir(exist_ok=True)
    pq.write_table(what_was_planted(Dataset(data)), out.with_name(f"{out.name}.parquet"))
    return trained(data, out, settings_of(run, Dataset(data).n), preset=run.of.preset)


def settings_of(run: Run, samples: int) -> dict[str, object]:
    """Return the settings of a run, which keeps its checkpoint after every SNAPSHOT_EPOCHS epochs, at most."""
    steps = min(SNAPSHOT_EPOCHS, run.of.epochs) * (samples // BATCH)
    kept: dict[str, object] = {"checkpoint.every_steps": steps, "checkpoint.keep_every": steps}
    kept["checkpoint.every_minutes"] = 5
    kept |= {"data.planted": run.planted} if run.planted else {}
    return {"seed": run.seed, "epochs": run.of.epochs, "batch_size": BATCH, **kept, **run.of.settings}


def planted_data(folder: Path, run: Run) -> Path:
    """Return the run's dataset, which is converted if it is missing."""
    plain = folder / "data" / run.data
    if not plain.with_name(f"{plain.name}-test").exists():  # the last that is made
        source = folder / "sources" / run.data.partition("-")[0]
        if run.of.make is not None:
            run.of.make(source)
        for command in run.of.commands:
            thermopile("convert", *shlex.split(command.format(source=source, out=plain)), "--workers", 1, "--resume")
    if run.variant == "plain":
        return plain
    out, dataset = folder / "data" / f"{run.data}-{run.variant}", Dataset(plain)
    if not out.exists():
        kind, _, percent = run.variant.partition("-")
        is_tail = kind == "tail"
        if kind == "wrong":
            how, _, percent = percent.partition("-")
            classes = members(dataset, "group" if how == "class" else "word")
            planted = wrong(dataset, float(percent) / 100, how, classes)
        elif is_tail:
            planted = tail(dataset, members(dataset, run.of.classes))
        else:
            planted = crowds(dataset, float(percent) / 100)
        told = dataset.index.tokenizer
        settings = ConvertSettings(context_length=told.context_length) if told else ConvertSettings()
        tokenizer = dataset.tokenizer_path if told else None
        convert(PlantedSource(dataset, run.variant, planted), out, settings, workers=1, resume=True,
                tokenizer_from=tokenizer)  # fmt: skip
    return out


def what_was_planted(dataset: Dataset) -> pa.Table:
    """Return the rows of RUN.parquet, by id."""
    names = {"sample_id": pa.int64(), "planted": pa.string(), "name": pa.string(), "is_copy": pa.bool_()}
    if "altered" not in dataset.schema.names:
        return pa.Table.from_pylist([], pa.schema(names))
    rows = []
    for sample_id, row in enumerate(dataset.take(np.arange(dataset.n), ["altered", "key"]).to_pylist()):
        if row["altered"] is not None:
            planted, _, name = row["altered"].partition(" ")
            rows.append(dict(zip(names, (sample_id, planted, name, "~" in row["key"]), strict=True)))
    return pa.Table.from_pylist(rows, pa.schema(names))


if __name__ == "__main__":
    main()
