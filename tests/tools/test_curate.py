"""`curate` on 66 samples whose state is given: what each rule drops, what it says of it, and what `train` takes."""

import json
import re
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.sources.folder import FolderSource
from thermopile.storage.selection import Selection
from thermopile.tools.curate import _next_steps
from thermopile.tools.curation import KEPT, LISTED, Curation
from thermopile.tools.inspection.duplicates.finding import NO_CLUSTERS, REASONS, Duplicates, write_duplicates
from thermopile.tools.inspection.duplicates.same_pictures import Agreement
from thermopile.tools.inspection.duplicates.similar_pairs import SimilarPairs
from thermopile.trainer.config import DataConfig, load_config
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.selection_files import write_selection
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, succeed
from support.conversions import dataset_of
from support.pictures import draw
from support.written_runs import train_on, write_run, write_state

FITTING = -2.0
MISFITS = {7: 3.0, 40: 1.0, 3: 2.0}
"""Sample -> log s of its picture; that of its caption is 0."""
STUCK, NEW = 12, 13
NO_IDS = np.empty(0, np.int64)
PAIRS = ((20, 21, 22), (20, 22, 22), (3, 30, 3), (50, 51, 51), (21, 51, -1))
"""Duplicates and the sample that represents both, if there is one."""


@pytest.fixture(scope="module")
def written(hostile_dataset, tmp_path_factory):
    """A run whose misfits are those above; one sample is stuck with the highest log s, one has too few visits."""
    n = hostile_dataset.n
    log_s = np.full(n, FITTING)
    log_s[list(MISFITS)] = list(MISFITS.values())
    log_s[[STUCK, NEW]] = 5
    log_s[[20, 21, 22, 50, 51]] = -1, -1.5, -1, -1, -3
    columns = {"image/log_s": log_s, "text/log_s": np.zeros(n), "image/tau": np.linspace(0.02, 0.03, n),
               "text/tau": np.full(n, 0.08), "image/u": np.zeros(n)}  # fmt: skip
    columns["image/tau"][[10, STUCK]] = 0.005
    columns["image/u"][STUCK] = 5
    visits = np.full(n, 5)
    visits[NEW] = 1
    return write_state(tmp_path_factory.mktemp("curated") / "run", hostile_dataset, columns, visits)


@pytest.fixture
def run(written, tmp_path):
    """A copy of it for one test."""
    return RunDirectory(shutil.copytree(written.path, tmp_path / "run"))


@pytest.fixture
def duplicates(run, hostile_dataset):
    """The duplicates that `inspect` found at an earlier snapshot: clusters of 3, 2 and 2, and a pair across two."""
    first, second, cluster = np.array(PAIRS).T
    count, ones = len(PAIRS), np.ones(len(PAIRS), np.float32)
    reason = np.full(count, REASONS.index("near"), np.int8)
    found = Duplicates(
        SimilarPairs(first, second, ones), reason, Agreement(ones, ones), cluster, count, hostile_dataset.n
    )
    run.report.mkdir()
    write_duplicates(run.report / "duplicates.parquet", found, hostile_dataset.index.fingerprint)
    return run.report / "duplicates.parquet"


@pytest.fixture
def curate(run, tmp_path):
    """Run `curate` with --keep; return what it printed, the kept rows, and the dropped ones by id."""

    def command(*words):
        return cli("curate", run.path, "--keep", tmp_path / "k.parquet", *words)

    def done(*words):
        result = command(*words)
        assert result.exit_code == 0, result.output
        table = pq.read_table(tmp_path / "k.dropped.parquet").drop_columns("dataset_fingerprint")
        dropped = {row.pop("sample_id"): row for row in table.to_pylist()}
        return result, pq.read_table(tmp_path / "k.parquet"), dropped

    command.done = done
    return command


def reason(name, **more):
    return {"reason": name, "rank": None, "cluster": None} | more


