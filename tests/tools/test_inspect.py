import json
import re
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from thermopile.state_store.errors import SnapshotNotFoundError
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.tools.cli import main
from thermopile.tools.inspection.findings import look
from thermopile.tools.report import page as page_module

from support.cli import answer, assert_one_line, cli, succeed
from support.written_runs import train_on, write_run

inspect = partial(cli, "inspect")


def test_a_table_is_printed_and_the_last_line_is_the_report(inspected, hostile_report):
    lines = inspected[1].stdout.splitlines()
    assert lines[-1] == str(hostile_report)
    assert hostile_report.is_file()
    table = [" ".join(line.split()) for line in lines]
    assert "tau of the visited samples image text" in table
    assert "samples 66, of which 100% visited, 1 time" in table
    assert [line for line in table if line.startswith("objective isogclr: rho 1, gamma 0.8, eta 0.005")]
    assert "highest 0.1000 0.1374" in table
    assert "share at tau_min (0.005) 0% 0%" in table
    assert "Spearman, class size and mean tau +1.00 -1.00" in table
    assert next(line for line in table if line.startswith("lowest … highest")).count("█") >= 2


def test_the_table_is_plain_where_stdout_is_no_terminal(inspected):
    assert "\x1b" not in inspected[1].stdout
    assert inspected[1].stderr == ""


def test_json_is_one_object_with_every_figure(hostile_run, hostile_dataset):
    done = succeed("inspect", hostile_run.path, "--json")
    seen = json.loads(done.stdout)
    assert seen["dataset"] == str(hostile_dataset.path)
    assert seen["snapshot"]["tag"] == "step-5"
    assert (seen["samples"], seen["share_visited"], seen["visits"]["max"]) == (66, 1.0, 1)
    assert seen["objective"] | {"name": "isogclr", "rho": 1.0} == seen["objective"]
    assert list(seen["sides"]) == ["image", "text"]
    first = seen["sides"]["image"]
    assert first["tau"]["max"] == pytest.approx(0.1)
    assert first["highest"][0] == seen["sides"]["text"]["lowest"][0]
    (groups,) = seen["groups"]
    assert (groups["column"], groups["groups"]) == ("group", 6)
    correlation = groups["correlation"]["image"]
    assert correlation["spearman"] == pytest.approx(1.0)
    assert -1 < correlation["permuted"] < 1
    assert [band["name"] for band in groups["bands"]] == ["head", "medium", "tail"]


@pytest.mark.parametrize("words", [(), ("--sample", "3")])
def test_json_is_printed_and_nothing_is_written_also_where_the_run_is_read_only(hostile_run, tmp_path, words):
    run = shutil.copytree(hostile_run.path, tmp_path / "run", ignore=shutil.ignore_patterns("report"))
    (run / "report").write_text("a page that took minutes")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert answer("inspect", run, *words)["snapshot"]["tag"] == "step-5"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_at_inspects_an_earlier_snapshot(hostile_run, tmp_path):
    run = shutil.copytree(hostile_run.path, tmp_path / "run")
    seen = answer("inspect", run, "--at", "step-0")
    assert (seen["snapshot"]["tag"], seen["share_visited"], seen["sides"]) == ("step-0", 0.0, {})
    assert "No sample was visited by step-0" in seen["notes"][0]


def test_the_report_on_a_snapshot_that_was_named_is_a_file_of_its_own(inspected, tmp_path):
    run = shutil.copytree(inspected[0].path, tmp_path / "run")
    assert succeed("inspect", run, "--at", "step-5").stdout.splitlines()[-1] == f"{run}/report/report-step-5.html"
    assert {path.name for path in (run / "report").iterdir()} == {"report.html", "report-step-5.html"}


def test_inspect_changes_nothing_but_the_report(hostile_run):
    def files():
        paths = (path for path in hostile_run.path.rglob("*") if path.is_file())
        return {path: path.read_bytes() for path in paths if hostile_run.report not in path.parents}

    before = files()
    inspect(hostile_run.path, "--at", "step-0")
    assert files() == before


