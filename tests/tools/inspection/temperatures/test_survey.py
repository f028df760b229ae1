import numpy as np
import pytest
from scipy.stats import spearmanr

from thermopile.state_store.reader import StateReader
from thermopile.tools.inspection import opening
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures import distribution as distribution_module
from thermopile.tools.inspection.temperatures import survey as survey_module
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.tools.report import page as page_module

from support.written_runs import write_run, write_state


@pytest.fixture
def small_pieces(monkeypatch):
    """The state is read in pieces of one block, 16 rows."""
    monkeypatch.setattr(opening, "STATE_ROWS_AT_ONCE", 16)


@pytest.fixture
def run_of(hostile_dataset, tmp_path):
    def write(tau, **how):
        return read_run(write_run(tmp_path / "run", hostile_dataset, {"image": tau, "text": tau}, **how))

    return write


def test_a_run_gives_both_sides_its_groups_and_no_note(hostile_run):
    inspection = read_run(hostile_run)
    found = survey(inspection)
    assert [side.name for side in found.sides] == ["image", "text"]
    (groups,) = found.groups
    assert groups.sizes.tolist() == [34, 16, 8, 4, 2, 1]
    assert groups.correlation["image"].spearman == pytest.approx(1.0)
    assert groups.correlation["text"].spearman == pytest.approx(-1.0)
    assert found.joint.spearman == pytest.approx(-1.0)
    assert found.joint.counts.sum() == 66
    assert (found.visited, found.share_visited, found.never_visited, inspection.notes) == (66, 1.0, [], [])


@pytest.mark.usefixtures("small_pieces")
def test_read_in_pieces_a_state_gives_the_same_figures(hostile_run, monkeypatch):
    inspection = read_run(hostile_run)
    pieces = survey(inspection)
    monkeypatch.setattr(opening, "STATE_ROWS_AT_ONCE", 1 << 18)
    whole = survey(inspection)
    for one, other in zip(pieces.sheets[:4], whole.sheets[:4], strict=True):
        assert (one.end, one.sample_ids, one.not_shown) == (other.end, other.sample_ids, other.not_shown)
    assert pieces.groups[0].names == whole.groups[0].names
    assert pieces.groups[0].correlation == whole.groups[0].correlation
    assert pieces.joint.spearman == pytest.approx(whole.joint.spearman)
    np.testing.assert_array_equal(pieces.joint.counts, whole.joint.counts)
    np.testing.assert_array_equal(pieces.pool.tau["image"], whole.pool.tau["image"])
    assert [side.tau.quantile(0.3) for side in pieces.sides] == [side.tau.quantile(0.3) for side in whole.sides]


@pytest.mark.usefixtures("small_pieces")
def test_sheets_hold_the_coldest_and_the_hottest_and_count_equals_left_out(run_of, monkeypatch):
    monkeypatch.setattr(survey_module, "SHEET_SAMPLES", 5)
    tau = np.round(np.random.default_rng(0).uniform(0.1, 0.3, 66), 2)
    found = survey(run_of(tau))
    for sheet, sign in zip(found.sheets, (1, -1, 1, -1), strict=False):
        order = sorted(range(66), key=lambda i: (sign * tau[i], i))
        assert sheet.sample_ids == order[:5]
        assert sheet.not_shown == sum(tau[i] == tau[order[4]] for i in order[5:])
    random = found.sheets[4]
    assert (random.side, random.end, len(set(random.sample_ids))) == (None, "random", 5)


