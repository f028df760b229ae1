"""What `inspect` puts out for several kinds of run: the keys of the JSON, the page's elements and its words.

Programs read the JSON, and styles and the page's script name the elements. `tests/data/inspect` holds what is expected;
delete a file there to write it anew.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from support.cli import answer, sets, succeed
from support.pinned import same_as_expected
from support.written_runs import train_on, write_run

EXPECTED = Path(__file__).parents[1] / "data" / "inspect"
SETTINGS = ("epochs=6", "batch_size=32", "order.canonical_shards=2", "data.image_size=16", "data.workers=1",
            "model.dim=8",
            "model.image.config.width=4", "checkpoint.every_steps=4", "checkpoint.keep_last=9",
            "optimizer.warmup=200", "objective.doubt_after=1")  # fmt: skip


@pytest.fixture(scope="module")
def runs(hostile_dataset, flat_dataset, tau_by_class_size, tmp_path_factory):
    """Runs: with two snapshots, on images without classes, without temperatures, without a snapshot, trained."""
    folder, later = tmp_path_factory.mktemp("pinned"), tau_by_class_size.copy()
    later[3] = 0.9
    two = {"image": tau_by_class_size, "text": tau_by_class_size}
    moved = write_run(folder / "moved", hostile_dataset, two, visited=np.arange(66) % 3 != 1)
    train_on(moved, two | {"image": later}, step=9)
    write_run(folder / "flat", flat_dataset, {"sample": np.linspace(0.1, 0.9, flat_dataset.n)})
    write_run(folder / "clip", hostile_dataset, {}, objective="clip")
    write_run(folder / "no-snapshot", hostile_dataset, {}, snapshot=False)
    succeed("train", "--data", hostile_dataset.path, "--out", folder / "trained", *sets(*SETTINGS))
    return folder


def shape(value):
    """The keys of nested objects in their order, the first element of each list, and the types of values."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return [shape(inner) for inner in value[:1]] if isinstance(value, list) else type(value).__name__


ASKED = {
    "moved": ["--against", "step-5", "--by", "group", "--by", "uri"],
    "moved-unvisited": ["--at", "step-0"],
    "flat": [],
    "clip": [],
    "no-snapshot": [],
    "trained": ["--map", "--confirm", "20"],
    "moved-sample": ["--sample", "3"],
    "trained-sample": ["--sample", "3", "--neighbours", "2"],
    "trained-duplicates": ["--duplicates"],
    "no-snapshot-sample": ["--sample", "3"],
}


def test_the_json_has_the_same_keys_in_the_same_order(runs):
    seen = {}
    for name, words in ASKED.items():
        run = next(path for path in runs.iterdir() if name.startswith(path.name))
        seen[name] = shape(answer("inspect", run, *words))
    same_as_expected(EXPECTED / "json.txt", "".join(f"{name}: {json.dumps(keys)}\n" for name, keys in seen.items()))


BEGINS_A_LINE = ("<p", "<ul", "<section", "<h", "<figure", "<figcaption", "<table", "<tr", "<li", "<dl", "<caption")


class Outline(HTMLParser):
    """The elements of a page, each with its attributes but pictures, and the texts of each."""

    def __init__(self, html):
        super().__init__()
        self.lines, self._cards = [], 0
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self._cards = self._cards + (tag == "li") if tag not in ("ul", "section") else 0
        kept = [f"{name}={_without_numbers(value or '')}" for name, value in attributes
                if name not in ("src", "srcset", "content", "data-value", "width")]  # fmt: skip
        self._say(" ".join([f"<{tag}", *kept]))

    def handle_endtag(self, tag):
        self._say(f"</{tag}")

    def handle_data(self, data):
        if words := " ".join(data.split()):
            self._say(_without_numbers(words))

    def _say(self, line):
        if self._cards <= 2:  # the others of a contact sheet are like the first ones
            self.lines.append(line)


def _without_numbers(words):
    return re.sub(r"[+-]?\d[\d,.]*(e-\d+)?", "0", re.sub("x{20,}", "xx…", words))


@pytest.mark.parametrize(
    ("name", "page"),
    [("moved", "report.html"), ("flat", "report.html"), ("moved-sample", "samples.html"),
     ("trained-duplicates", "duplicates.html"), ("trained-sample", "samples.html"), ("clip", "report.html")],
)  # fmt: skip
def test_a_page_has_the_same_elements_and_words(runs, name, page, tmp_path):
    run = next(path for path in runs.iterdir() if name.startswith(path.name))
    succeed("inspect", run, *ASKED[name], "--to", tmp_path)
    html = (tmp_path / page).read_text("utf-8").replace(str(runs.resolve()), "RUNS")
    html = re.sub("<style>.*?</style>|<script>.*?</script>|<svg .*?</svg>", "", html, flags=re.DOTALL)
    lines = ("\n" * line.startswith(BEGINS_A_LINE) + line for line in Outline(html).lines)
    outline = " ".join(lines)
    same_as_expected(
        EXPECTED / f"{name}.txt", re.sub(r"[^ \n]*/dataset\b|[^ \n]*/flat-dataset", "DATASET", outline) + "\n"
    )