def test_misfits_of_the_highest_rank_are_dropped_but_no_stuck_or_new_samples(curate, hostile_dataset):
    _, kept, dropped = curate.done("--drop-misfits", 2)
    assert dropped == {7: reason("misfit", rank=1), 3: reason("misfit", rank=2)}
    assert kept["sample_id"].to_pylist() == [id for id in range(hostile_dataset.n) if id not in (3, 7)]
    assert kept.column_names == ["sample_id", "dataset_fingerprint"]
    assert set(kept["dataset_fingerprint"].to_pylist()) == {hostile_dataset.index.fingerprint}
    _, _, dropped = curate.done("--drop-misfits", 3, "--overwrite")
    assert {id: row["rank"] for id, row in dropped.items()} == {7: 1, 3: 2, 40: 3}


@pytest.mark.parametrize("words", [("--drop-misfits",), ("--precision", 0.9)])
def test_without_planted_captions_a_number_of_misfits_must_be_given(curate, words):
    said = "This is an order; the number of wrong captions is unknown", "Or give a number: --drop-misfits N"
    assert_one_line(curate(*words), 2, *said)


def test_a_number_of_misfits_is_filled_up_with_those_that_the_whole_run_ranks_next(curate, run):
    train_on(run, {}, 9, visited=np.arange(66) != NEW)  # log s is 0 for all now
    _, _, dropped = curate.done("--drop-misfits", 5)
    assert [dropped[id]["rank"] for id in (STUCK, 7, 3, 40)] == [1, 2, 3, 4]  # no sample is stuck now
    assert len(dropped) == 5
    assert NEW not in dropped
    _, _, dropped = curate.done("--drop-misfits", 2, "--at", "step-5", "--overwrite")
    assert sorted(dropped) == [3, 7]


@pytest.mark.usefixtures("duplicates")
@pytest.mark.parametrize(("most", "thinned"), [(1, {20: 22, 21: 22, 30: 3, 50: 51}), (2, {20: 22})])
def test_of_a_cluster_the_representative_is_kept_then_those_that_fit_best(curate, most, thinned):
    _, _, dropped = curate.done("--thin", most)
    assert dropped == {id: reason("duplicate", cluster=cluster) for id, cluster in thinned.items()}


def test_a_duplicate_with_too_few_visits_goes_before_one_that_is_known_to_fit_less(
    curate, hostile_dataset, duplicates, run
):
    shutil.rmtree(run.state)
    log_s, visits = np.full(hostile_dataset.n, -1.0), np.full(hostile_dataset.n, 5)
    log_s[[20, 21, 50]], visits[[21, 50, 51]] = (2, -5, -5), (4, 0, 0)
    other = write_state(run.path.with_name("other"), hostile_dataset, {"image/log_s": log_s}, visits)
    other.state.rename(run.state)
    _, _, dropped = curate.done("--thin", 2)
    assert sorted(dropped) == [21]


@pytest.mark.usefixtures("duplicates")
def test_a_sample_has_one_reason_and_the_rest_of_its_cluster_stays(curate):
    _, _, dropped = curate.done("--drop-misfits", 2, "--thin", 1)
    assert dropped[3] == reason("misfit", rank=2)
    assert 30 not in dropped
    assert sorted(dropped) == [3, 7, 20, 21, 50]


def test_a_class_is_capped_at_random_and_samples_without_one_stay(curate, hostile_dataset):
    _, kept, dropped = curate.done("--cap", 6)
    groups = np.array(hostile_dataset.column("group").to_pylist(), object)[kept["sample_id"].to_numpy()]
    names, counts = np.unique([name for name in groups if name], return_counts=True)
    assert (len(names), sorted(counts.tolist())) == (6, [1, 2, 4, 6, 6, 6])
    assert sum(name is None for name in groups) == hostile_dataset.column("group").null_count
    assert dropped == {id: reason("class_full") for id in np.setdiff1d(np.arange(hostile_dataset.n), kept["sample_id"])}
    assert kept["sample_id"].to_pylist()[:6] != list(range(6)), "the first samples of the class, not random ones"
    _, again, _ = curate.done("--cap", 6, "--overwrite")
    assert again.equals(kept)
    _, without, dropped = curate.done("--cap", 6, "--drop-misfits", 1, "--overwrite")
    assert len(set(kept["sample_id"].to_pylist()) - set(without["sample_id"].to_pylist())) <= 1