@pytest.mark.usefixtures("small_pieces")
def test_among_equals_the_lowest_log_s_is_coldest_and_the_highest_is_hottest(hostile_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(survey_module, "SHEET_SAMPLES", 5)
    monkeypatch.setattr(distribution_module, "_MIN_PENDING", 8)
    rng = np.random.default_rng(0)
    tau, log_s = rng.choice([0.005, 0.1, 1.0], 66, p=[0.6, 0.1, 0.3]), np.round(rng.normal(0, 2, 66), 1)
    columns = {f"{side}/{name}": values for side in ("image", "text") for name, values in
               {"tau": tau, "log_s": log_s}.items()}  # fmt: skip
    run = write_state(tmp_path / "run", hostile_dataset, columns, np.ones(66, int))
    sheets = survey(read_run(run)).sheets
    for sheet, sign in zip(sheets, (1, -1, 1, -1), strict=False):
        order = sorted(range(66), key=lambda i: (sign * tau[i], sign * log_s[i], i))
        assert sheet.sample_ids == order[:5]
        assert sheet.not_shown == (tau == tau[order[0]]).sum() - 5
    page = page_module._sheets(look(run.path), page_module.MAX_PAGE_BYTES)[0]
    coldest = log_s[sheets[0].sample_ids[0]]
    assert f"<b>tau 0.0050, log s {coldest:+.2f}</b>" in page
    for end in ("lowest", "highest"):
        assert (
            page.count(f"as the last one here. Samples with the same tau are ordered by log s, the {end} first.") == 2
        )


def test_equals_are_told_by_log_s_and_equal_log_s_by_the_ids(hostile_dataset, tmp_path):
    n = hostile_dataset.n
    tau = {"image/tau": np.linspace(0.1, 0.2, n), "text/tau": np.full(n, 0.1)}
    found = survey(read_run(write_state(tmp_path / "run", hostile_dataset, tau, np.ones(n, int))))
    assert [sheet.tie_broken_by_log_s for sheet in found.sheets] == [False, False, True, True, False]
    assert found.sheets[2].sample_ids == list(range(66))  # every log s is the same


def test_samples_never_visited_count_in_no_figure_of_tau(run_of):
    tau = np.where(np.arange(66) % 3 == 0, 0.2, 0.9)
    found = survey(run_of(tau, visited=np.arange(66) % 3 == 0))
    assert (found.sides[0].tau.min, found.sides[0].tau.max) == (np.float32(0.2), np.float32(0.2))
    assert (found.visited, found.never_visited) == (22, [1, 2, 4, 5, 7, 8, 10, 11, 13, 14])
    assert (found.visits.count, found.visits.max) == (66, 1.0)
    assert set(found.pool.sample_ids.tolist()) == set(range(0, 66, 3))
    assert all(set(sheet.sample_ids) <= set(range(0, 66, 3)) for sheet in found.sheets)


def test_staleness_counts_the_steps_since_the_last_visit(hostile_run):
    found = survey(read_run(hostile_run))
    assert (found.staleness.min, found.staleness.max) == (0.0, 0.0)
    assert set(found.fields) == {f"{side}/{field}" for side in ("image", "text") for field in ("log_s", "tau", "u")}


def test_a_state_in_which_nothing_was_visited_is_noted(hostile_run):
    inspection = read_run(hostile_run, at="step-0")
    found = survey(inspection)
    assert inspection.notes == ["No sample was visited by step-0: every tau still has its initial value."]
    assert (found.sides, found.sheets, found.groups, found.joint) == ([], [], [], None)
    assert found.visits.max == 0


def test_without_a_snapshot_there_is_nothing_to_survey(hostile_dataset, tmp_path):
    assert survey(read_run(write_run(tmp_path / "run", hostile_dataset, {}, snapshot=False))) is None


def test_a_dataset_without_classes_is_noted(flat_dataset, tmp_path):
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.linspace(0.1, 0.9, flat_dataset.n)})
    inspection = read_run(run)
    found = survey(inspection)
    assert ([side.name for side in found.sides], found.groups, found.joint) == (["sample"], [], None)
    assert ["no captions" in inspection.notes[0], "No sample has a class" in inspection.notes[1]] == [True, True]


def test_samples_are_grouped_by_any_column_and_by_folder(hostile_run):
    by_key, by_folder = survey(read_run(hostile_run), ("key", "folder")).groups
    assert (by_key.column, len(by_key.names), by_key.sizes.tolist()) == ("key", 66, [1] * 66)
    assert by_folder.column == "folder"
    assert sum(by_folder.sizes) == 66


def test_a_column_with_one_value_gives_one_note_and_nothing_else(hostile_run, flat_dataset, tmp_path):
    inspection = read_run(hostile_run)
    assert survey(inspection, ("width",)).groups == []
    assert inspection.notes == ["All 66 samples with a width have the same one, so there is nothing to compare."]
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.linspace(0.1, 0.9, flat_dataset.n)})
    findings = look(run.path, by=("folder",))
    said = f"All {flat_dataset.n} samples with a folder have the same one, so there is nothing to compare."
    assert (findings.survey.groups, findings.notes[-1]) == ([], said)


def test_ranks_of_both_sides_correlate_as_scipy_says(hostile_dataset, tmp_path):
    rng = np.random.default_rng(5)
    first = rng.uniform(0.1, 0.3, 66)
    second = first + rng.uniform(0, 0.2, 66)
    run = write_run(tmp_path / "run", hostile_dataset, {"image": first, "text": second})
    assert survey(read_run(run)).joint.spearman == pytest.approx(spearmanr(first, second).statistic, abs=2e-3)


def test_progress_counts_both_looks_at_every_row(hostile_run):
    done = []
    survey(read_run(hostile_run), on_progress=lambda *at: done.append(at))
    assert done == [("reading the state", 66, 132), ("reading the state", 132, 132)]


@pytest.fixture
def damage(monkeypatch):
    """Let the tau of some ids read as another value: no store takes one, but a disk may bring it."""

    def put(ids, value):
        rows = StateReader.rows

        def damaged(self, start, stop, columns=None):
            found = rows(self, start, stop, columns)
            if "image/tau" in found:
                found["image/tau"][[i - start for i in ids if start <= i < stop]] = value
            return found

        monkeypatch.setattr(StateReader, "rows", damaged)

    return put


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tau_that_is_not_finite_is_left_out_of_all_other_figures(run_of, damage, value):
    inspection = run_of(np.linspace(0.1, 0.3, 66))
    damage([0, 65], value)
    found = survey(inspection)
    assert (found.sides[0].tau.not_finite, found.sides[0].tau.count) == (2, 64)
    assert found.joint.counts.sum() == 64
    assert all({0, 65}.isdisjoint(sheet.sample_ids) for sheet in found.sheets)
    assert np.isfinite(found.groups[0].tau["image"].mean).all()


def test_where_no_tau_is_finite_there_are_no_sides_and_a_note(run_of, damage):
    inspection = run_of(np.linspace(0.1, 0.3, 66))
    damage(range(66), np.nan)
    found = survey(inspection)
    assert found.sides == []
    assert "No visited sample has a finite tau" in inspection.notes[0]
