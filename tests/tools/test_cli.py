"""The command line: one clear line for every mistake, and the right exit code."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from thermopile.tools.cli import main


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def assert_one_line(result, exit_code, *words):
    assert result.exit_code == exit_code, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert result.stderr.splitlines()[-1] == line
    for word in words:
        assert word in line
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "command", [(), ("convert",), ("convert", "glyphs"), ("convert", "folder"), ("train",), ("inspect",)]
)
def test_every_help_ends_with_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert f"thermopile {' '.join(command)}".strip() in result.stdout.split("Example")[1]


def test_the_exit_codes_are_listed_in_the_help():
    assert "0 done, 1 failed, 2 wrong usage" in run("--help").stdout


def test_a_missing_folder_is_wrong_usage(tmp_path):
    assert_one_line(run("convert", "folder", tmp_path / "nowhere", tmp_path / "out"), 2, "nowhere", "does not exist")


def test_an_empty_folder_is_a_failure_that_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_one_line(run("convert", "folder", tmp_path / "empty", tmp_path / "out"), 1, "holds no picture")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_corrupt_picture_is_converted_without_it(tmp_path, draw):
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(3):
        draw(i).save(folder / f"{i}.png")
    (folder / "bad.png").write_bytes((folder / "0.png").read_bytes()[:60])
    result = run("convert", "folder", folder, tmp_path / "out", "--workers", 1)
    assert result.exit_code == 0
    assert "3 samples" in result.stdout
    assert "1 left out, see" in result.stdout
    assert json.loads((tmp_path / "out" / "errors.jsonl").read_text())["uri"] == "bad.png"


def test_an_output_that_exists_is_refused(tmp_path, images_dataset, picture_folder):
    result = run("convert", "folder", picture_folder, images_dataset.path)
    assert_one_line(result, 2, str(images_dataset.path), "exists", "--overwrite")


def test_glyphs_are_refused_before_any_work_where_only_the_test_set_exists(tmp_path):
    (tmp_path / "glyphs-test").mkdir()
    assert_one_line(run("convert", "glyphs", tmp_path / "glyphs"), 2, "glyphs-test exists")
    assert not (tmp_path / "glyphs").exists()


def test_a_conversion_interrupted_says_so_in_a_word_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "thermopile.tools.cli", "convert", "glyphs", str(tmp_path / "glyphs")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    shards = tmp_path / ".glyphs.partial" / "shards"
    while not (shards.is_dir() and any(shards.iterdir())):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "Aborted!"
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == []


def test_training_without_a_dataset_is_wrong_usage(tmp_path):
    assert_one_line(run("train", "--out", tmp_path / "run"), 2, "--data")
    assert_one_line(
        run("train", "--out", tmp_path / "run", "--data", tmp_path), 1, "is no dataset", "thermopile convert"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [("optimizer.lrr=1", ("did you mean 'optimizer.lr'",)), ("objective.rhoo=1", ("did you mean 'rho'",)),
     ("batch_size=100000", ("2,000 samples",)), ("epochs", ("key=value",)), ("device=cuda", ("no GPU",)),
     ("optimizer.betas=[0.9, 1.5]", ("optimizer.betas.1 = 1.5",)),
     ("optimizer.lr=inf", ("finite",)), ("objective.tau_min=1e-9", ("tau_min",))],
)  # fmt: skip
def test_a_bad_setting_is_wrong_usage_that_starts_no_run(pairs_dataset, tmp_path, setting, words):
    import torch

    if setting == "device=cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = run("train", "--data", pairs_dataset.path, "--out", tmp_path / "run", "--set", setting)
    assert_one_line(result, 2, *words)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(pairs_dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    result = run(
        "train", "--data", pairs_dataset.path, "--out", out, "--set", "epochs=1", "--set", "data.image_size=32"
    )
    assert result.exit_code == 0, result.stderr
    return out


def test_training_shows_progress_on_stderr_and_its_end_on_stdout(finished, pairs_dataset, tmp_path):
    result = run("train", "--data", pairs_dataset.path, "--out", tmp_path / "r", "--set", "epochs=1",
                 "--set", "data.image_size=32")  # fmt: skip
    assert "trained 7 steps" in result.stdout
    last = result.stderr.splitlines()[-1]
    for words in ("7/7", "loss", "tau", "samples/s", "data wait", "store wait"):
        assert words in last


def test_a_rho_that_can_never_bind_is_warned_of(pairs_dataset, tmp_path):
    common = ("--data", pairs_dataset.path, "--set", "epochs=1", "--set", "data.image_size=32")
    result = run("train", *common, "--out", tmp_path / "high", "--set", "objective.rho=5.6")
    assert "Warning: rho 5.6 is not below log(255 negatives) = 5.54: it may never bind" in result.stderr
    assert "Warning" not in run("train", *common, "--out", tmp_path / "low", "--set", "objective.rho=5.5").stderr


def test_a_run_that_exists_is_refused_without_resume(finished, pairs_dataset):
    result = run("train", "--data", pairs_dataset.path, "--out", finished)
    assert_one_line(result, 2, "holds a run", "--resume")


def test_resuming_a_finished_run_does_nothing(finished):
    result = run("train", "--out", finished, "--resume")
    assert result.exit_code == 0
    assert "finished at step 7; nothing to do" in result.stdout


def test_resuming_with_other_settings_is_refused_naming_them(finished):
    result = run("train", "--out", finished, "--resume", "--set", "optimizer.lr=0.5", "--set", "log_every=2")
    assert_one_line(result, 2, "optimizer.lr: the run has 0.001, asked for 0.5")
    assert "log_every" not in result.stderr


def test_resuming_with_the_settings_it_was_started_with_is_no_change(finished, pairs_dataset):
    settings = ("epochs=1", "data.recipe=auto", "objective.mode=auto", "canonical_shards=0")
    overrides = [part for setting in settings for part in ("--set", setting)]
    result = run("train", "--out", finished, "--resume", "--data", pairs_dataset.path, *overrides)
    assert result.exit_code == 0, result.stderr


@pytest.fixture(scope="module")
def other_pairs(tmp_path_factory):
    out = tmp_path_factory.mktemp("other") / "glyphs"
    converted = run("convert", "glyphs", out, "--seed", 9, "--workers", 2)
    assert converted.exit_code == 0, converted.stderr
    return out


def test_resuming_with_another_dataset_is_refused_naming_both(finished, other_pairs):
    result = run("train", "--out", finished, "--resume", "--data", other_pairs)
    assert_one_line(
        result, 2, "dataset fingerprint: the store has", "number of samples: the store has 2000, this run has 10847"
    )


def test_a_process_ends_with_the_exit_code_of_its_error(finished, other_pairs):
    command = (
        sys.executable,
        "-m",
        "thermopile.tools.cli",
        "train",
        "--out",
        finished,
        "--resume",
        "--data",
        other_pairs,
    )
    assert subprocess.run(list(map(str, command)), capture_output=True).returncode == 2


def test_a_picture_folder_is_never_overwritten_by_its_own_dataset(tmp_path, draw):
    for name in ("a.png", "b.png"):
        draw(1).save(tmp_path / name)
    (tmp_path / "dataset.json").write_text('{"labels": null}')
    assert run("convert", "folder", tmp_path, tmp_path, "--overwrite").exit_code == 2
    assert_one_line(run("convert", "glyphs", tmp_path, "--overwrite"), 2, "replaces only datasets")
    assert sorted(os.listdir(tmp_path)) == ["a.png", "b.png", "dataset.json"]


def test_an_error_nobody_foresaw_is_one_line_and_a_traceback_with_debug(monkeypatch, finished):
    monkeypatch.setattr("thermopile.trainer.run_directory.RunDirectory.exists", lambda self: 1 / 0)
    assert_one_line(run("train", "--out", finished, "--resume"), 1, "ZeroDivisionError", "--debug")
    result = run("--debug", "train", "--out", finished, "--resume")
    assert isinstance(result.exception, ZeroDivisionError)
