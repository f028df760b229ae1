"""What `inspect` says of a run on selected samples: only of those."""

import shutil
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.state_store.check import check_snapshot
from thermopile.state_store.reader import StateReader
from thermopile.storage.selection import IDS, WITHOUT, SelectionWriter
from thermopile.tools.curation import NOT_TRAINED_ON, CurationRules, curate
from thermopile.tools.inspection import summary
from thermopile.tools.inspection.opened_run import open_run
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.samples import read_histories
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.tools.inspection.temperatures.through_time import through_time
from thermopile.tools.serving.answers import Answers
from thermopile.tools.serving.catalogue import Query, find, open_catalogue
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run_directory import RunDirectory

KEPT = np.arange(5, 1_900, 3)


@pytest.fixture(scope="module")
def run(pairs_dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("selected")
    pq.write_table(pa.table({"sample_id": KEPT}), folder / "kept.parquet")
    tree = {
        "epochs": 1, "batch_size": 64, "model": {"dim": 8, "image": {"config": {"width": 8}}},
        "data": {"path": str(pairs_dataset.path), "image_size": 16, "select": str(folder / "kept.parquet")},
    }  # fmt: skip
    run = RunDirectory(folder / "run")
    with Trainer.open(resolve(load_config(tree), pairs_dataset)[0], run) as trainer:
        trainer.train()
    return run


def test_the_served_page_tells_the_other_samples_apart(run, pairs_dataset):
    inspection = read_run(run)
    with closing(open_catalogue(inspection, run.report, lambda *_: None)) as catalogue:
        kinds = Answers(inspection, catalogue, None, 5).about()["kinds"]
        others = find(catalogue, Query(kind="not_selected", sort="id")).sample_ids
    assert kinds == {"too_few_visits": len(KEPT), "not_selected": pairs_dataset.n - len(KEPT)}
    np.testing.assert_array_equal(others, np.setdiff1d(np.arange(pairs_dataset.n), KEPT))


def test_only_samples_that_the_run_trains_on_are_curated(run, pairs_dataset):
    found = curate(read_run(run), CurationRules(per_class=1))
    is_other = ~np.isin(np.arange(pairs_dataset.n), KEPT)
    np.testing.assert_array_equal(found.reasons == NOT_TRAINED_ON, is_other)
    assert found.counts["kept"] == len(set(np.array(pairs_dataset.column("group").to_pylist())[KEPT]))


def test_a_survey_counts_and_groups_the_selected_samples_only(run, pairs_dataset):
    inspection = read_run(run)
    found = survey(inspection)
    visits = inspection.reader.column("visits")
    assert (found.samples, found.dataset_samples, found.visited) == (len(KEPT), 2_000, int((visits > 0).sum()))
    assert found.visits.count == len(KEPT)
    unseen = KEPT[visits[KEPT] == 0]
    assert found.never_visited == unseen[:10].tolist()
    assert len(unseen), "the figures below could not tell the two kinds apart"
    classes = np.array(pairs_dataset.column("group").to_pylist())[KEPT]
    names, sizes = np.unique(classes, return_counts=True)
    assert dict(zip(found.groups[0].names, found.groups[0].sizes.tolist(), strict=True)) == dict(
        zip(names.tolist(), sizes.tolist(), strict=True)
    )
    assert f"{len(KEPT)} selected of 2,000, of which" in dict(summary.facts(inspection, found))["samples"]


def test_every_snapshot_is_read_for_the_selected_samples_only(run):
    inspection = read_run(run)
    found = through_time(inspection)
    visits, tau = inspection.reader.column("visits"), inspection.reader.column("image/tau")
    assert found.samples_read == len(KEPT)
    assert found.moments[-1].visited == (visits > 0).sum()
    assert found.moments[-1].tau["image"].quantiles[2] == pytest.approx(np.median(tau[visits > 0]), rel=0.01)


def test_a_sample_that_is_not_selected_is_said_not_to_be(run):
    inspection = read_run(run)
    samples = read_histories(inspection, [6, 5], survey(inspection))
    assert [(sample.sample_id, sample.kind) for sample in samples] == [(6, None), (5, "too_few_visits")]
    assert [note for note in inspection.notes if "Sample" in note] == [
        f"Sample 6 is not among the {len(KEPT)} that the run trains on."
    ]


def test_a_notebook_indexes_temperatures_and_frames_by_the_ids_of_the_dataset(run):
    temperatures = open_run(run.path).temperatures()
    frame = temperatures.frame(columns=["image/tau", "visits"])
    assert len(frame) == temperatures.samples == 2_000
    assert set(np.flatnonzero(frame["visits"])) <= set(KEPT)
    np.testing.assert_array_equal(temperatures.tau["image"][frame.index], frame["image/tau"])


def test_check_finds_nothing_wrong_and_names_the_ids_of_what_is(run):
    reader = read_run(run).reader
    report = check_snapshot(reader, {}, lambda done: None)
    assert report.sound
    assert report.columns[0].rows == len(KEPT)
    tau = reader.column("image/tau")[KEPT]
    bound = float(np.sort(tau)[-2])
    found = check_snapshot(reader, {"tau_max": bound}, lambda done: None)
    (problem,) = next(column for column in found.columns if column.name == "image/tau").problems
    assert problem.first_ids == (KEPT[int(tau.argmax())],)


# A run with holes


@pytest.fixture(scope="module")
def with_holes(run, pairs_dataset, tmp_path_factory):
    """The run, as if it left out samples that it has visited: a hole counts, whatever its row holds."""
    folder = tmp_path_factory.mktemp("holes")
    copy = RunDirectory(shutil.copytree(run.path, folder / "run"))
    with SelectionWriter(copy.selection, pairs_dataset.n) as writer:
        writer.add(IDS, [KEPT])
        writer.add(WITHOUT, [np.arange(0, len(KEPT), 2)])
        writer.finish()
    return copy


def test_forgotten_samples_are_left_out_of_everything_that_is_said_of_a_run(run, with_holes, pairs_dataset):
    inspection, gone, left = read_run(with_holes), KEPT[::2], KEPT[1::2]
    assert any(f"left out here: {len(gone)}" in note for note in inspection.notes)
    found = survey(inspection)
    visits = StateReader.open(run.state).column("visits")
    assert (found.samples, found.visited) == (len(left), int((visits[left] > 0).sum()))
    in_time = through_time(inspection)
    assert (in_time.samples_read, in_time.moments[-1].visited) == (len(left), found.visited)
    curated = curate(inspection, CurationRules())
    np.testing.assert_array_equal(np.flatnonzero(curated.reasons != NOT_TRAINED_ON), left)
