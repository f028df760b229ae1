"""The notebooks in examples/ run from the first cell to the last; only what a reader sets in them is set here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageDraw
from transformers import CLIPModel

from support.whole_models import DIM, SIDE, save_whole

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "build" / "notebooks"
RUN = "from nbclient.cli import main; main()"
COLOURS = ("red", "green", "blue", "yellow", "black", "pink", "cyan", "orange")
PAIRS, WRONG_EVERY = 400, 25


@pytest.fixture(scope="module", autouse=True)
def _packages():
    if not (PACKAGES / "nbclient").is_dir():
        pytest.skip("nbclient and ipykernel are not installed (make notebooks)")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two discs on each picture, which its caption names; every 25th caption is drawn anew."""
    folder, rng = tmp_path_factory.mktemp("notebooks") / "pictures", np.random.default_rng(0)
    folder.mkdir()
    for number in range(PAIRS):
        picture, (left, right) = Image.new("RGB", (64, 64), "white"), rng.choice(COLOURS, 2)
        for colour, x in ((left, 18), (right, 46)):
            centre = x + rng.integers(-3, 4), 32 + rng.integers(-12, 13)
            ImageDraw.Draw(picture).circle(centre, rng.integers(8, 13), fill=colour)
        if number % WRONG_EVERY == 0:
            left, right = rng.choice(COLOURS, 2)
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a {left} disc left of a {right} one")
    return folder


def executed(name, folder, **values):
    """Run a notebook in `folder` with other values of its variables; return the result of each code cell, as HTML."""
    cells = code_cells(notebook := json.loads((ROOT / "examples" / name).read_text("utf-8")))
    for variable, value in {"WHEEL": "", **values}.items():
        line = re.compile(rf"^{variable} = .*$", re.MULTILINE)
        (cell,) = [cell for cell in cells if line.search("".join(cell["source"]))]
        cell["source"] = line.sub(f"{variable} = {value!r}", "".join(cell["source"]))
    (folder / name).write_text(json.dumps(notebook))
    paths = os.pathsep.join([str(PACKAGES), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": paths, "IPYTHONDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder)}
    command = [sys.executable, "-c", RUN, "--inplace", name]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = json.loads((folder / name).read_text("utf-8"))
    assert not re.search("UserWarning|drawing the report", json.dumps(shown["cells"]))  # of a spinner
    return [_result(cell) for cell in code_cells(shown)]


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _result(cell):
    """What the cell's last line is shown as; empty if it has no value."""
    (data,) = [each["data"] for each in cell["outputs"] if each["output_type"] == "execute_result"] or [{}]
    return "".join(data.get("text/html") or data.get("text/plain", ""))


def test_the_captions_that_a_folder_has_wrong_come_first(pictures, tmp_path):
    shown = executed("find_wrong_captions.ipynb", tmp_path, PICTURES=str(pictures), EPOCHS=25)
    _, data, run, report, first, table = shown
    assert (data.count("<img "), first.count("<img ")) == (6, 24)
    assert "runs/mine" in run
    assert report.startswith("<iframe srcdoc=")
    listed = pd.read_csv(tmp_path / "look_at.csv")
    assert f"{len(listed)} rows" in table
    numbers = listed["uri"].str.removesuffix(".png").astype(int)
    assert (numbers[:10] % WRONG_EVERY == 0).sum() >= 8  # 4 % of all are wrong


def test_a_clip_that_was_fine_tuned_finds_more_and_is_read_by_transformers(pictures, tmp_path):
    save_whole(tmp_path / "model", "clip")
    values = {"MODEL": f"hf:{tmp_path / 'model'}", "SIZE": SIDE, "PAIRS": str(pictures), "CAPTION": "txt"}
    shown = executed("fine_tune_clip.ipynb", tmp_path, **values, RATE=1e-3, EPOCHS=20)
    before, after = (float(re.search(r"<td>([\d.]+)%", scores)[1]) for scores in shown[2:4])  # image to text, R@1
    assert after >= before + 10
    assert shown[4].startswith("<iframe srcdoc=")
    assert all(f"<th>{column}</th>" in shown[5] for column in ("caption", "image/tau", "text/tau"))
    assert CLIPModel.from_pretrained(tmp_path / "models" / "clip" / "clip").config.projection_dim == DIM
