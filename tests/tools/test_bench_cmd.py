"""`thermopile bench` at its small scale: what it prints, never how fast it was."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner

from thermopile.tools.bench.state.command import PARTS
from thermopile.tools.bench.state.sizes import FULL, SMALL
from thermopile.tools.cli import main


def bench_state(*words):
    return CliRunner().invoke(main, ["bench", "state", *map(str, words)])


FIGURES = {
    "rows": ["take_ns", "put_ns", "take_and_put_ns"],
    "step": ["resident_wait_percent", "windowed_wait_percent", "resident_step_ms", "windowed_step_ms"],
    "windowed": ["peak_memory_gb", "wait_percent", "first_wait_percent", "first_step_ms", "blocks_read",
                 "blocks_written"],
    "snapshot": ["megabytes_per_second", "training_megabytes_per_second", "held_up_ms", "held_up_worst_ms",
                 "slowed_ms"],
    "retention": ["peak_disk"],
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def measured(directory):
    done = bench_state("--scale", "small", "--json", "--dir", directory)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_json_has_every_part_and_every_figure(measured):
    assert {part: list(found["figures"]) for part, found in measured["parts"].items()} == FIGURES


def test_json_says_what_was_measured_and_beside_what(measured):
    for part, found in measured["parts"].items():
        assert found["sizes"]["samples"] == SMALL[part].samples
        assert f"{SMALL[part].samples:,}" in found["title"]
        assert found["versus"]
        assert found["seconds"] > 0
        assert found["peak_memory_bytes"] > 10**8  # torch alone takes as much


def test_every_figure_is_a_finite_number_in_a_unit(measured):
    for found in measured["parts"].values():
        for figure in found["figures"].values():
            assert set(figure) == {"label", "unit", "ours", "alternative", "ratio", "asked", "held"}
            assert figure["label"]
            assert figure["unit"]
            assert math.isfinite(figure["ours"])
            assert figure["ours"] >= 0
            assert (figure["ratio"] is None) or (figure["alternative"] is not None)


def test_what_is_asked_of_the_full_sizes_is_shown_but_not_judged_at_small_ones(measured):
    figures = measured["parts"]["rows"]["figures"]
    assert [figure["asked"] for figure in figures.values()] == ["≤ 150 ns", "≤ 150 ns", "ratio ≥ 8"]
    assert all(figure["held"] is None for found in measured["parts"].values() for figure in found["figures"].values())


def test_every_block_was_read_and_written_back_and_old_snapshots_made_room(measured):
    windowed = measured["parts"]["windowed"]["figures"]
    assert windowed["blocks_read"]["ours"] > 0.5
    assert windowed["blocks_written"]["ours"] > 0.5
    disk = measured["parts"]["retention"]["figures"]["peak_disk"]
    assert 1 <= disk["ours"] < SMALL["retention"].snapshots


def test_the_machine_is_named(measured):
    assert set(measured["machine"]) == {"cpu", "cores", "ram_bytes", "torch", "zarr", "icechunk", "gpu"}
    assert measured["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert measured["machine"]["ram_bytes"] > 10**8


def test_nothing_is_left_in_the_directory(measured, directory):
    assert os.listdir(directory) == []


def test_without_json_a_table_is_printed_for_the_parts_asked_for(directory):
    done = bench_state("--scale", "small", "--part", "retention", "--dir", directory)
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "cores" in lines[0]
    assert "GPU" in lines[0]
    assert "icechunk" in lines[0]
    assert next(line for line in lines if line.partition(":")[0] in PARTS).startswith("retention: 5 snapshots")
    assert "figure ours alternative ratio asked" in lines
    assert any(line.startswith("most disk, in snapshots") and line.endswith("≤ 5 ×") for line in lines)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("command", [[], ["state"], ["objective"], ["loader"], ["convert"]])
def test_help_ends_with_an_example(command):
    help_text = CliRunner().invoke(main, ["bench", *command, "--help"]).stdout
    assert f"thermopile {' '.join(['bench', *command])} " in help_text.split("Example")[1]


def test_every_part_can_be_chosen_and_has_both_scales():
    assert set(PARTS) == set(FULL) == set(SMALL) == set(FIGURES)


def test_a_part_without_room_is_named_with_what_it_needs_and_the_exit_code_says_so(directory):
    done = bench_state("--part", "rows", "--samples", 10**12, "--json", "--dir", directory)
    assert done.exit_code == 1
    problem = json.loads(done.stdout)["parts"]["rows"]["problem"]
    assert "it needs 96,001.0 GB of memory" in problem
    assert "lower --samples" in problem
    assert "not measured: rows" in done.stderr
    assert problem in bench_state("--part", "rows", "--samples", 10**12, "--dir", directory).stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [(("--part", "rows", "--budget", 5), "--budget means nothing to part rows"),
     (("--part", "windowed", "--part", "step", "--step-ms", 5), "--step-ms means nothing to part step"),
     (("--part", "columns"), "'columns' is not one of 'rows'"),
     (("--dir", "/nowhere"), "does not exist")],
)  # fmt: skip
def test_options_that_mean_nothing_are_wrong_usage(words, expected):
    done = bench_state(*words)
    assert done.exit_code == 2
    assert expected in done.stderr


def test_ctrl_c_ends_the_measurement_with_a_word_and_leaves_nothing(tmp_path):
    command = [
        sys.executable, "-m", "thermopile.tools.cli", "bench", "state", "--part", "windowed", "--samples", "20000",
        "--budget", "0.32", "--step-ms", "1000", "--scale", "small", "--dir", str(tmp_path),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(tmp_path.glob("*/state")):
        time.sleep(0.05)
        assert process.poll() is None, process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the measuring process as well
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.splitlines()[-1] == "Aborted!"
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == []


def bench_objective(*words):
    return CliRunner().invoke(main, ["bench", "objective", "--scale", "small", *map(str, words)])


@pytest.fixture(scope="module")
def measured_objective():
    done = bench_objective("--name", "clip", "--batch", 8, "--dim", 4, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_time_and_peak_memory_of_an_objective_are_measured_beside_three_products(measured_objective):
    (times,), (peaks,) = measured_objective["time"], measured_objective["memory"]
    assert times["batch"] == peaks["batch"] == 8
    assert times["rounds"] >= 5
    assert times["threads"] >= 1
    assert set(times["ms"]) == set(times["times_ours"]) == set(peaks["bytes"]) == {"ours", "products"}
    assert min(peaks["bytes"].values()) >= 0
    assert times["left_out"] == peaks["left_out"] == {}


def test_an_objective_with_one_mode_is_measured_in_that():
    done = bench_objective("--name", "simclr", "--part", "memory", "--batch", 8, "--dim", 4, "--json")
    assert json.loads(done.stdout)["mode"] == "unimodal"


def test_what_was_measured_of_an_objective_and_where_is_told(measured_objective):
    told = {key: measured_objective[key] for key in ("name", "mode", "dim")}
    assert told == {"name": "clip", "mode": "bimodal", "dim": 4}
    assert measured_objective["device"] in ("cpu", "cuda")
    assert measured_objective["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert measured_objective["asked"] == {}


def test_isogclr_on_pairs_stands_beside_its_rivals_in_a_table():
    done = bench_objective("--part", "time", "--batch", 8, "--dim", 4)
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "batch ours 3 bare products plain autograd FastCLIP's path rounds" in lines
    assert sum(line.startswith("8 ") and line.count("×") == 3 for line in lines) == 1
    assert "peak memory" not in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [(("--name", "isogcl"), "objective 'isogcl' is unknown (did you mean 'isogclr'?)"),
     (("--name", "clip", "--mode", "unimodal"), "objective 'clip' has no mode 'unimodal'"),
     (("--batch", 1), "1 is not in the range x>=2"),
     (("--part", "disk"), "'disk' is not one of 'time', 'memory'")],
)  # fmt: skip
def test_an_objective_that_cannot_be_measured_is_wrong_usage(words, expected):
    done = bench_objective(*words)
    assert done.exit_code == 2
    assert expected in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_wrong_usage():
    done = bench_objective("--device", "cuda")
    assert done.exit_code == 2
    assert "--device cuda: torch sees no GPU; use --device cpu" in done.stderr