def test_missing_parts_are_noted_in_the_terminal(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, {}, snapshot=False)
    lines = inspect(run.path).stdout.splitlines()
    assert lines[3].startswith("note       The run has no snapshot of its state yet")
    assert lines[-1] == str(run.report / "report.html")


@pytest.fixture(scope="module")
def moved_run(hostile_dataset, tau_by_class_size, tmp_path_factory):
    """A run with a snapshot at step 5 and one at step 9, by which sample 3 had become the hottest of its side."""
    first, later = tau_by_class_size, tau_by_class_size.copy()
    later[3] = 0.9
    path = tmp_path_factory.mktemp("moved") / "run"
    run = write_run(path, hostile_dataset, {"image": first, "text": first})
    train_on(run, {"image": later, "text": first}, step=9)
    return run


def test_the_samples_that_moved_most_between_two_snapshots_have_a_sheet(moved_run):
    sheets = page_module._sheets(look(moved_run.path, against="step-5"), page_module.MAX_PAGE_BYTES)[2]
    assert "image: samples whose tau rose most" in sheets
    assert "→ 0.9000</b>" in sheets


@pytest.mark.wide
def test_a_report_on_two_snapshots_by_two_columns_needs_neither_torch_nor_ffcv(moved_run):
    words = ["inspect", str(moved_run.path), "--against", "step-5", "--by", "group", "--by", "uri"]
    program = (
        "import sys; from thermopile.tools.cli import main; from thermopile.tools.report import html\n"
        "html.LAYOUTS = html.LAYOUTS[:1]  # the other one imports nothing more\n"
        f"main({words}, standalone_mode=False)\n"
        "sys.exit(str({'torch', 'ffcv'} & set(sys.modules)) if {'torch', 'ffcv'} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # which has progress where the machine is slow
    page = (moved_run.report / "report.html").read_text("utf-8")
    assert re.findall("<h2[^>]*>(By .*?)</h2>", page) == ["By class", "By uri"]
    assert "picture of sample 0" in page
    assert "image: samples whose tau rose most" in page
    assert "→ 0.9000</b>" in page


def test_two_snapshots_are_compared_and_all_of_them_are_shown_through_time(moved_run):
    seen = answer("inspect", moved_run.path, "--against", "step-5")
    assert [at["tag"] for at in seen["through_time"]["snapshots"]] == ["step-5", "step-9"]
    drift = seen["drift"]
    assert (drift["from"], drift["to"], drift["visited"]) == ("step-5", "step-9", 66)
    assert [mover["sample_id"] for mover in drift["sides"]["image"]["most_risen"]] == [3]


def test_single_samples_are_shown_with_their_history_and_their_place_among_all(moved_run):
    done = succeed("inspect", moved_run.path, "--sample", "3", "7")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert [line for line in lines if line.startswith("id ")] == ["id 3", "id 7"]
    (rank,) = [line for line in lines if line.startswith("image tau among all")][:1]
    assert "higher than 98.48% of the visited samples" in rank
    assert [line.split()[0] for line in lines if line.startswith("step-")] == ["step-0", "step-5", "step-9"] * 2
    assert lines[-1] == str(moved_run.report / "samples.html")
    page = (moved_run.report / "samples.html").read_text("utf-8")
    assert "Sample 3</h2>" in page
    assert "Sample 7</h2>" in page


def test_single_samples_as_json_have_null_where_nothing_was_visited_yet(moved_run):
    seen = answer("inspect", moved_run.path, "--sample", "3")
    (sample,) = seen["samples"]
    assert sample["sample_id"] == 3
    assert [at["image/log_s"] for at in sample["history"]] == [None, 0.0, 0.0]
    assert sample["state"]["image/tau"] == pytest.approx(0.9)


def test_samples_of_a_run_without_a_snapshot_are_shown_with_what_the_dataset_says(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, {}, snapshot=False)
    done = succeed("inspect", run.path, "--sample", "0")
    assert "no snapshot of its state yet" in done.stdout
    assert "caption" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["7"], "sample ids come after --sample"),
        (["--sample", "1", "--export", "rows.csv"], "--sample has no effect with --export"),
        (["--sample", "1", "--map"], "--map has no effect with --sample"),
        (["--export", "rows.csv", "--json"], "--json has no effect with --export"),
        (["--overwrite"], "--overwrite has no effect with a report"),
        (["--json", "--to", "."], "--to has no effect with --json"),
    ],
)
def test_wrong_usage_is_one_clear_error(hostile_run, words, said):
    done = inspect(hostile_run.path, *words)
    assert_one_line(done, 2, said)


