"""`thermopile state`: what check and log print and refuse. What a check finds: state_store/test_check.py."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from thermopile.state_store.commit import ColumnPart
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.trainer.config import load_config
from thermopile.trainer.run_directory import RunDirectory

from support import sound_state
from support.cli import cli, succeed
from support.commits import commit
from support.damage import cut_short
from support.datasets import write_dataset
from support.sound_state import BLOCK, FIELDS, sound_columns, write_columns

state = partial(cli, "state")

SETTINGS = {"name": "isogclr", "tau_min": 0.005, "tau_max": 1.0}


@pytest.fixture
def make_run(tmp_path):
    """Make a run whose state has these columns, and settings with this objective and this dataset."""

    def make(columns=None, *, objective=SETTINGS, data="nowhere", **changes):
        run = RunDirectory(tmp_path / "run")
        run.create(load_config({"objective": objective, "data": {"path": str(data)}}), lambda: None)
        write_columns(run.state, columns or sound_columns(), **changes)
        return run.path

    return make


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """A sound run that no test changes."""
    run = RunDirectory(tmp_path_factory.mktemp("runs") / "run")
    run.create(load_config({"objective": SETTINGS}), lambda: None)
    write_columns(run.state, sound_columns())
    return run.path


def findings(*words):
    """What `check` found in one snapshot, and the exit code."""
    done = state("check", *words, "--json")
    (snapshot,) = json.loads(done.stdout)["snapshots"]
    return snapshot, done.exit_code


# check


def test_a_sound_state_is_a_table_and_exit_code_0(one_run):
    done = succeed("state", "check", one_run)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("step-7 epoch 2, 20")
    assert "image/tau float32 1,000 334 0.005 … 1 sound" in lines
    assert "last_step uint32 1,000 334 0 … 7 sound" in lines
    assert lines[-1] == "step-7 is sound"
    assert "problem" not in done.stdout


def test_the_state_of_a_real_store_is_sound(tmp_path):
    import torch

    with StateStore.create(tmp_path / "state", 500, FIELDS, block_rows=200, dataset_fingerprint="x") as store:
        for step in (1, 2):
            ids = np.arange(step, 500, 3)
            store.put(ids, {name: torch.full((len(ids),), 0.1 * step) for name in FIELDS}, step=step)
            store.snapshot(step, epoch=0).result()
    assert state("check", tmp_path / "state", "--all").exit_code == 0


def test_json_has_every_figure(one_run):
    snapshot, exit_code = findings(one_run)
    assert exit_code == 0
    assert (snapshot["tag"], snapshot["step"], snapshot["epoch"], snapshot["sound"]) == ("step-7", 7, 2, True)
    tau = snapshot["columns"][1]
    assert tau == {
        "name": "image/tau", "dtype": "float32", "rows": 1000, "unseen": 334, "lowest": pytest.approx(0.005),
        "highest": 1.0, "sound": True, "problems": [], "problems_not_listed": 0,
    }  # fmt: skip


def test_a_fault_is_one_line_with_array_chunk_and_the_first_ids(make_run):
    columns = sound_columns()
    columns["image/u"][300:400] = np.nan
    done = state("check", make_run(columns))
    assert done.exit_code == 1
    assert (
        "problem  array 'image/u', chunk 1: 100 rows not finite; ids 300, 301, 302, 303, 304, …"
        in done.stdout.splitlines()
    )
    assert "1 problem" in next(line for line in done.stdout.splitlines() if line.startswith(" image/u"))
    assert done.stdout.splitlines()[-1] == "step-7 is NOT SOUND"


def test_bounds_that_the_objective_does_not_set_are_noted(make_run):
    columns = sound_columns()
    columns["image/tau"][1] = 50.0
    snapshot, exit_code = findings(make_run(columns, objective={"name": "isogclr", "tau_min": 0.005}))
    assert exit_code == 0
    assert any("isogclr has no tau_max" in note for note in snapshot["notes"])
    assert not any("tau_min" in note for note in snapshot["notes"])


def test_problems_that_are_not_listed_are_counted(tmp_path):
    columns = sound_columns(samples=30 * BLOCK)
    columns["image/u"][:] = np.nan
    write_columns(tmp_path / "state", columns)
    assert "array 'image/u': 10 more, in later chunks" in state("check", tmp_path / "state").stdout


def test_all_checks_every_snapshot_and_one_that_is_not_sound_decides(tmp_path):
    columns = sound_columns()
    repository = write_columns(tmp_path / "state", columns)
    columns["image/u"][1] = np.nan
    commit(repository, 8, [ColumnPart(0, columns)])
    done = state("check", tmp_path / "state", "--all", "--json")
    assert done.exit_code == 1
    seen = [(snapshot["tag"], snapshot["sound"]) for snapshot in json.loads(done.stdout)["snapshots"]]
    assert seen == [("step-0", True), ("step-7", True), ("step-8", False)]
    assert findings(tmp_path / "state", "--at", "step-7")[1] == 0
    assert "step-7 is sound" in state("check", tmp_path / "state", "--all").stdout


@pytest.fixture(params=[cut_short, os.unlink])
def damaged_run(request, make_run):
    """A run the file of whose newest snapshot, step-7, is damaged; and that file, in the directory of the state."""
    run = make_run()
    file = f"snapshots/{StateReader.open(run / 'state').snapshot.id}"
    request.param(run / "state" / file)
    return run, file


@pytest.mark.parametrize("words", [(), ("--all",)])
def test_a_snapshot_that_cannot_be_read_is_a_problem_though_the_others_are_sound(damaged_run, words):
    run, file = damaged_run
    done = state("check", run, *words)
    assert done.exit_code == 1
    sound, problem, verdict = done.stdout.splitlines()[-3:]
    assert (sound, verdict) == ("step-0 is sound", "step-7 is NOT SOUND")
    assert problem.startswith(f"problem  snapshot step-7 cannot be read: {file} in the state")


@pytest.mark.parametrize("words", [(), ("--all",)])
def test_a_snapshot_that_cannot_be_read_is_in_the_json(damaged_run, words):
    run, file = damaged_run
    done = state("check", run, *words, "--json")
    seen = json.loads(done.stdout)
    assert (done.exit_code, seen["sound"]) == (1, False)
    assert [(snapshot["tag"], snapshot["sound"]) for snapshot in seen["snapshots"]] == [("step-0", True)]
    (unreadable,) = seen["unreadable"]
    assert unreadable.pop("reason")
    assert unreadable == {"tag": "step-7", "id": file.removeprefix("snapshots/"), "file": file}


def test_a_damaged_snapshot_and_a_sound_one_each_have_their_own_verdict(damaged_run):
    run, file = damaged_run
    done = state("check", run, "--at", "step-7")
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"snapshot step-7 cannot be read: {file} in" in done.stderr
    assert "readable snapshots: step-0" in done.stderr
    assert state("check", run, "--at", "step-0").exit_code == 0


@pytest.mark.parametrize("words", [(), ("--all",)])
def test_a_state_without_any_snapshot_that_can_be_read_is_not_sound(damaged_run, words):
    run, file = damaged_run
    for path in (run / "state" / "snapshots").iterdir():
        path.unlink(missing_ok=True)
    done = state("check", run, *words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "snapshot step-0 cannot be read" in done.stderr
    assert file in done.stderr


def test_all_goes_with_no_other_snapshot(one_run):
    done = state("check", one_run, "--all", "--at", "step-0")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--at selects one snapshot and --all selects every one" in done.stderr


@pytest.fixture
def dataset(tmp_path):
    """16 samples without pictures or captions."""
    return write_dataset(tmp_path / "dataset", [pa.table({"key": [str(i) for i in range(16)]})])


def test_a_run_on_the_dataset_of_its_state_is_sound(make_run, dataset):
    columns = sound_columns(dataset.n)
    snapshot, exit_code = findings(make_run(columns, data=dataset.path, fingerprint=dataset.index.fingerprint))
    assert (exit_code, snapshot["other_problems"], snapshot["notes"]) == (0, [], [])


def test_another_dataset_where_the_run_had_its_own_is_a_problem(make_run, dataset):
    snapshot, exit_code = findings(make_run(data=dataset.path))
    assert exit_code == 1
    (said,) = snapshot["other_problems"]
    assert said == (
        f"the state is for dataset glyphs-1… with 1,000 samples, but {dataset.path} is "
        f"{dataset.index.fingerprint[:12]}… with 16"
    )


def test_a_dataset_that_was_moved_is_noted(one_run):
    (note,) = findings(one_run)[0]["notes"]
    assert note.startswith("The run's dataset was not compared")


@pytest.mark.parametrize("command", [("check",), ("log",)])
def test_a_state_is_found_by_its_run_or_by_its_own_path(one_run, command, tmp_path):
    alone = shutil.copytree(one_run / "state", tmp_path / "alone")
    for path in (one_run, one_run / "state", alone):
        assert state(command[0], path).exit_code == 0


def test_the_settings_of_a_state_named_by_its_own_path_are_those_of_its_run(one_run, tmp_path):
    assert not any("No usable run settings" in note for note in findings(one_run / "state")[0]["notes"])
    (note,) = findings(shutil.copytree(one_run / "state", tmp_path / "alone"))[0]["notes"]
    assert note.endswith(", so no dataset was compared, and tau not checked against bounds.")


def test_settings_that_cannot_be_read_do_not_stop_the_check(make_run):
    run = make_run()
    (run / "config.toml").write_text("not toml")
    snapshot, exit_code = findings(run)
    assert exit_code == 0
    assert any("config.toml is damaged" in note for note in snapshot["notes"])
    assert not any("were found" in note for note in snapshot["notes"])


# log


def test_log_lists_the_snapshots_oldest_first_with_the_size_on_disk(one_run):
    done = state("log", one_run)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    first, last = StateReader.open(one_run / "state", "step-0").snapshot, StateReader.open(one_run / "state").snapshot
    local = last.written_at.astimezone()
    assert lines[0] == ["tag", "step", "epoch", "when", "written", "id"]
    assert (lines[2][0], lines[2][-3:]) == ("step-0", ["0", "bytes", first.id])
    when = [f"{local:%Y-%m-%d}", f"{local:%H:%M:%S}"]
    assert lines[3] == ["step-7", "7", "2", *when, "20.0", "kB", last.id]
    size = sum(path.stat().st_size for path in (one_run / "state").rglob("*") if path.is_file())
    assert done.stdout.splitlines()[-1] == f"2 snapshots, {size / 1000:.1f} kB on disk in {one_run / 'state'}"


def test_log_as_json(one_run):
    seen = json.loads(state("log", one_run, "--json").stdout)
    last = StateReader.open(one_run / "state").snapshot
    assert [snapshot["tag"] for snapshot in seen["snapshots"]] == ["step-0", "step-7"]
    assert seen["snapshots"][1] == {
        "tag": "step-7", "step": 7, "epoch": 2, "written_at": last.written_at.isoformat(), "bytes_written": 20_000,
        "id": last.id, "config_hash": "", "dataset_fingerprint": "glyphs-1",
    }  # fmt: skip
    assert seen["bytes_on_disk"] > 20_000


def test_log_has_a_row_for_a_snapshot_that_cannot_be_read(damaged_run):
    run, file = damaged_run
    done = state("log", run)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert [line[0] for line in lines[2:4]] == ["step-0", "step-7"]
    assert lines[3] == ["step-7", "–", "–", "unreadable", "–", file.removeprefix("snapshots/")]
    assert done.stdout.splitlines()[-1].startswith("1 snapshot and 1 unreadable, ")
    seen = json.loads(state("log", run, "--json").stdout)
    assert [snapshot["tag"] for snapshot in seen["snapshots"]] == ["step-0"]
    assert [snapshot["file"] for snapshot in seen["unreadable"]] == [file]


def test_a_path_with_escape_sequences_is_shown_harmless(one_run, tmp_path):
    path = shutil.copytree(one_run / "state", tmp_path / "red \x1b[31m")
    done = succeed("state", "log", path)
    assert "\x1b" not in done.output


# Not ru_maxrss, which begins with the memory of the process that forked this one.
PEAK = (
    "import sys; from pathlib import Path; from thermopile.tools.cli import main\n"
    "main(sys.argv[1:], standalone_mode=False)\n"
    "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
)


@pytest.mark.soak
def test_memory_does_not_grow_with_the_number_of_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(sound_state, "BLOCK", 65_536)
    peaks = []
    for samples in (300_000, 3_000_000):
        write_columns(tmp_path / str(samples), sound_columns(samples))
        words = ["state", "check", str(tmp_path / str(samples))]
        done = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    # 2.7 million rows more are 54 MB of state.
    assert peaks[1] - peaks[0] < 40, peaks