def test_samples_without_a_class_are_not_one_class(flat_dataset, tmp_path):
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    for i in range(16):
        draw(i).save(tmp_path / "pictures" / ("a" if i < 4 else "") / f"{i}.png")
    some = dataset_of(FolderSource(tmp_path / "pictures"), tmp_path / "dataset")

    def capped(name, dataset):
        run = write_run(tmp_path / name, dataset, {"sample": np.full(dataset.n, 0.1)})
        return cli("curate", run.path, "--keep", tmp_path / f"{name}.parquet", "--cap", 1)

    assert capped("some", some).exit_code == 0
    assert pq.read_metadata(tmp_path / "some.parquet").num_rows == 12 + 1
    assert_one_line(capped("none", flat_dataset), 2, "no sample of", "has a group to cap by")


def test_samples_can_be_capped_by_another_column(curate, hostile_dataset):
    _, kept, _ = curate.done("--cap", 1, "--by", "caption")
    captions = hostile_dataset.column("caption")
    assert len(kept) == len(captions.drop_null().unique()) + captions.null_count


def test_weights_are_tau_to_the_power_with_mean_1_and_train_takes_the_file(curate, hostile_dataset, tmp_path):
    _, kept, dropped = curate.done("--tau-power", -0.5, "--drop-misfits", 1)
    assert list(dropped) == [7]
    tau = (np.linspace(0.02, 0.03, hostile_dataset.n) * 0.08) ** 0.5
    tau[[10, STUCK]] = (0.005 * 0.08) ** 0.5
    expected = np.where(np.isin(np.arange(len(tau)), (10, STUCK)), np.nan, tau**-0.5)
    expected = np.nan_to_num(np.delete(expected / np.nanmean(np.delete(expected, 7)), 7), nan=1)  # those at tau_min
    np.testing.assert_allclose(kept["weight"].to_numpy(), expected, rtol=1e-6)
    file = str(tmp_path / "k.parquet")
    tree = {"batch_size": 16, "data": {"path": str(hostile_dataset.path), "select": file, "weights": file},
            "objective": {"name": "isogclr"}}  # fmt: skip
    config = resolve(load_config(tree), hostile_dataset)[0]
    write_selection(config.data, hostile_dataset, tmp_path / "selection")
    own = Selection(tmp_path / "selection")
    assert own.ids.tolist() == kept["sample_id"].to_pylist()
    np.testing.assert_allclose(own.weights, expected, rtol=1e-6)


def test_a_sample_without_a_visit_has_the_mean_weight(hostile_dataset, tmp_path):
    tau = np.linspace(0.01, 0.1, hostile_dataset.n)
    seen = np.arange(hostile_dataset.n) < 9
    run = write_run(tmp_path / "run", hostile_dataset, {"image": tau, "text": tau}, visited=seen)
    succeed("curate", run.path, "--keep", tmp_path / "k.parquet", "--tau-power", "1")
    weights = pq.read_table(tmp_path / "k.parquet")["weight"].to_numpy()
    np.testing.assert_allclose(weights, np.where(seen, tau / tau[seen].mean(), 1), rtol=1e-5)


@pytest.mark.parametrize(("taus", "power"), [([1e-12], 4), ([1e-10, 1e-3, 1], -4)])
def test_weights_neither_overflow_nor_vanish(hostile_dataset, tmp_path, taus, power):
    tau = np.resize(taus, hostile_dataset.n)
    run = write_run(tmp_path / "run", hostile_dataset, {"image": tau, "text": tau})
    succeed("curate", run.path, "--keep", tmp_path / "k.parquet", "--tau-power", power)
    expected = (tau / tau.min()) ** power
    np.testing.assert_allclose(
        pq.read_table(tmp_path / "k.parquet")["weight"].to_numpy(), expected / expected.mean(), rtol=1e-4, atol=1e-30
    )


def test_a_snapshot_without_a_temperature_gives_no_weights(hostile_dataset, tmp_path):
    tau = np.full(hostile_dataset.n, 0.1)
    unseen = np.arange(hostile_dataset.n) < 1
    run = write_run(tmp_path / "run", hostile_dataset, {"image": tau, "text": tau}, visited=unseen)
    pq.write_table(pa.table({"sample_id": [0]}), tmp_path / "first.parquet")
    words = ("--keep", tmp_path / "k.parquet", "--tau-power", 1, "--drop", tmp_path / "first.parquet")
    assert_one_line(cli("curate", run.path, *words), 1, "no kept sample has a temperature yet")


