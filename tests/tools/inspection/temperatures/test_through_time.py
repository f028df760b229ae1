import numpy as np
import pytest

from thermopile.state_store.durable import Repository
from thermopile.tools.inspection import opening
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures import through_time as module
from thermopile.tools.inspection.temperatures.through_time import HISTORY_QUANTILES, through_time

from support.written_runs import train_on, write_run

TAUS = {
    side: {step: np.random.default_rng((seed, step)).uniform(0.006, 0.2, 66).astype(np.float32) for step in (5, 9, 12)}
    for seed, side in enumerate(("image", "text"))
}
HALF = np.arange(66) % 2 == 1


def at(step):
    return {side: taus[step] for side, taus in TAUS.items()}


@pytest.fixture
def run(hostile_dataset, tmp_path):
    """Three snapshots after step-0; up to the first one, half of the samples were visited."""
    run = write_run(tmp_path / "run", hostile_dataset, at(5), visited=HALF)
    train_on(run, at(9), 9)
    train_on(run, at(12), 12)
    return run


def assert_quantiles(found, tau):
    # The value nearest below: of so few samples, numpy's own way would draw a line between two.
    np.testing.assert_allclose(found.quantiles, np.quantile(tau, HISTORY_QUANTILES, method="lower"), rtol=2**-10)


def test_every_snapshot_has_the_quantiles_of_the_samples_visited_by_then(run):
    inspection = read_run(run)
    found = through_time(inspection)
    assert [(moment.tag, moment.visited) for moment in found.moments] == [
        ("step-5", 33), ("step-9", 66), ("step-12", 66),
    ]  # fmt: skip
    assert (found.every, found.samples_read, inspection.notes) == (1, 66, [])
    for side, taus in TAUS.items():
        first, *later = (moment.tau[side] for moment in found.moments)
        assert_quantiles(first, taus[5][HALF])
        for moment, step in zip(later, (9, 12), strict=True):
            assert_quantiles(moment, taus[step])


def test_every_snapshot_has_its_share_at_tau_min(hostile_dataset, tmp_path):
    many, few = (np.where(np.arange(66) < count, 0.005, 0.05) for count in (33, 11))
    run = write_run(tmp_path / "run", hostile_dataset, {"image": many, "text": few})
    train_on(run, {"image": few, "text": few}, 9)
    shares = [moment.tau["image"].share_at_tau_min for moment in through_time(read_run(run)).moments]
    assert shares == pytest.approx([1 / 2, 1 / 6])


def test_too_many_rows_are_sampled_in_the_same_blocks_of_every_snapshot(run, monkeypatch):
    monkeypatch.setattr(opening, "STATE_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(module, "MAX_ROWS", 66 * 4 // 2)  # step-0 counts as well
    found = through_time(read_run(run))
    read = np.arange(66) // 16 % 2 == 0
    assert (found.every, found.samples_read) == (2, read.sum())
    assert [moment.visited for moment in found.moments] == [(HALF & read).sum(), read.sum(), read.sum()]
    assert_quantiles(found.moments[2].tau["text"], TAUS["text"][12][read])


def test_at_least_one_block_is_read_and_every_says_so(run, monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 1)
    found = through_time(read_run(run))
    assert (found.every, found.samples_read) == (1, 66)


def test_a_snapshot_that_the_run_deletes_meanwhile_is_left_out_and_noted(run):
    told, inspection = [], read_run(run)

    def delete(done, total):
        if not told:
            Repository(run.state).retain(keep_last=2)
        told.append((done, total))

    found = through_time(inspection, delete)
    assert [moment.tag for moment in found.moments] == ["step-9", "step-12"]
    assert inspection.notes == ["step-5 is left out: the run deleted it while it was being read."]
    assert told == [(done, 4) for done in (1, 2, 3, 4)]


def test_a_damaged_snapshot_is_left_out_and_noted(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, at(5))
    sound = set((run.state / "manifests").iterdir())
    train_on(run, at(9), 9)
    of_9 = set((run.state / "manifests").iterdir()) - sound
    train_on(run, at(12), 12)
    for manifest in of_9:
        manifest.write_bytes(manifest.read_bytes()[:50])
    latest = Repository(run.state).snapshots()[-1]
    (run.state / "snapshots" / latest.id).write_bytes(b"?")
    inspection = read_run(run, at="step-5")
    found = through_time(inspection)
    assert [moment.tag for moment in found.moments] == ["step-5"]
    damaged, unreadable = inspection.notes
    assert damaged.startswith("step-9 is left out: snapshot step-9 cannot be read: manifests/")
    assert unreadable.startswith("step-12 is left out: ")
    assert f"snapshots/{latest.id}" in unreadable


def test_a_run_without_temperatures_or_visits_has_nothing_to_show(hostile_dataset, tmp_path):
    untouched = write_run(tmp_path / "untouched", hostile_dataset, {}, visited=np.zeros(66, bool))
    without_tau = write_run(tmp_path / "clip", hostile_dataset, {}, objective="clip")
    without_snapshot = write_run(tmp_path / "killed", hostile_dataset, {}, snapshot=False)
    assert [through_time(read_run(run)) for run in (untouched, without_tau, without_snapshot)] == [None] * 3
