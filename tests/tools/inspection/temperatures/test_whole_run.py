"""Ranks by log s over all snapshots of a run, against plain loops."""

import numpy as np
import pytest
import torch

from thermopile.state_store.durable import Repository
from thermopile.state_store.reader import StateReader
from thermopile.state_store.store import StateStore
from thermopile.tools.inspection import opening
from thermopile.tools.inspection.findings import look
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures import misfits as module
from thermopile.tools.inspection.temperatures.distribution import Distribution
from thermopile.tools.inspection.temperatures.kinds import MIN_VISITS
from thermopile.tools.inspection.temperatures.misfits import WholeRun

from support.written_runs import write_run, write_state

N, STEPS = 66, (5, 6, 7, 8)
LATE = np.arange(N) >= 60
"""Visited enough from the third snapshot on."""
UNSEEN = 65
LOG_S = {step: np.random.default_rng(step).normal(-step / 3, step, (2, N)).astype(np.float32) for step in STEPS}
"""Of both sides; each snapshot has a scale of its own."""


@pytest.fixture
def run(hostile_dataset, tmp_path):
    """Four snapshots with log s as above."""
    visits = np.where(LATE, MIN_VISITS - 2, MIN_VISITS)
    visits[UNSEEN] = 0
    first = dict(zip(("image/log_s", "text/log_s"), LOG_S[5], strict=True))
    run = write_state(tmp_path / "run", hostile_dataset, first, visits)
    reader = StateReader.open(run.state)
    identity = {"samples": N, "dataset_fingerprint": reader.dataset_fingerprint, "fields": reader.initial}
    ids = np.flatnonzero(np.arange(N) != UNSEEN)
    with StateStore.open(run.state, **identity) as store:
        for step in STEPS[1:]:
            rows = {name: torch.zeros(len(ids)) for name in reader.fields}
            rows |= {f"{side}/log_s": torch.from_numpy(of[ids]) for side, of in
                     zip(("image", "text"), LOG_S[step], strict=True)}  # fmt: skip
            store.put(ids, rows, step=step)
            store.snapshot(step, epoch=1).result()
    return run


def slowly(steps):
    """The mean rank of every sample by the definition: 0 for the highest log s, inf without enough visits."""
    ranks = np.full((len(steps), N), np.nan)
    for place, step in enumerate(steps):
        seen = np.flatnonzero(~LATE | ((step >= 7) & (np.arange(N) != UNSEEN)))
        order = seen[np.argsort(-LOG_S[step].astype(np.float64).sum(0)[seen])]
        ranks[place, order] = (np.arange(len(order)) + 0.5) / len(order)
    return np.array([np.mean(of[~np.isnan(of)]) if (~np.isnan(of)).any() else np.inf for of in ranks.T])


def ranks(run, **options):
    inspection = read_run(run, **options)
    return WholeRun(inspection).ranks(range(N)), inspection.notes


@pytest.mark.parametrize("at", [6, 8])
def test_ranks_are_averaged_over_snapshots_in_which_a_sample_has_visits_enough(run, at):
    found, notes = ranks(run, at=f"step-{at}")
    np.testing.assert_allclose(found, slowly([step for step in STEPS if step <= at]), atol=1e-6)
    assert found.dtype == np.float32
    assert np.isinf(found[LATE]).sum() == (6 if at == 6 else 1)
    assert notes == []


def test_pairs_with_log_s_above_0_over_both_sides_are_doubted_and_come_back(run):
    inspection = read_run(run)
    whole_run = WholeRun(inspection)
    for block in (range(0, 40), range(40, N)):
        whole_run.ranks(block)
    above = {step: (of.astype(np.float64).sum(0) > 0) & (np.arange(N) != UNSEEN) for step, of in LOG_S.items()}
    seen = {step: ~LATE if step < 7 else np.arange(N) != UNSEEN for step in STEPS}
    found = whole_run.doubted()
    assert found.shares == pytest.approx({step: (above[step] & seen[step]).sum() / seen[step].sum() for step in STEPS})
    ever = np.any([above[step] & seen[step] for step in STEPS], 0)
    assert found.came_back == (ever & ~above[8]).sum() > 0


def test_the_blocks_give_the_ranks_of_the_whole(run, monkeypatch):
    whole, _ = ranks(run)
    monkeypatch.setattr(opening, "STATE_ROWS_AT_ONCE", 16)
    pieces, told = read_run(run), []
    of_blocks = WholeRun(pieces, lambda *at: told.append(at))
    found = [of_blocks.ranks(block) for block, _ in opening.read_blocks(pieces.reader, ["visits"])]
    np.testing.assert_array_equal(np.concatenate(found), whole)
    assert told == sorted(told)
    assert told[-1] == (4 * N, 4 * N)