def test_temperatures_that_are_all_at_tau_min_give_no_weights_and_are_not_said_to_be_missing(hostile_dataset, tmp_path):
    tau = np.full(hostile_dataset.n, 0.005)
    run = write_run(tmp_path / "run", hostile_dataset, {"image": tau, "text": tau})
    words = ("--keep", tmp_path / "k.parquet", "--tau-power", 1)
    assert_one_line(cli("curate", run.path, *words), 1, "has a temperature above tau_min, and a bound says nothing")


def test_listed_samples_are_dropped_first(curate, tmp_path):
    pq.write_table(pa.table({"sample_id": [40, 7], "tag": ["bad", "worse"]}), tmp_path / "listed.parquet")
    _, kept, dropped = curate.done("--drop", tmp_path / "listed.parquet", "--drop-misfits", 3)
    assert dropped == {7: reason("listed"), 40: reason("listed"), 3: reason("misfit", rank=1)}
    assert not {3, 7, 40} & set(kept["sample_id"].to_pylist())


@pytest.fixture
def tagged(hostile_dataset, tmp_path):
    """Write a samples.json as FiftyOne 1.22 exports one, and return the option with it."""

    def write(tags, of=None):
        samples = [{"filepath": "/x/data/1.jpg", "tags": words, "_media_type": "image", "sample_id": id,
                    "dataset_fingerprint": of or hostile_dataset.index.fingerprint,
                    "_id": {"$oid": "6b0be530791d92582f482185"}} for id, words in tags.items()]  # fmt: skip
        (tmp_path / "samples.json").write_text(json.dumps({"samples": samples}))
        return "--tags", tmp_path / "samples.json"

    return write


def test_tags_of_fiftyone_drop_samples_and_keep_others_whatever_the_rules_say(curate, tagged, tmp_path):
    pq.write_table(pa.table({"sample_id": [40, 50]}), tmp_path / "listed.parquet")
    tags = tagged({9: ["drop", "seen"], 7: ["keep"], 40: ["keep", "drop"], 11: ["seen"]})
    _, kept, dropped = curate.done("--drop-misfits", 3, *tags, "--drop", tmp_path / "listed.parquet")
    assert dropped == {9: reason("listed"), 50: reason("listed"), 3: reason("misfit", rank=1)}
    assert {7, 40, 11} <= set(kept["sample_id"].to_pylist())


@pytest.mark.usefixtures("duplicates")
def test_samples_tagged_to_be_kept_stay_beside_those_that_thinning_and_a_cap_leave(curate, tagged):
    _, _, dropped = curate.done("--thin", 1, *tagged({20: ["keep"]}))
    assert sorted(dropped) == [21, 30, 50]
    _, plain, _ = curate.done("--cap", 6, "--overwrite")
    first = next(id for id in range(66) if id not in plain["sample_id"].to_pylist())
    _, kept, _ = curate.done("--cap", 6, *tagged({first: ["keep"]}), "--overwrite")
    assert set(kept["sample_id"].to_pylist()) >= {first}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"samples": [{"sample_id": 1}]}', "is not the samples.json of a FiftyOneDataset"),
        ('{"samples": 7}', "is not the samples.json of a FiftyOneDataset; export one"),
        ("[]", "is not the samples.json of a FiftyOneDataset"),
        ('{"samples": [{"sample_id": 66, "tags": [], "dataset_fingerprint": "FINGERPRINT"}]}', "has sample 66 of"),
        ('{"samples": [{"sample_id": -1, "tags": [], "dataset_fingerprint": "FINGERPRINT"}]}', "has sample -1 of"),
        ('{"samples": [{"sample_id": 1, "tags": [], "dataset_fingerprint": "f"}]}', "of another dataset than"),
        ('{"samples": [{"sample_id": "1", "tags": [], "dataset_fingerprint": "FINGERPRINT"}]}', "has sample '1' of"),
    ],
)
def test_tags_that_are_not_of_the_dataset_are_refused_in_one_line(curate, hostile_dataset, tmp_path, text, said):
    (tmp_path / "tags.json").write_text(text.replace("FINGERPRINT", hostile_dataset.index.fingerprint))
    assert_one_line(curate("--tags", tmp_path / "tags.json"), 2, "--tags", said)


