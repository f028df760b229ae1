"""The programs in examples/ do what they say, and a page of docs/ shows each as it is."""

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import thermopile
from thermopile.pipeline.conversion.conversion import convert
from thermopile.storage.local import LocalPath

from support.cli import answer, succeed
from support.conversions import digests

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run_example(name, *arguments):
    """Run it for one epoch, as a program but in this process; what it prints."""
    file, said = ROOT / "examples" / name, StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.syspath_prepend(file.parent)
        patch.setattr(sys, "argv", [str(file), *map(str, arguments)])
        runpy.run_path(str(file), run_name="__main__")
    return said.getvalue()


@pytest.fixture(scope="module")
def own_loop(pairs_dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "own_loop"
    run_example("own_loop.py", pairs_dataset.path, path, 1)
    return path


def test_a_loop_of_ones_own_makes_a_run_that_every_command_works_on(own_loop, pairs_dataset, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    found = answer("inspect", own_loop, "--features", 64)
    assert found["samples"] == pairs_dataset.n
    assert "step 7" in succeed("status", own_loop).stdout
    scores = succeed(
        "eval", own_loop, "--train", pairs_dataset.path, "--test", pairs_dataset.path, "--allow-code"
    ).stdout
    assert "k-NN" in scores
    succeed("export", own_loop, "--to", tmp_path / "out", "--format", "safetensors", "--allow-code")


def test_a_finished_loop_of_ones_own_has_nothing_to_do(own_loop, pairs_dataset):
    before = (own_loop / "metrics.jsonl").read_bytes()
    run_example("own_loop.py", pairs_dataset.path, own_loop, 1)
    assert (own_loop / "metrics.jsonl").read_bytes() == before


def test_a_temperature_rule_of_ones_own_trains_as_isogclr_does_and_its_samples_have_kinds(
    pairs_dataset, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(ROOT / "examples")
    shared = ["--set", "data.image_size=16", "--set", "model.dim=8", "--steps", 7]
    shared += [word for setting in ("rho=2", "tau_init=0.05", "eta=0.02") for word in ("--set", f"objective.{setting}")]
    losses = []
    for name in ("isogclr", "own_temperature:Own"):
        succeed(
            "train", "--data", pairs_dataset.path, "--out", tmp_path / name, "--set", f"objective.name={name}", *shared
        )
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 7
    assert losses[0] == losses[1]
    found = [answer("inspect", tmp_path / name, "--features", "none") for name in ("isogclr", "own_temperature:Own")]
    assert found[0]["kinds"] == found[1]["kinds"]


def test_a_source_and_a_recipe_of_ones_own_make_a_dataset_that_trains(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    succeed("convert", "own_source:Discs", 70, tmp_path / "discs", "--workers", 1)
    said = run_example("own_source.py", tmp_path / "discs").splitlines()
    assert said[0] == "70 samples: {'blue': 23, 'green': 23, 'red': 24}"
    number, uri, *caption = said[1].split()
    assert (number, len(said)) == ("0", 3)
    assert caption[:2] == ["a", ("red", "green", "blue")[int(uri.removeprefix("disc:")) % 3]]
    words = ("data.recipe=own_source:GENTLE", "data.image_size=16", "model.dim=8")
    shared = [word for setting in words for word in ("--set", setting)]
    succeed("train", "--data", tmp_path / "discs", "--out", tmp_path / "run", "--steps", 1, *shared)


def test_a_source_of_ones_own_is_converted_in_python_whole_in_parts_and_resumed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from own_source import Discs

    def interrupt(counts):
        raise KeyboardInterrupt

    whole = thermopile.convert(Discs(70), tmp_path / "whole" / "out", workers=1)
    assert (whole.index.n, whole.index.tokenizer.context_length) == (70, 32)
    conversion = thermopile.Conversion(Discs(70), str(tmp_path / "parts" / "out"), thermopile.ConvertSettings())
    for number in (2, 1):
        conversion.part(number, 2)
    conversion.finish()
    with pytest.raises(KeyboardInterrupt):
        convert(Discs(70), LocalPath(tmp_path / "killed" / "out"), workers=1, on_progress=interrupt)
    thermopile.convert(Discs(70), tmp_path / "killed" / "out", workers=1, resume=True)
    assert digests(tmp_path / "whole") == digests(tmp_path / "parts") == digests(tmp_path / "killed")


@pytest.mark.wide
@pytest.mark.parametrize(("example", "said"), [
    ("own_loop.py", "7 steps on 2 ranks"), ("plain_loop.py", r"step 7: loss -?\d\.\d{4} on 2 ranks"),
])  # fmt: skip
def test_a_loop_on_several_ranks_runs_under_torchrun(pairs_dataset, tmp_path, example, said):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "run").mkdir()
    command = [*torchrun, ROOT / "examples" / example, pairs_dataset.path, tmp_path / "run", 1]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(said, done.stdout.splitlines()[-1])


def test_a_loss_without_temperatures_has_state_that_can_be_read(pairs_dataset, tmp_path):
    said = run_example("weighted_loss.py", pairs_dataset.path, tmp_path / "run", 1)
    assert len(said.splitlines()) == 7  # two lines of headings, five samples
    rows = thermopile.open_run(tmp_path / "run").temperatures().frame(columns=["pair/mean_loss", "visits"])
    assert (rows["pair/mean_loss"] > 0).equals(rows["visits"] > 0)


def test_temperatures_are_told_by_class(own_loop):
    assert "Spearman's correlation of class size and mean tau: " in run_example("temperatures.py", own_loop)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_shown_as_it_is(example):
    text = example.read_text("utf-8")
    assert len(text.splitlines()) <= (150 if example.name == "open_clip_task.py" else 75)
    shown = f"[examples/{example.name}](../examples/{example.name})\n\n```python\n{text}```\n"
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert sum(shown in page for page in pages) == 1, "copy the file into its page"


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_kept_without_results_and_its_links_lead_to_pages(notebook):
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count") or cell["metadata"]] == []
    links = re.findall(r"\]\(([^)#]+)", "".join(line for cell in cells for line in cell["source"]))
    assert links
    assert [link for link in links if not (notebook.parent / link).is_file()] == []


def test_the_public_names_are_these():
    """A change of this list is a decision; docs/library.md has them too."""
    assert sorted(thermopile.__all__) == [
        "Anchors", "BadSampleError", "ClassGroups", "Conversion", "ConvertSettings", "Dataset", "EstimatorSettings",
        "GlobalContrastive", "IndividualTemperature", "Loader", "Objective", "Order", "OrderSampler", "Outcome",
        "Progress", "Recipe", "RobustSettings", "RowStore", "Rows", "Run", "Sample", "Settings", "Source",
        "StateReader", "StateStore", "TemperatureRate", "Trainer", "__version__", "convert", "create_objective",
        "embed", "evaluate", "export", "inspect", "joined_world", "list_objectives", "list_presets", "list_snapshots",
        "open_run", "train",
    ]  # fmt: skip
    documented = (ROOT / "docs" / "library.md").read_text("utf-8")
    for name in thermopile.__all__:
        assert f"`{name}`" in documented or name == "__version__"
        assert getattr(thermopile, name).__doc__ or name == "__version__"
