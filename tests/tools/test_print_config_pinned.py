"""What `train --print-config` puts out: every preset on four kinds of dataset, and what it says of what it refuses.

`tests/data/print_config` holds what is expected; delete a file there to write it anew. A preset's settings are shown as
what they change: on the glyphs beside no preset, on the other datasets beside the same preset on the glyphs.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from thermopile.pipeline.dataset.index import INDEX_FILE, seal_index
from thermopile.tools.bench.step import synthetic_dataset
from thermopile.trainer.config import load_config
from thermopile.trainer.config.layers import preset_names
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

from support.cli import cli, sets
from support.pinned import same_as_expected
from support.runs import OWN_CODE, SMALL_MODEL
from support.wrong_settings import WRONG

EXPECTED = Path(__file__).parents[1] / "data" / "print_config"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("start")


@pytest.fixture(scope="module")
def data(pairs_dataset, folder):
    """Name -> the options that name a dataset: small glyphs, and indices alone of a million samples."""
    many, fewer = (synthetic_dataset(folder / name, n).path for name, n in (("pairs", 1_000_000), ("few", 600_000)))
    index = json.loads((shutil.copytree(many, folder / "images") / INDEX_FILE).read_text())
    only_images = {"mode": "images", "tokenizer": None, "tokenizer_digest": None, "captions_per_sample": 0}
    fields = {key: value for key, value in index.items() if key not in ("format", "fingerprint")} | only_images
    (folder / "images" / INDEX_FILE).write_bytes(seal_index(fields))
    (folder / "images" / "tokenizer.json").unlink()
    places = {"glyphs": [pairs_dataset.path], "pairs": [many], "images": [folder / "images"], "mixture": [many, fewer]}
    return {name: [word for place in of for word in ("--data", place)] for name, of in places.items()}


@pytest.fixture
def ask(data, folder):
    """Return a function that gives what `train` prints, as lines without what depends on the machine."""

    def lines(*words, at="--print-config"):
        done = cli("train", *words, *sets("device=cpu"), at)
        text = (done.stdout + done.stderr).replace(str(data["glyphs"][1]), "DATA/glyphs").replace(str(folder), "DATA")
        text = text.replace(str(EXPECTED.parents[1]), "TESTS")
        return [f"exit code {done.exit_code}", *(re.sub(" +# ", "  # ", line) for line in text.splitlines() if line)]

    return lines


def with_tables(lines):
    """Lines of TOML, of which each setting has its table before it: `[optimizer] lr = 0.1`."""
    table, full = "", []
    for line in lines:
        table = line if line.startswith("[") else table
        full += [] if line.startswith("[") else [f"{table} {line}".strip()]
    return full


def changed(before, after):
    """The lines of `after` that `before` has not, and with a minus the settings that it alone has."""
    old, new = with_tables(before), with_tables(after)
    keys = {line.partition(" = ")[0].replace("# ", "") for line in new}
    gone = [f"- {line}" for line in old if line.partition(" = ")[0].replace("# ", "") not in keys]
    return [*([] if len(new) == 2 else gone), *(f"+ {line}" for line in new if line not in old)]


@pytest.mark.parametrize("name", ["glyphs", "pairs", "images", "mixture"])
def test_every_preset_has_the_same_settings_from_the_same_origins(ask, data, name):
    plain = ask(*data["glyphs"])
    text = [*plain] if name == "glyphs" else changed(plain, ask(*data[name]))
    for preset in preset_names():
        asked = ask(*data[name], "--preset", preset)
        before = plain if name == "glyphs" else ask(*data["glyphs"], "--preset", preset)
        text += ["", f"--preset {preset}", *changed(before, asked)]
    same_as_expected(EXPECTED / f"{name}.txt", "\n".join(text) + "\n")


def refused_new_runs(data, folder):
    """What is asked of a new run -> the words of its command line."""
    small = [*data["glyphs"], *sets("model.dim=8", "model.image.config.width=4", "data.image_size=16")]
    files = {"typo": "optimiser.lr = 1", "bad": "[[", "code": f"objective.name = '{OWN_CODE[-1].partition('=')[2]}'",
             "timm": "model.image.name = 'timm:resnet18'\nmodel.image.config.pretrained = true"}  # fmt: skip
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    cases = {setting: [*small, *sets(setting)] for setting in WRONG}
    cases |= {f"--config {name}": [*small, "--config", folder / f"{name}.toml"] for name in (*files, "none")}
    cases["--config code --allow-code"] = [*cases["--config code"], "--allow-code"]
    cases |= {
        "--set lr": [*small, "--set", "lr"], "--preset isogcl": [*small, "--preset", "isogcl"],
        "--share 2": [*small, "--share", "2"], "--timed": [*small, "--timed"], "--resume": ["--resume"],
        "--grow": [*small, "--grow"], "no such data": ["--data", folder / "none"], "nothing": [],
        "code": [*small, *sets(OWN_CODE[-1])],
    }  # fmt: skip
    return cases


def test_what_is_refused_of_a_new_run_is_refused_in_the_same_words(ask, data, folder):
    found = {name: ask(*words) for name, words in refused_new_runs(data, folder).items()}
    same_as_expected(EXPECTED / "refused.txt", briefly(found))


def briefly(found):
    """Each refusal below its name; of settings that are printed only the exit code and what is said beside them."""
    text = ""
    for name, lines in found.items():
        said = (line for line in lines if not re.match(r"\[|#|[\w.]+ = ", line))
        text += "\n    ".join([name, *said]) + "\n"
    return text


def test_what_is_refused_of_a_run_to_resume_is_refused_in_the_same_words(ask, data, folder, pairs_dataset):
    tree = {"epochs": 1, "batch_size": 256, "device": "cpu", "model": SMALL_MODEL,
            "data": {"path": str(pairs_dataset.path), "image_size": 16}}  # fmt: skip
    run = RunDirectory(folder / "run")
    run.create(resolve(load_config(tree), pairs_dataset)[0], lambda: None)
    whole = run.config_file.read_text()
    words = {name: ["--out", run.path, "--resume", *sets(*name.split(" and "))] for name in (
        "log_every=2", "epochs=2", "epochs=2 and log_every=2", "seed=1", "epochs=2 and seed=1", "batch_size=32",
        "optimizer.weight_decay=0.03", "model.dim=8", "objective.rho=3", "objective.tau_init=1", "objective.name=clip",
        "objective.name=isogcl", "data.select=/nowhere", "data.without=/nowhere", "init.run=/nowhere", "micro_batch=7",
        OWN_CODE[-1],
    )}  # fmt: skip
    resumed = ["--out", run.path, "--resume"]
    words |= {
        "again": resumed, "--preset glyphs": [*resumed, "--preset", "glyphs"], "other": [*resumed, *data["pairs"]],
        "images": [*resumed, *data["images"]], "moved": [*resumed, "--data", folder / "none"],
        "allowed": [*words["epochs=2 and seed=1"], "--allow-change", "epochs"],
        "a table": [*words["optimizer.weight_decay=0.03"], "--allow-change", "optimizer"],
        "epochs": [*words["epochs=2"], "--allow-change", "epochs"],
    }  # fmt: skip
    found = {name: ask(*more) for name, more in words.items()}
    found["no --resume"] = ask("--out", run.path, *data["glyphs"], at="--dry-run")
    code = OWN_CODE[-1].partition("=")[2]
    edits = {"edited": ("epochs = 1", "epochs = 3"), "no setting": ("epochs = 1", "epoch = 1"),
             "code": ('"isogclr"', f'"{code}"'), "gone": (str(pairs_dataset.path), "/nowhere"),
             "not TOML": ("epochs = 1", "epochs = = 1")}  # fmt: skip
    for name, (old, new) in edits.items():
        run.config_file.write_text(whole.replace(old, new))
        found[name], found[f"{name}, accepted"] = ask(*resumed), ask(*resumed, "--accept-config")
        found[f"{name}, allowed"] = ask(*resumed, "--accept-config", "--allow-code")
    same_as_expected(EXPECTED / "resumed.txt", briefly(found))