def test_the_counts_are_printed_or_json(curate, tmp_path):
    words = "--drop-misfits", 2
    result, kept, _ = curate.done(*words)
    assert rows_of(result) == [("kept", str(len(kept))), ("misfit", "2")]  # without the rules that were not asked for
    assert result.stdout.splitlines()[-1].startswith(f"next: `thermopile train --select {tmp_path / 'k.parquet'} …`")
    result, _, _ = curate.done(*words, "--overwrite", "--json")
    said = json.loads(result.stdout)
    assert said == {
        "keep": str(tmp_path / "k.parquet"), "dropped": str(tmp_path / "k.dropped.parquet"), "snapshot": "step-5",
        "samples": {"kept": len(kept), "listed": 0, "misfit": 2, "duplicate": 0, "class_full": 0,
                    "not_trained_on": 0},
        "notes": ["Kept samples with fewer than 5 visits, too few to be judged, or planted: 1."],
    }  # fmt: skip


def rows_of(result):
    """The rows of the printed table, without its head."""
    return re.findall(r"^ +([a-z ]*[a-z]) +([\d,]+) *$", result.stdout, re.MULTILINE)


def test_a_rule_that_was_asked_for_is_printed_though_it_drops_nothing(curate):
    result, kept, _ = curate.done("--cap", 1000, "--tau-power", 1)
    assert rows_of(result) == [("kept", str(len(kept))), ("class full", "0")]


def inspection_of(data):
    return SimpleNamespace(config=SimpleNamespace(data=DataConfig(**data)))


@pytest.mark.parametrize(
    ("dropped", "weights", "data", "ways"),
    [
        (1, None, {}, ["train --select K …", "fork RUN --without D …"]),
        (1, np.ones(2), {}, ["train --select K --weights K …", "fork RUN --without D …"]),
        (0, np.ones(3), {}, ["train --select K --weights K …"]),  # fork refuses a file without rows
        (1, None, {"without": "earlier.parquet"}, ["train --select K …"]),  # and one that lacks the earlier ones
    ],
)
def test_the_commands_that_come_next_take_the_files(dropped, weights, data, ways):
    files = {"RUN": "runs/a b", "K": "my files/k.parquet", "D": "my files/k.dropped.parquet"}
    reasons = np.repeat([KEPT, LISTED], [3 - dropped, dropped])
    found = Curation(inspection_of(data), reasons, NO_IDS, NO_CLUSTERS, weights, [])
    said = _next_steps(*files.values(), found)
    assert [shlex.split(way) for way in said.strip("`").split("`, or `")] == [
        ["thermopile", *(files.get(word, word) for word in way.split())] for way in ways
    ]


def test_the_files_of_a_mixture_are_not_said_to_be_taken_as_they_are():
    found = Curation(inspection_of({"parts": ("a", "b")}), NO_IDS, NO_IDS, NO_CLUSTERS, None, [])
    assert "make a file for each part" in _next_steps("run", "k.parquet", "k.dropped.parquet", found)


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        ((), 2, "no rule; give --tags, --drop, --drop-misfits, --precision, --thin, --cap, --tau-power"),
        (("--by", "group", "--thin", 1), 2, "--by has no effect without --cap"),
        (("--tau-power", "nan"), 2, "nan is not a number"),
        (("--cap", 2, "--by", "colour"), 2, "samples cannot be grouped by 'colour'"),
        (("--precision", "nan"), 2, "nan is not a number"),
        (("--precision", 0), 2, "is not in the range 0"),
        (("--drop-misfits", "--at", "step-9"), 1, "step-9"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line_and_leaves_no_file(curate, tmp_path, words, exit_code, said):
    result = curate(*words)
    assert result.exit_code == exit_code
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("*k.*"))


