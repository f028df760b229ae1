"""The kind of a sample as far as its row of state tells it."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

import thermopile
from thermopile.state_store.errors import FieldError
from thermopile.tools.inspection import opening
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.rows_export import export_rows
from thermopile.tools.inspection.temperatures import kinds as module
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES, KindRules
from thermopile.tools.inspection.temperatures.samples import read_histories
from thermopile.tools.inspection.temperatures.survey import survey

from support.cli import answer, cli
from support.written_runs import write_run, write_state

N, APART = 2000, 70
ROWS = {
    "too_few_visits": [
        {"visits": 0},
        {"visits": 4},
        {"visits": 4, "image/tau": 0.005, "image/u": 5, "image/log_s": 9},  # else stuck
        {"visits": 4, "image/log_s": 9},  # else a misfit
    ],
    "stuck": [
        {"image/tau": 0.005, "image/u": 5, "image/log_s": 40},
        {"image/tau": 0.00504, "image/u": -4.96, "image/log_s": 0.1},
        {"text/tau": 0.005, "text/u": 5, "text/log_s": 2, "image/log_s": -30},  # one side is enough
    ],
    "misfit": [
        {"image/log_s": 3, "text/log_s": -2},
        {"image/log_s": -2, "text/log_s": 2.5},
        {"image/tau": 0.005, "image/u": 4.9, "image/log_s": 9},  # u is not at its bound
        {"image/tau": 0.0051, "image/u": 5, "image/log_s": 9},  # tau is not at its floor
        {"image/tau": 0.02, "text/log_s": 9},
    ],
    "ordinary": [
        {},
        {"image/log_s": 1, "text/log_s": -1},  # their sum is not above 0
        {"image/tau": 0.02},  # a low temperature alone says nothing
        {"image/tau": 0.005, "image/u": 5},  # at the floor, but the positive outweighs the negatives
        {"image/u": 5},
    ],
}
"""Kind -> rows in which what differs from an ordinary sample makes it of this kind."""
EXPECTED = [kind for kind, rows in ROWS.items() for _ in rows]


def by_hand():
    """Columns of N samples, of which the first are ROWS, spread over the blocks."""
    rng = np.random.default_rng(3)
    columns = {"visits": np.full(N, 5)}
    for side in ("image", "text"):
        columns |= {f"{side}/tau": rng.uniform(0.1, 0.2, N), f"{side}/log_s": np.full(N, -4.0)}
        columns[f"{side}/u"] = np.zeros(N)
        columns[f"{side}/tau"][APART * np.arange(len(EXPECTED))] = 0.15
    for number, row in enumerate(row for rows in ROWS.values() for row in rows):
        for name, value in row.items():
            columns[name][APART * number] = value
    return columns


def slowly(columns):
    """The kind of every sample by the definitions, one at a time."""

    def kind(row):
        if row["visits"] < 5:
            return "too_few_visits"
        if any(row[f"{side}/tau"] <= 0.00505 and row[f"{side}/log_s"] > 0 and abs(row[f"{side}/u"]) >= 4.95
               for side in ("image", "text")):  # fmt: skip
            return "stuck"
        return "misfit" if row["image/log_s"] + row["text/log_s"] > 0 else "ordinary"

    return [kind({name: values[i] for name, values in columns.items()}) for i in range(N)]


@pytest.fixture(scope="module")
def columns():
    return by_hand()


@pytest.fixture(scope="module")
def run(pairs_dataset, columns, tmp_path_factory):
    fields = {name: values for name, values in columns.items() if name != "visits"}
    return write_state(tmp_path_factory.mktemp("kinds") / "run", pairs_dataset, fields, columns["visits"])


@pytest.fixture(scope="module")
def frame(run):
    return thermopile.open_run(run.path).temperatures().frame(columns=["kind", "image/tau"])


def test_every_sample_has_the_first_kind_that_applies(frame):
    assert frame["kind"][APART * np.arange(len(EXPECTED))].tolist() == EXPECTED
    assert set(ROWS) < set(KIND_NAMES)


def test_the_kinds_of_all_samples_are_those_of_the_definitions(frame, columns):
    assert frame["kind"].to_list() == slowly(columns)


@pytest.mark.wide
def test_single_samples_are_shown_with_their_kind_in_words_and_for_a_program_by_name(run, tmp_path):
    ids = list(map(str, APART * np.arange(len(EXPECTED))))
    asked = ["inspect", str(run.path), "--sample"]
    seen = answer(*asked, *ids)
    assert [sample["kind"] for sample in seen["samples"]] == EXPECTED
    one_of_each = [ids[EXPECTED.index(kind)] for kind in ROWS]
    done = cli(*asked, *one_of_each, "--to", tmp_path)
    words = [kind.replace("_", " ") for kind in ROWS]
    assert re.findall(r"^kind +(.+)$", done.stdout, re.MULTILINE) == words
    page = (tmp_path / "samples.html").read_text("utf-8")
    assert re.findall(r"<dt>kind</dt><dd><bdi>(.*?)</bdi>", page) == words


def test_a_sample_has_no_kind_where_the_state_says_too_little(pairs_dataset, tmp_path):
    inspection = read_run(write_run(tmp_path / "run", pairs_dataset, {}, objective="clip"))
    assert [sample.kind for sample in read_histories(inspection, [3], survey(inspection))] == [None]


@pytest.mark.parametrize("piece", [64, 1 << 18])
def test_counts_and_sheets_cover_all_rows_in_pieces_of_any_size(run, frame, columns, monkeypatch, piece):
    monkeypatch.setattr(opening, "STATE_ROWS_AT_ONCE", piece)
    monkeypatch.setattr(module, "KIND_SHEET_SAMPLES", 4)
    found = survey(read_run(run), suspects=6).kinds
    kinds = frame["kind"].to_numpy()
    assert found.counts == {kind: int((kinds == kind).sum()) for kind in ROWS}
    score = columns["image/log_s"] + columns["text/log_s"]
    assert found.sheets["misfit"] == sorted(np.flatnonzero(kinds == "misfit"), key=lambda i: (-score[i], i))[:4]
    assert found.sheets["stuck"] == sorted(np.flatnonzero(kinds == "stuck"), key=lambda i: (-score[i], i))
    assert found.sheets["too_few_visits"] == [0, 70, 140, 210]
    assert (kinds[found.sheets["ordinary"]] == "ordinary").all()
    suspicious = np.flatnonzero((kinds == "misfit") | (kinds == "stuck"))
    assert found.suspects.tolist() == sorted(suspicious, key=lambda i: (-score[i], i))[:6]
    assert found.confirmed == {}


def test_an_export_has_every_kind_and_that_the_state_alone_decided_it(run, frame, tmp_path):
    export_rows(read_run(run), tmp_path / "rows.parquet")
    rows = pq.read_table(tmp_path / "rows.parquet", columns=["kind", "kind_from"]).to_pydict()
    assert rows == {"kind": frame["kind"].to_list(), "kind_from": ["state"] * N}


def test_a_frame_of_a_few_samples_has_the_kinds_that_they_have_among_all(run, frame):
    temperatures = thermopile.open_run(run.path).temperatures()
    kinds = temperatures.frame([8 * APART, 5 * APART, 5 * APART], ["kind"])["kind"]
    assert kinds.to_list() == ["misfit", "stuck", "stuck"]
    assert "kind" not in temperatures.frame([0]).columns
    with pytest.raises(FieldError, match=r"'kinds'; the columns are .*'kind'\]"):
        temperatures.frame([0], ["kinds"])


def test_samples_of_a_run_on_images_have_one_side(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.linspace(0.1, 0.2, n), "sample/log_s": np.full(n, -1.0), "sample/u": np.zeros(n)}
    columns["sample/log_s"][[7, 8]] = (2, 3)
    for name, value in {"tau": 0.05, "log_s": 1, "u": 3}.items():  # the bound of u is 3 for images
        columns[f"sample/{name}"][9] = value
    kinds = survey(read_run(write_state(tmp_path / "run", images_dataset, columns, np.full(n, 5)))).kinds
    assert (kinds.sheets["misfit"], kinds.sheets["stuck"], kinds.counts["too_few_visits"]) == ([8, 7], [9], 0)


@pytest.mark.parametrize(
    ("objective", "missing"),
    [
        ({"name": "fastclip_v2"}, ["stuck"]),  # it has no u
        ({"name": "sogclr"}, ["stuck"]),  # nor a tau of its own
        ({"name": "decl"}, ["stuck", "misfit"]),  # nor log s
        ({"name": "clip"}, ["stuck", "misfit"]),
    ],
)
def test_only_the_kinds_that_the_fields_allow_are_told(pairs_dataset, tmp_path, objective, missing):
    n, columns = pairs_dataset.n, {}
    if objective["name"] in ("fastclip_v2", "sogclr"):
        columns = {f"{side}/log_s": np.where(np.arange(n) == 3, 2.0, -1.0) for side in ("image", "text")}
    if objective["name"] == "fastclip_v2":
        columns |= {f"{side}/tau": np.linspace(0.05, 0.2, n) for side in ("image", "text")}
    run = write_state(tmp_path / "run", pairs_dataset, columns, np.where(np.arange(n) == 1, 2, 5), **objective)
    found = look(run.path)
    kinds = found.survey.kinds
    assert list(kinds.counts) == [name for name in ROWS if name not in missing]
    assert kinds.counts["too_few_visits"] == ("misfit" not in missing)
    if "misfit" not in missing:
        assert kinds.sheets["misfit"] == [3]
    codes = KindRules.of(found.inspection).kinds(found.inspection.reader.rows(0, n), range(n))
    assert {KIND_NAMES[code] for code in codes} == {name for name, count in kinds.counts.items() if count}


def test_a_state_in_which_nothing_was_visited_has_no_kinds(hostile_run):
    assert survey(read_run(hostile_run, at="step-0")).kinds is None


@pytest.mark.parametrize(
    ("objective", "cure"),
    [
        ({}, "set `objective.tau_step` to 0.1"),
        ({"tau_step": 0.1, "eta": 0.005}, "lower `objective.eta`, to 0.0025 for example"),  # the first cure was taken
    ],
)
def test_many_stuck_samples_are_warned_of(images_dataset, tmp_path, objective, cure):
    n, stuck = images_dataset.n, np.arange(images_dataset.n) % 30 == 0
    columns = {"sample/tau": np.where(stuck, 0.05, np.linspace(0.1, 0.2, n))}
    columns |= {"sample/log_s": np.where(stuck, 5.0, -1.0), "sample/u": np.where(stuck, 3.0, 0.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 5), **objective)
    (warning,) = look(run.path).warnings
    assert "3.3% of the samples are stuck at tau_min" in warning
    assert warning.endswith(f"In the next run, {cure}.")


@pytest.mark.parametrize(("objective", "least"), [("isogclr", 5), ("sogclr", 5), ("clip", 1)])
def test_a_sample_needs_visits_only_where_there_is_a_tau_or_log_s_to_judge(hostile_dataset, tmp_path, objective, least):
    run = write_state(tmp_path / "run", hostile_dataset, {}, np.full(hostile_dataset.n, 2), name=objective)
    inspection = read_run(run)
    assert KindRules.of(inspection).least_visits == least
    assert survey(inspection, ()).kinds.counts["too_few_visits"] == (hostile_dataset.n if least > 2 else 0)


def test_of_a_run_without_temperatures_none_is_said_to_have_its_initial_value(hostile_dataset, tmp_path):
    run = write_state(tmp_path / "run", hostile_dataset, {}, np.full(hostile_dataset.n, 2), name="clip")
    inspection = read_run(run, at="step-0")
    survey(inspection, ())
    assert inspection.notes[-1] == "No sample was visited by step-0."