def test_a_single_snapshot_gives_the_ranks_of_its_log_s(run):
    Repository(run.state).retain(keep_last=1)
    found, _ = ranks(run)
    np.testing.assert_allclose(found, slowly([8]), atol=1e-6)


def test_a_snapshot_that_cannot_be_read_is_left_out_and_noted_once(run):
    damaged = next(each for each in Repository(run.state).snapshots() if each.step == 6)
    (run.state / "snapshots" / damaged.id).write_bytes(b"?")
    found, notes = ranks(run)
    np.testing.assert_allclose(found, slowly([5, 7, 8]), atol=1e-6)
    assert [note[:18] for note in notes] == ["step-6 is left out"]
    assert sum("step-6 is left out" in note for note in look(run.path).notes) == 1


def test_a_snapshot_that_the_run_deletes_meanwhile_is_left_out_from_there_on(pairs_dataset, tmp_path):
    n, rng = pairs_dataset.n, np.random.default_rng(0)
    log_s = {step: rng.standard_normal(n) for step in (STEPS[0], 9)}
    columns = {"image/log_s": log_s[STEPS[0]]}
    # Blocks beyond 512 bytes have a file of their own, which goes with the snapshot.
    run = write_state(tmp_path / "run", pairs_dataset, columns, np.full(n, MIN_VISITS), block_rows=1000)
    reader = StateReader.open(run.state)
    identity = {"samples": n, "dataset_fingerprint": reader.dataset_fingerprint, "fields": reader.initial}
    with StateStore.open(run.state, **identity) as store:
        rows = {name: torch.zeros(n) for name in reader.fields}
        store.put(np.arange(n), rows | {"image/log_s": torch.tensor(log_s[9], dtype=torch.float32)}, step=9)
        store.snapshot(9, epoch=1).result()
    inspection = read_run(run, at="step-9")
    whole_run = WholeRun(inspection)
    found = [whole_run.ranks(range(0, 1000))]
    Repository(run.state).retain(keep_last=1)
    found.append(whole_run.ranks(range(1000, n)))
    first, last = ((n - 0.5 - np.argsort(np.argsort(of))) / n for of in log_s.values())
    np.testing.assert_allclose(found[0], (first + last)[:1000] / 2, atol=1e-3)
    np.testing.assert_allclose(found[1], last[1000:], atol=1e-3)
    assert inspection.notes == ["step-5 is left out from sample 1,000 on: the run deleted it while it was being read."]


def test_snapshots_that_are_not_used_take_no_memory(run, monkeypatch):
    made = []
    monkeypatch.setattr(module, "MAX_SNAPSHOTS", 2)
    monkeypatch.setattr(module, "Distribution", lambda: made.append(Distribution()) or made[-1])
    ranks(run)
    assert len(made) == 2


def test_of_very_many_snapshots_some_are_read_and_the_last_is_among_them(run, monkeypatch):
    monkeypatch.setattr(module, "MAX_SNAPSHOTS", 2)
    np.testing.assert_allclose(ranks(run)[0], slowly([6, 8]), atol=1e-6)
    np.testing.assert_allclose(ranks(run, at="step-7")[0], slowly([5, 7]), atol=1e-6)


def test_the_report_and_the_suspects_come_by_the_whole_run(run):
    found = look(run.path, suspects=9)
    kinds, by_rank = found.survey.kinds, slowly(STEPS)
    assert len(kinds.sheets["misfit"]) > 3
    assert kinds.sheets["misfit"] == sorted(kinds.sheets["misfit"], key=lambda id: by_rank[id])
    last = LOG_S[8].sum(0)
    assert kinds.sheets["misfit"] != sorted(kinds.sheets["misfit"], key=lambda id: -last[id])
    suspicious = np.flatnonzero(last > 0)
    suspicious = suspicious[(suspicious != UNSEEN) & ~np.isinf(by_rank[suspicious])]
    assert kinds.suspects.tolist() == sorted(suspicious, key=lambda id: by_rank[id])[:9]


def test_without_log_s_no_sample_has_a_rank(hostile_dataset, tmp_path):
    run = write_run(tmp_path / "run", hostile_dataset, {}, objective="clip")
    assert np.isinf(WholeRun(read_run(run)).ranks(range(N))).all()