def test_without_duplicates_the_command_that_makes_them_is_given_once_it_can(curate, run, hostile_dataset, tmp_path):
    missing = f"duplicates.parquet does not exist; `thermopile inspect {run.path} --duplicates` makes it"
    assert_one_line(curate("--thin", 1), 1, missing)
    begun = write_run(tmp_path / "begun", hostile_dataset, {}, snapshot=False)
    early = cli("curate", begun.path, "--keep", tmp_path / "k.parquet", "--thin", 1)
    assert_one_line(early, 1, "curating needs a snapshot", "its first checkpoint writes one")


def test_a_file_is_replaced_only_if_asked(curate, tmp_path):
    (tmp_path / "k.dropped.parquet").write_text("mine")
    assert_one_line(curate("--drop-misfits"), 2, "k.dropped.parquet exists", "--overwrite")
    assert (tmp_path / "k.dropped.parquet").read_text() == "mine"


def test_the_list_of_what_to_drop_is_not_replaced(curate, tmp_path):
    for name in ("k.parquet", "k.dropped.parquet"):
        pq.write_table(pa.table({"sample_id": [1]}), tmp_path / name)
        assert_one_line(curate("--drop", tmp_path / name, "--overwrite"), 2, name, "would be replaced")
        assert pq.read_table(tmp_path / name)["sample_id"].to_pylist() == [1]


def test_to_keep_nothing_is_refused(curate, hostile_dataset, tmp_path):
    pq.write_table(pa.table({"sample_id": np.arange(hostile_dataset.n)}), tmp_path / "all.parquet")
    assert_one_line(curate("--drop", tmp_path / "all.parquet"), 1, "nothing would be kept")


def test_lists_of_another_dataset_and_damaged_ones_are_refused(curate, duplicates, tmp_path):
    table = pq.read_table(duplicates)
    other = {"thermopile.dataset_fingerprint": "f" * 64}
    pq.write_table(table.replace_schema_metadata(other), duplicates)
    assert_one_line(curate("--thin", 1), 1, "duplicates.parquet cannot be used: it is not of the dataset")
    far = pa.array(table["second_id"].to_numpy() + 100)
    pq.write_table(table.set_column(2, "second_id", far), duplicates)
    assert_one_line(
        curate("--thin", 1), 1, "it names samples that", "does not have; `thermopile inspect", "makes it again"
    )
    for column in (pa.array([None, *range(1, len(table))], pa.int64()), pa.array(["1"] * len(table))):
        pq.write_table(table.set_column(2, "second_id", column), duplicates)
        assert_one_line(curate("--thin", 1), 1, "its ids are not whole numbers")
    pq.write_table(table.replace_schema_metadata({b"thermopile.dataset_fingerprint": b"\xff"}), duplicates)
    assert_one_line(curate("--thin", 1), 1, "it is not of the dataset")
    old = table.schema.metadata | {b"thermopile.threshold.correlation": b"0.98"}
    pq.write_table(table.replace_schema_metadata(old), duplicates)
    assert_one_line(curate("--thin", 1), 1, "another version made it, by other thresholds")
    duplicates.write_bytes(duplicates.read_bytes()[:-9])
    assert_one_line(curate("--thin", 1), 1, "duplicates.parquet cannot be used")
    duplicates.rename(tmp_path / "elsewhere")
    duplicates.symlink_to(tmp_path / "elsewhere")
    assert_one_line(curate("--thin", 1), 1, "duplicates.parquet", "link")
    listed = pa.table({"sample_id": [1]}).replace_schema_metadata(other)
    pq.write_table(listed, tmp_path / "listed.parquet")
    assert_one_line(curate("--drop", tmp_path / "listed.parquet"), 2, "--drop", "names samples of another dataset")


@pytest.mark.parametrize(
    ("objective", "words", "said"),
    [("fastclip_v2", (), None), ("clip", ("--drop-misfits",), "keeps no log s"),
     ("sogclr", ("--tau-power", 1), "keeps no temperature per sample")],
)  # fmt: skip
def test_a_rule_that_the_state_cannot_answer_is_refused(hostile_dataset, tmp_path, objective, words, said):
    run = write_run(tmp_path / "run", hostile_dataset, {}, objective=objective)
    words = words or ("--drop-misfits", 1)
    result = cli("curate", run.path, "--keep", tmp_path / "k.parquet", *words)
    if said:
        assert_one_line(result, 2, f"the objective {objective}", said)
    else:
        assert result.exit_code == 0, result.output
