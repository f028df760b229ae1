import numpy as np
import pytest

from thermopile.state_store.durable import Repository
from thermopile.state_store.reader import StateReader
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.samples import read_histories
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.errors import ConfigError

from support.written_runs import train_on, write_run

TAU = np.repeat(np.linspace(0.01, 0.1, 33), 2)
EARLY = np.arange(66) != 40


@pytest.fixture
def run(hostile_dataset, tmp_path):
    """Two snapshots after step-0; sample 40 was not visited up to the first one."""
    run = write_run(tmp_path / "run", hostile_dataset, {"image": TAU, "text": 0.2 - TAU}, visited=EARLY)
    train_on(run, {"image": 2 * TAU, "text": TAU}, 9)
    return run


def test_a_sample_has_its_whole_row_at_every_snapshot_oldest_first(run):
    (history,) = read_histories(read_run(run), [40])
    assert history.sample_id == 40
    assert [state.snapshot.tag for state in history.history] == ["step-0", "step-5", "step-9"]
    for state in history.history:
        rows = StateReader.open(run.state, state.snapshot.id).rows(40, 41)
        assert state.values == {name: values[0] for name, values in rows.items()}
    assert [state.values["visits"] for state in history.history] == [0, 0, 1]
    assert history.history[-1].values["image/tau"] == np.float32(2 * TAU[40])


def test_samples_come_in_the_order_asked_for_and_each_once(run):
    asked = [65, 0, 17, 0, 16]
    histories = read_histories(read_run(run), asked)
    assert [history.sample_id for history in histories] == [65, 0, 17, 16]
    for history in histories:
        assert history.history[1].values["image/tau"] == np.float32(TAU[history.sample_id])


def test_the_rank_is_the_share_of_visited_samples_with_a_lower_tau(run):
    inspection = read_run(run, at="step-5")
    first, unvisited = read_histories(inspection, [10, 40], survey(inspection))
    assert first.ranks["image"] == pytest.approx(np.sum(TAU[EARLY] < TAU[10]) / 65)
    assert first.ranks["text"] == pytest.approx(np.sum(TAU[EARLY] > TAU[10]) / 65)
    assert unvisited.ranks == {}


@pytest.mark.parametrize("sample_id", [-1, 66])
def test_an_unknown_id_is_refused_with_the_range_of_ids(run, sample_id):
    with pytest.raises(ConfigError, match=rf"no such sample: {sample_id}; the run has 66 samples, with ids 0 … 65"):
        read_histories(read_run(run), [3, sample_id])


def test_a_snapshot_that_cannot_be_read_is_left_out_and_noted(run):
    damaged = Repository(run.state).snapshots()[1]
    (run.state / "snapshots" / damaged.id).unlink()
    inspection = read_run(run)
    (history,) = read_histories(inspection, [3])
    assert [state.snapshot.tag for state in history.history] == ["step-0", "step-9"]
    assert inspection.notes[0].startswith("step-5 is left out: ")


def test_a_run_without_a_snapshot_has_no_states_and_still_knows_its_ids(hostile_dataset, tmp_path):
    inspection = read_run(write_run(tmp_path / "run", hostile_dataset, {}, snapshot=False))
    assert read_histories(inspection, [3])[0].history == []
    with pytest.raises(ConfigError, match="ids 0 … 65"):
        read_histories(inspection, [66])


def test_a_run_without_temperatures_still_has_visits(hostile_dataset, tmp_path):
    inspection = read_run(write_run(tmp_path / "run", hostile_dataset, {}, objective="clip"))
    (history,) = read_histories(inspection, [3], survey(inspection))
    assert [state.values["visits"] for state in history.history] == [0, 1]
    assert history.ranks == {}
