import numpy as np
import pytest
from scipy.stats import spearmanr

from thermopile.state_store.errors import SnapshotNotFoundError
from thermopile.tools.inspection import opening
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.drift import MOVERS, Mover, drift
from thermopile.trainer.errors import ConfigError

from support.written_runs import train_on, write_run

# Few values, so that many samples are equal before, after, or in how far they moved.
BEFORE, AFTER = (
    {side: np.random.default_rng((seed, i)).integers(1, 9, 66).astype(np.float32) / 64
     for i, side in enumerate(("image", "text"))}
    for seed in (0, 1)
)  # fmt: skip
EARLY = np.arange(66) % 3 != 1


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(opening, "STATE_ROWS_AT_ONCE", 16)


@pytest.fixture
def run(hostile_dataset, tmp_path):
    """Two snapshots after step-0; two thirds of the samples were visited up to the first one."""
    run = write_run(tmp_path / "run", hostile_dataset, BEFORE, visited=EARLY)
    train_on(run, AFTER, 9)
    return run


def expected_movers(ids, before, after, sign):
    change = sign * (after - before)
    order = [place for place in np.lexsort((ids, -change)) if change[place] > 0]
    return [Mover(int(ids[place]), float(before[place]), float(after[place])) for place in order[:MOVERS]]


def test_the_figures_are_those_of_the_samples_visited_in_both(run):
    found = drift(read_run(run), "step-5")
    assert found.visited == EARLY.sum()
    ids = np.flatnonzero(EARLY)
    for side in found.sides:
        before, after = BEFORE[side.name][EARLY], AFTER[side.name][EARLY]
        assert side.joint.spearman == pytest.approx(spearmanr(before, after).statistic)
        assert side.change.mean == pytest.approx((after - before).mean(dtype=np.float64))
        assert side.change.quantile(0.5) == np.quantile(after - before, 0.5, method="lower")
        assert side.share_risen == pytest.approx((after > before).mean())
        assert side.share_fallen == pytest.approx((after < before).mean())
        assert side.most_risen == expected_movers(ids, before, after, 1)
        assert side.most_fallen == expected_movers(ids, before, after, -1)
        # Values on an edge may lie in either bin, so the sums of two neighbours are compared.
        assert side.joint.counts.sum() == EARLY.sum()
        np.testing.assert_array_equal(side.joint.counts.sum(axis=1)[[0, -1]],
                                      [(before == before.min()).sum(), (before == before.max()).sum()])  # fmt: skip
        np.testing.assert_array_equal(side.joint.counts.sum(axis=0)[[0, -1]],
                                      [(after == after.min()).sum(), (after == after.max()).sum()])  # fmt: skip


def test_the_earlier_snapshot_comes_first_whichever_is_named_first(run):
    forth, back = drift(read_run(run), "step-5"), drift(read_run(run, at="step-5"), "latest")
    for found in (forth, back):
        assert (found.earlier.tag, found.later.tag) == ("step-5", "step-9")
    assert forth.sides[0].most_risen == back.sides[0].most_risen


def test_no_more_than_the_greatest_movers_are_kept(hostile_dataset, tmp_path):
    tau = np.full(66, 0.05)
    run = write_run(tmp_path / "run", hostile_dataset, {"image": tau, "text": tau})
    train_on(run, {"image": tau + np.arange(66) / 1000, "text": tau}, 9)
    first, second = drift(read_run(run), "step-5").sides
    assert [mover.sample_id for mover in first.most_risen] == list(range(65, 65 - MOVERS, -1))
    assert (first.most_fallen, first.joint.spearman) == ([], None)
    assert (second.most_risen, second.share_risen, second.share_fallen) == ([], 0, 0)


def test_progress_ends_at_twice_the_number_of_samples(run):
    told = []
    drift(read_run(run), "step-5", lambda done, total: told.append(done))
    assert told == [16, 32, 48, 64, 66, 82, 98, 114, 130, 132]


@pytest.mark.parametrize("against", ["step-9", "latest"])
def test_a_snapshot_is_not_compared_with_itself(run, against):
    with pytest.raises(
        ConfigError, match=rf"cannot compare step-9 with itself, as {against}; .* of: step-0, step-5, step-9$"
    ):
        drift(read_run(run), against)


def test_a_snapshot_that_is_not_there_is_an_error(run):
    with pytest.raises(SnapshotNotFoundError, match="no snapshot 'step-7'; available: step-0, step-5, step-9"):
        drift(read_run(run), "step-7")


def test_where_nothing_was_visited_in_both_there_is_a_note(run):
    inspection = read_run(run)
    assert drift(inspection, "step-0") is None
    assert inspection.notes == ["No sample was visited by both step-0 and step-9, so there is no drift to show."]


def test_a_run_without_temperatures_has_no_drift(hostile_dataset, tmp_path):
    inspection = read_run(write_run(tmp_path / "run", hostile_dataset, {}, objective="clip"))
    assert drift(inspection, "step-0") is None
    assert len(inspection.notes) == 1  # read_run said why
