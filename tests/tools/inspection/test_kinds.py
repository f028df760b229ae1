"""What a cold or a hot sample is, from its row of state alone."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

import thermopile
from thermopile.state_store.errors import FieldError
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.reading import state_blocks
from thermopile.tools.inspection.reading.opening import read_run
from thermopile.tools.inspection.rows_export import export_rows
from thermopile.tools.inspection.temperatures import kinds as module
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES, names_of, read_rules
from thermopile.tools.inspection.temperatures.samples import read_histories
from thermopile.tools.inspection.temperatures.survey import survey

from support.cli import answer, cli
from support.written_runs import write_run, write_state

N, APART = 2000, 70
COLD = 0.02
"""Below the lowest 5 % of tau among the other samples, whose tau is 0.1 to 0.2 and log s -4. rho is 2."""
ROWS = {
    "too_few_visits": [
        {"visits": 0},
        {"visits": 4},
        {"visits": 4, "image/tau": 0.005, "image/u": 5, "image/log_s": 9},  # else stuck
        {"visits": 4, "image/log_s": 9},  # else a misfit
        {"visits": 4, "image/tau": COLD},  # else rare
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
        {"image/tau": COLD, "text/log_s": 9},  # else rare
    ],
    "crowded": [
        {"image/tau": COLD, "image/log_s": -1.9},
        {"text/tau": COLD, "text/log_s": 0},
        {"text/tau": 0.005, "text/log_s": -1, "text/u": 1},
        {"image/tau": COLD, "text/tau": COLD, "text/log_s": -1},  # else rare, on the other side
    ],
    "rare": [
        {"image/tau": COLD},
        {"text/tau": COLD, "image/log_s": 0.5},
        {"image/tau": 0.005, "image/u": 5},  # at the floor, but the positive outweighs the negatives
        {"image/tau": COLD, "image/log_s": -2.5, "image/u": -0.2},  # E = -0.3
        {"image/tau": COLD, "image/log_s": -2.5, "image/u": -5},  # u is at its bound: E is not known
    ],
    "ordinary": [
        {},
        {"image/log_s": 1, "text/log_s": -1},  # their sum is not above 0
        {"image/tau": COLD, "image/log_s": 0.5},  # cold only where the negatives outweigh the positive
        {"image/tau": COLD, "image/log_s": -2.5, "image/u": -0.5},  # E = 0: near-copies within rho
        {"image/log_s": -1},  # near-copies, but not cold
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
    seen = columns["visits"] > 0
    tau, log_s, u = ({side: columns[f"{side}/{name}"] for side in ("image", "text")} for name in ("tau", "log_s", "u"))
    near = {side: (log_s[side] > -2) | ((abs(u[side]) < 4.95) & (log_s[side] + 2 - u[side] > -0.25)) for side in tau}
    bounds = {}
    for side in tau:  # the highest bound below which 5 % are, of those that are not both near and below it
        for bounds[side] in sorted(tau[side][seen], reverse=True):  # noqa: B020
            below = seen & (tau[side] < bounds[side])
            if (below & ~near[side]).sum() + 0.05 * (below & near[side]).sum() <= int(0.05 * (seen.sum() - 1)):
                break

    def kind(row):
        if row["visits"] < 5:
            return "too_few_visits"
        if any(row[f"{side}/tau"] <= 0.00505 and row[f"{side}/log_s"] > 0 and abs(row[f"{side}/u"]) >= 4.95
               for side in bounds):  # fmt: skip
            return "stuck"
        if row["image/log_s"] + row["text/log_s"] > 0:
            return "misfit"
        # Within a bin, 0.05 % of tau, the coldest 5 % may end anywhere.
        cold = [side for side, bound in bounds.items() if row[f"{side}/tau"] < bound * 0.9995]
        if any(-2 < row[f"{side}/log_s"] <= 0 for side in cold):
            return "crowded"
        return "rare" if any(not near[side][row["id"]] for side in cold) else "ordinary"

    return [kind({name: values[i] for name, values in columns.items()} | {"id": i}) for i in range(N)]


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
    assert list(ROWS) == list(KIND_NAMES)


def test_the_kinds_of_all_samples_are_those_of_the_definitions(frame, columns):
    slow = np.array(slowly(columns))
    differ = np.flatnonzero(frame["kind"] != slow)
    # At the bound of the coldest 5 %, a bin's width apart.
    assert len(differ) <= 4
    assert {kind for i in differ for kind in (frame["kind"][i], slow[i])} <= {"rare", "crowded", "ordinary"}
    assert 100 < (slow == "rare").sum() <= 200


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
    monkeypatch.setattr(state_blocks, "ROWS_AT_ONCE", piece)
    monkeypatch.setattr(module, "KIND_SHEET_SAMPLES", 4)
    found = survey(read_run(run), suspects=6).kinds
    kinds = frame["kind"].to_numpy()
    assert found.counts == {kind: int((kinds == kind).sum()) for kind in KIND_NAMES}
    score = columns["image/log_s"] + columns["text/log_s"]
    assert found.sheets["misfit"] == sorted(np.flatnonzero(kinds == "misfit"), key=lambda i: (-score[i], i))[:4]
    assert found.sheets["stuck"] == sorted(np.flatnonzero(kinds == "stuck"), key=lambda i: (-score[i], i))
    assert found.sheets["too_few_visits"] == [0, 70, 140, 210]
    assert found.sheets["rare"][0] == 19 * APART  # at tau_min
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
    kinds = temperatures.frame([19 * APART, 5 * APART, 5 * APART], ["kind"])["kind"]
    assert kinds.to_list() == ["rare", "stuck", "stuck"]
    assert "kind" not in temperatures.frame([0]).columns
    with pytest.raises(FieldError, match=r"'kinds'; the columns are .*'kind'\]"):
        temperatures.frame([0], ["kinds"])


def test_where_many_samples_share_the_lowest_tau_none_of_them_is_rare(images_dataset, tmp_path):
    n = images_dataset.n
    tau = np.where(np.arange(n) % 4 == 0, 0.05, np.linspace(0.1, 0.2, n))
    columns = {"sample/tau": tau, "sample/log_s": np.full(n, -1.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 9))
    assert survey(read_run(run)).kinds.counts["rare"] == 0


def test_samples_of_a_run_on_images_have_one_side(images_dataset, tmp_path):
    n = images_dataset.n
    columns = {"sample/tau": np.linspace(0.1, 0.2, n), "sample/log_s": np.full(n, -1.0), "sample/u": np.zeros(n)}
    columns["sample/log_s"][[7, 8]] = (2, 3)
    for name, value in {"tau": 0.05, "log_s": 1, "u": 3}.items():  # the bound of u is 3 for images
        columns[f"sample/{name}"][9] = value
    kinds = survey(read_run(write_state(tmp_path / "run", images_dataset, columns, np.full(n, 5)))).kinds
    assert (kinds.sheets["misfit"], kinds.sheets["stuck"], kinds.counts["too_few_visits"]) == ([8, 7], [9], 0)
    assert kinds.sheets["rare"] == [i for i in range(16) if i not in (7, 8, 9)]  # which do not count as cold


@pytest.mark.parametrize(
    ("objective", "missing"),
    [
        ({"name": "fastclip_v2"}, ["stuck"]),  # it has no u
        ({"name": "sogclr"}, ["stuck", "rare", "crowded"]),  # nor a tau of its own
        ({"name": "decl"}, ["stuck", "misfit", "rare", "crowded"]),  # nor log s
        ({"name": "clip"}, ["stuck", "misfit", "rare", "crowded"]),
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
    assert list(kinds.counts) == [name for name in KIND_NAMES if name not in missing]
    assert kinds.counts["too_few_visits"] == 1
    if "misfit" not in missing:
        assert kinds.sheets["misfit"] == [3]
    assert set(names_of(read_rules(found.inspection).kinds(found.inspection.reader.rows(0, n)))) == {
        name for name, count in kinds.counts.items() if count
    }


def test_a_state_in_which_nothing_was_visited_has_no_kinds(hostile_run):
    assert survey(read_run(hostile_run, at="step-0")).kinds is None


def test_many_stuck_samples_are_warned_of(images_dataset, tmp_path):
    n, stuck = images_dataset.n, np.arange(images_dataset.n) % 30 == 0
    columns = {"sample/tau": np.where(stuck, 0.05, np.linspace(0.1, 0.2, n))}
    columns |= {"sample/log_s": np.where(stuck, 5.0, -1.0), "sample/u": np.where(stuck, 3.0, 0.0)}
    run = write_state(tmp_path / "run", images_dataset, columns, np.full(n, 5))
    (warning,) = look(run.path).warnings
    assert "3.3% of the samples are stuck at tau_min" in warning
    assert "objective.tau_step" in warning
