"""The command line: one clear line for every mistake, and the right exit code."""

import errno
import json
import os
import subprocess
import sys

import pytest

from thermopile.tools.convert_sources import KINDS

from support.cli import assert_one_line, cli, succeed


@pytest.mark.parametrize(
    "command",
    ["", "bench", "bench step", "bench loader", "convert", *(f"convert {kind.name}" for kind in KINDS), "convert check",
     "effect", "embed", "eval", "export", "inspect", "state", "state check", "state log", "train"],
)  # fmt: skip
def test_every_help_ends_with_an_example(command):
    help_text = succeed(*command.split(), "--help").stdout
    assert f"thermopile {command}".strip() in help_text.split("Example")[1]


def test_the_exit_codes_are_listed_in_the_help():
    assert "0 done, 1 failed, 2 wrong usage" in cli("--help").stdout


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/run/state.lock"),
         "Error: /run/state.lock: Read-only file system; write elsewhere with --to or --out, or copy it to a writable "
         "disk"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "Error: No space left on device; free some space"),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), b"/a"), "Error: /a: No such file or directory"),
        (OSError("/a is a link"), "Error: /a is a link"),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_said_without_a_number_and_with_a_cure(monkeypatch, tmp_path, error, said):
    def fails(run):
        raise error

    monkeypatch.setattr("thermopile.trainer.run.run_status.read_status", fails)
    result = cli("status", tmp_path)
    assert (result.exit_code, result.stderr) == (1, f"{said}\n")


REFUSED_WITHOUT_TORCH = """
import json, sys
from click.testing import CliRunner
from thermopile.tools.cli import main

for words, code, said in json.loads(sys.argv[1]):
    done = CliRunner().invoke(main, words)
    assert (done.exit_code, "torch" in sys.modules) == (code, False), (words, done.output)
    assert said in done.stderr.splitlines()[-1], (words, done.stderr)
"""


