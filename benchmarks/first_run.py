"""A first run on emoji with their names, and on 2,000 drawings, by the commands that `thermopile convert` prints.

Beside it a search of twelve over side, encoder and learning rate at the same length, and a k-NN of grey pixels.
Datasets and runs stay in FOLDER, so a later call makes only what is missing.

\b
Examples:
  python -m benchmarks.first_run first            # both first runs, a few minutes
  python -m benchmarks.first_run first --search   # the search as well, hours
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
import time
from itertools import product
from math import sqrt
from pathlib import Path

import click
import numpy as np
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from thermopile.pipeline.opening import Dataset
from thermopile.tools.bench.machine import describe_machine, words_of

from . import noto_emoji, openclipart
from .glyph_runs import thermopile
from .markdown import table

DRAWINGS, SEED = 2_500, 0
"""Number of drawings, a fifth of which is held out, and the seed that draws them."""
CONVERSIONS = {"emoji": "csv {0}/emoji/pairs.csv {0}/data/emoji --holdout 0.1",
               "drawings": "folder {0}/pictures {0}/data/drawings --holdout 0.2"}  # fmt: skip
ENCODERS = {"conv": [], "conv with batch norm": ["model.image.config.batch_norm=true"],
            "ResNet-18": ["model.image.name=hf:resnet-18"]}  # fmt: skip
SIDES, RATES = (32, 64), (1e-3, 3e-3)
SCORES = {"emoji": ("R@1", ("image_to_text", "1")), "drawings": ("k-NN", ("knn", "10"))}
SIDE_OF_GREY = 16


@click.command(help=__doc__)
@click.argument("folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path))
@click.option("--search", is_flag=True, help="Also run the search of twelve.")
def main(folder: Path, search: bool) -> None:
    folder = folder.absolute()
    make_sources(folder)
    rows = []
    for name in CONVERSIONS:
        command, converting = convert(folder, name)
        tried: list[tuple[str, list[str]]] = [(f"`{' '.join(command[:2])}`", [])]
        if search:
            tried += [(f"{side} pixels, {encoder}, rate {rate:g}",
                       [*settings, f"data.image_size={side}", f"optimizer.lr={rate}"])
                      for side, (encoder, settings), rate in product(SIDES, ENCODERS.items(), RATES)]  # fmt: skip
        rows += [(name, what, *measured(folder, name, command, settings, converting)) for what, settings in tried]
    rows.append(("drawings", f"grey pixels, {SIDE_OF_GREY} × {SIDE_OF_GREY}", *grey_pixels(folder), "–"))
    click.echo(table(["data", "settings", "score", "± standard error", "seconds, with conversion"], rows))
    click.echo(f"\n{words_of(describe_machine())}")


def make_sources(folder: Path) -> None:
    """Make the emoji's pairs.csv, and a folder of drawings in folders named after their kind."""
    noto_emoji.make(folder / "emoji")
    if (folder / "pictures").exists():
        return
    pairs = openclipart.make(folder / "openclipart")
    for number in np.random.default_rng(SEED).permutation(len(pairs))[:DRAWINGS]:
        kind = folder / "pictures" / pairs[number].folder.partition("/")[0]
        kind.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "openclipart" / pairs[number].filepath, kind / f"{number}.png")


def convert(folder: Path, name: str) -> tuple[list[str], float]:
    """Return the training command that the conversion's last line gives, and its seconds; both are remembered."""
    recorded = folder / f"{name}.json"
    if not recorded.exists():
        began = time.monotonic()
        printed = thermopile("convert", *shlex.split(CONVERSIONS[name].format(folder)), "--overwrite")
        command = printed.rpartition("thermopile train ")[2]
        recorded.write_text(json.dumps([shlex.split(command), time.monotonic() - began]))
    command, seconds = json.loads(recorded.read_text())
    return command, seconds


def measured(folder: Path, name: str, command: list[str], settings: list[str], converting: float) -> tuple[str, ...]:
    """Train, unless that was done, and score on what was held out."""
    run = folder / "runs" / "-".join([name, *settings]).replace("/", "_")
    recorded = run.with_name(f"{run.name}.json")
    if not recorded.exists():
        command = [*command[: command.index("--out") + 1], str(run)]
        began = time.monotonic()
        thermopile("train", *command, *[word for setting in settings for word in ("--set", setting)])
        seconds = time.monotonic() - began
        data = folder / "data" / name
        scores = json.loads(thermopile("eval", run, "--train", data, "--test", f"{data}-test", "--json"))["scores"]
        recorded.write_text(json.dumps({"seconds": seconds, "scores": scores}))
    found = json.loads(recorded.read_text())
    label, (kind, k) = SCORES[name]
    return *score(label, found["scores"][kind][k]["all"], folder, name), f"{found['seconds'] + converting:.0f}"


def score(label: str, share: float, folder: Path, name: str) -> tuple[str, str]:
    tested = Dataset(folder / "data" / f"{name}-test").n
    return f"{label} {100 * share:.1f} %", f"{100 * sqrt(share * (1 - share) / tested):.1f}"


def grey_pixels(folder: Path) -> tuple[str, str]:
    """The k-NN accuracy of small grey pictures, as of the encoders' features."""
    sides = []
    for name in ("drawings", "drawings-test"):
        dataset = Dataset(folder / "data" / name)
        pictures = (Image.open(io.BytesIO(dataset.jpeg(number))).convert("L") for number in range(dataset.n))
        pixels = np.array([np.asarray(each.resize((SIDE_OF_GREY,) * 2), float).ravel() for each in pictures])
        sides.append((pixels, dataset.column("group").to_numpy(zero_copy_only=False)))
    (train, classes), (test, right) = sides
    neighbours = KNeighborsClassifier(10, metric="cosine").fit(train, classes)
    return score("k-NN", float(np.mean(neighbours.predict(test) == right)), folder, "drawings")


if __name__ == "__main__":
    main()