def test_all_rows_are_exported_and_a_file_that_is_there_is_kept(hostile_run, tmp_path):
    to = tmp_path / "rows.parquet"
    done = inspect(hostile_run.path, "--export", to)
    assert (done.exit_code, f"{to}: 66 rows" in done.stdout) == (0, True)
    assert pq.read_table(to)["sample_id"].to_pylist() == list(range(66))
    assert_one_line(inspect(hostile_run.path, "--export", to), 2, "--overwrite")
    assert inspect(hostile_run.path, "--export", to, "--overwrite").exit_code == 0


def test_a_snapshot_deleted_while_it_was_read_is_read_again_from_the_next(hostile_run, monkeypatch, tmp_path):
    rows = StateReader.rows
    for words in (["--json"], ["--sample", "1"], ["--export", tmp_path / "rows.csv"]):
        left = [SnapshotNotFoundError("step-4 was deleted while it was read")]
        monkeypatch.setattr(
            StateReader, "rows", lambda self, *asked, left=left: self.fail(left.pop()) if left else rows(self, *asked)
        )
        monkeypatch.setattr(StateReader, "fail", lambda self, error: (_ for _ in ()).throw(error), raising=False)
        assert inspect(hostile_run.path, *words).exit_code == 0
        assert left == []


def test_no_cell_of_a_table_is_cut_in_a_narrow_terminal(hostile_run):
    done = CliRunner(env={"COLUMNS": "60"}).invoke(main, ["inspect", str(hostile_run.path), "--sample", "3"])
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    head = "snapshot image log s image tau image u text log s text tau text u visits last step"
    assert head in lines
    (row,) = [line for line in lines if line.startswith("step-5 ")]
    assert len(row.split()) == 9
    assert "…" not in row


def test_a_run_that_may_only_be_read_is_refused_at_once_and_shown_elsewhere(hostile_run, tmp_path):
    run = shutil.copytree(hostile_run.path, tmp_path / "run", ignore=shutil.ignore_patterns("report"))
    (run / "report").write_text("no directory")
    assert_one_line(inspect(run), 1, "the page cannot be written to", "--to")
    done = inspect(run, "--to", tmp_path / "else" / "where", "--sample", "3")
    assert done.stdout.splitlines()[-1] == str(tmp_path / "else" / "where" / "samples.html")
    assert inspect(run, "--to", tmp_path / "not", "--sample", "999").exit_code == 2
    assert not (tmp_path / "not").exists()


def test_a_run_can_be_inspected_while_it_trains(moved_run):
    reader = StateReader.open(moved_run.state)
    identity = {"samples": reader.samples, "dataset_fingerprint": reader.dataset_fingerprint}
    with StateStore.open(moved_run.state, fields=reader.initial, **identity) as store:
        rows = {name: torch.full((66,), 0.5) for name in reader.fields}
        store.put(np.arange(66), rows, step=10)
        done = succeed("inspect", moved_run.path, "--sample", "3", "--json")
        assert json.loads(done.stdout)["snapshot"]["tag"] == "step-9"