def test_simple_mistakes_are_refused_without_importing_torch(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").touch()
    (tmp_path / "warnings.log").touch()
    (tmp_path / ".cut.partial" / "dataset").mkdir(parents=True)
    (tmp_path / ".cut.partial" / "plan.json").write_text("{}")
    train = ["train", "--out", "run"]
    mistakes = [
        (["train"], 2, "Missing option '--out'"),
        (train, 2, "no dataset: pass --data"),
        ([*train, "--resume"], 2, "run has no run to resume, and a new one has no dataset: pass --data"),
        ([*train, "--preset", "glyph"], 2, "did you mean 'glyphs'?"),
        ([*train, "--set", "lr=1"], 2, "unknown setting 'lr' (did you mean 'optimizer.lr'?)"),
        ([*train, "--set", "epochs=0"], 2, "epochs = 0"),
        ([*train, "--set", "epochs"], 2, "is not key=value"),
        ([*train, "--set", 'model.image.config={"a": 1}'], 2, "set each by name, model.image.config.NAME=VALUE"),
        ([*train, "--set", "optimizer=adam"], 2, "set each by name, optimizer.NAME=VALUE"),
        (["train", "--out", "begun"], 2, "begun holds a run; continue it with --resume"),
        (["train", "--out", "empty/..", "--set", "epochs=1"], 2, "is not empty; choose another directory"),
        (["train", "--out", "warnings.log", "--set", "epochs=1"], 2, "is not empty; choose another directory"),
        ([*train, "--batch-size", "64"], 2, "No such option: --batch-size. It is a setting: --set batch_size=VALUE"),
        ([*train, "--image_size=64"], 2, "It is a setting: --set data.image_size=VALUE"),
        ([*train, "--optimizer-lr=1"], 2, "It is a setting: --set optimizer.lr=VALUE"),
        ([*train, "--learning", "1"], 2, "No such option"),
        ([*train, "--data", "gone"], 2, "does not exist"),
        ([*train, "--data", "empty"], 1, "is not a dataset"),
        ([*train, "--data", "cut"], 2, "continue it with `thermopile convert … cut --resume`"),
        (["eval", "gone", "--train", "cut", "--test", "cut"], 2, "cut --resume`"),
        (["eval", "gone", "--train", "empty", "--test", "empty"], 1, "gone is not a run"),
        (["effect", "gone", "--test", "empty"], 2, "the number of runs is odd"),
        (["effect", "gone", "gone", "--test", "empty"], 1, "is not a dataset"),
        (["embed", "gone", "empty", "x.parquet"], 1, "is not a dataset"),
        (["show", "empty", "--out", "sheet.html"], 1, "is not a dataset"),
        (["convert", "check", "empty"], 1, "is not a dataset"),
        (["export", "gone", "--to", "x", "--format", "hf"], 1, "gone is not a run"),
        (["inspect", "gone"], 1, "gone is not a run"),
        (["status", "gone"], 1, "gone is not a run"),
        (["state", "check", "gone"], 1, "holds no state store"),
        (["state", "log", "gone"], 1, "holds no state store"),
    ]
    command = [sys.executable, "-c", REFUSED_WITHOUT_TORCH, json.dumps(mistakes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cut.partial", "begun", "empty", "warnings.log"]


SHOWN_WITHOUT_TORCH = """
import sys, thermopile
from thermopile.tools.cli import main

def refuse(after, *packages):
    assert not set(packages) & set(sys.modules), (after, *packages)

main(["train", "--preset", "glyphs", "--print-config"], standalone_mode=False)
main(["presets"], standalone_mode=False)
main(["settings", "data"], standalone_mode=False)
refuse("settings", "torch", "numba", "ffcv", "pandas", "matplotlib", "scipy")
thermopile.open_run(sys.argv[1]).temperatures()
refuse("open_run", "torch", "numba", "ffcv", "pandas", "matplotlib", "scipy")
for words in ("check", "log"):
    main(["state", words, sys.argv[1]], standalone_mode=False)
    refuse(words, "torch", "numba", "ffcv")
main(["inspect", sys.argv[1], "--json"], standalone_mode=False)
import thermopile.tools.report.page
refuse("inspect", "torch", "ffcv")
main(["status", sys.argv[1]], standalone_mode=False)
refuse("status", "torch")
"""


def test_a_run_is_opened_inspected_and_checked_without_importing_torch(hostile_run):
    command = [sys.executable, "-c", SHOWN_WITHOUT_TORCH, str(hostile_run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [("optimizer.lrr=1", ("did you mean 'optimizer.lr'",)), ("objective.rhoo=1", ("did you mean 'rho'",)),
     ("batch_size=100000", ("2,000 samples",)), ("epochs", ("key=value",)), ("device=cuda", ("no GPU",)),
     ("optimizer.betas=[0.9, 1.5]", ("optimizer.betas.1 = 1.5",)),
     ("optimizer.lr=inf", ("finite",)), ("objective.tau_min=1e-9", ("tau_min",)),
     ("init.run=ftp://b/x", ("'ftp://b/x' is not an address",))],
)  # fmt: skip
def test_a_bad_setting_is_wrong_usage_that_starts_no_run(pairs_dataset, tmp_path, setting, words):
    import torch

    if setting == "device=cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = cli("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", "--set", setting)
    assert_one_line(result, 2, *words)
    assert not (tmp_path / "run").exists()


def test_a_run_path_that_is_not_utf_8_is_refused_before_anything_is_written(pairs_dataset, tmp_path, monkeypatch):
    bad = tmp_path / os.fsdecode(b"caf\xe9")
    assert_one_line(
        cli("train", "--data", pairs_dataset.path, "--out", bad / "run"),
        2,
        "caf[U+DCE9]/run is not valid UTF-8",
        "--out",
    )
    assert not bad.exists()
    bad.mkdir()
    monkeypatch.chdir(bad)
    assert_one_line(
        cli("train", "--data", pairs_dataset.path, "--out", "run"), 2, "caf[U+DCE9]/run is not valid UTF-8", "--out"
    )
    assert list(bad.iterdir()) == []


CLOSED_STREAMS = """
import json, os, sys
from pathlib import Path
from thermopile.tools.cli import main

@main.command()
def look():
    links = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    inherited = [os.get_inheritable(number) for number in range(3)]
    print("words", file=sys.stderr)
    Path(sys.argv[1]).write_text(json.dumps([links, inherited]))

main(["look"])
"""


def test_streams_that_are_closed_at_the_start_are_dev_null_and_no_file_of_a_run(tmp_path):
    start = f'exec "{sys.executable}" -c "$0" "$1" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", start, CLOSED_STREAMS, str(tmp_path / "seen")], check=True)
    links, inherited = json.loads((tmp_path / "seen").read_text())
    assert (links, inherited) == (["/dev/null"] * 3, [True] * 3)


def test_a_process_ends_with_the_exit_code_of_its_error(tmp_path):
    command = [sys.executable, "-m", "thermopile.tools.cli", "train", "--out", str(tmp_path / "run"), "--set", "lr=1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown setting 'lr'" in done.stderr


def test_an_error_nobody_foresaw_is_one_line_and_a_traceback_with_debug(monkeypatch, tmp_path):
    monkeypatch.setattr("thermopile.trainer.run_directory.RunDirectory.exists", lambda self: 1 / 0)
    assert_one_line(cli("train", "--out", tmp_path, "--resume"), 1, "ZeroDivisionError", "should not happen", "--debug")
    result = cli("--debug", "train", "--out", tmp_path, "--resume")
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_reader_that_has_seen_enough_ends_the_command_without_words(hostile_run):
    command = [sys.executable, "-m", "thermopile.tools.cli", "state", "check", hostile_run.path]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr
