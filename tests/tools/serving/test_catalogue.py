"""The index of a run's samples, and the queries that it answers."""

import os
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from thermopile.storage.files import NotRegularFileError
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.kinds import KIND_NAMES
from thermopile.tools.serving import catalogue as catalogue_module
from thermopile.tools.serving import texts as texts_module
from thermopile.tools.serving.answers import Answers
from thermopile.tools.serving.catalogue import Query, open_catalogue, with_margins
from thermopile.trainer.errors import ConfigError, RunError

from support.features import stored
from support.written_runs import train_on, write_run, write_state

VISITED = 60
TAU = np.array([0.02, 0.01, 0.01, 0.03, 0.05, 0.04])
LOG_S = np.array([-1.0, -2.0, -3.0, 4.0, 5.0, -6.0])


@pytest.fixture(scope="module")
def run(hostile_dataset, tmp_path_factory):
    """Samples 0 to 5 have these values and 60 more the hottest tau; the last six were never visited."""
    n = hostile_dataset.n
    tau, log_s = np.full(n, 0.1), np.full(n, -9.0)
    tau[:6], log_s[:6] = TAU, LOG_S
    columns = {"image/tau": tau, "image/log_s": log_s, "text/tau": tau[::-1].copy(), "text/log_s": np.full(n, -9.0)}
    visits = np.where(np.arange(n) < VISITED, 5, 0)
    return write_state(tmp_path_factory.mktemp("runs") / "run", hostile_dataset, columns, visits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


def opened(run, folder, on_progress=lambda *_: None):
    return open_catalogue(read_run(run), folder, on_progress)


@pytest.fixture(scope="module")
def find(run, folder):
    """Return a function of a query's parts that returns the ids that it finds."""
    index = opened(run, folder)
    return lambda **query: catalogue_module.find(index, Query(**query)).sample_ids.tolist()


def test_samples_come_by_tau_and_by_log_s_among_equals(find):
    assert find()[:6] == [2, 1, 0, 3, 5, 4]
    assert find(sort="hottest")[-6:] == [4, 5, 3, 0, 1, 2]


def test_samples_without_a_tau_of_their_own_are_not_ranked(find, hostile_dataset):
    assert sorted(find()) == list(range(VISITED))
    assert find(sort="id") == list(range(hostile_dataset.n))


def test_a_range_of_tau_has_both_its_bounds(find):
    assert find(low=0.01, high=0.03) == [2, 1, 0, 3]
    assert find(low=0.011, high=0.039, sort="id") == [0, 3]
    assert find(low=0.5) == find(low=0.03, high=0.02) == []


def test_each_side_has_its_own_order(find, hostile_dataset):
    last = hostile_dataset.n - 1
    assert find(side="text", high=0.05) == []  # these were never visited
    assert find(side="image", high=0.05) == [2, 1, 0, 3, 5, 4]
    assert last not in find(side="text")


def test_misfits_are_ranked_by_log_s_of_both_sides(find):
    assert find(sort="misfits")[:3] == [4, 3, 0]
    assert find(sort="misfits", low=0.02, high=0.04) == [3, 0, 5]


@pytest.fixture
def pairs(hostile_dataset, tmp_path):
    """Return a function of a digest's digit that writes features: pair i has the cosine cos(0.2 + i / n)."""

    def write(digit="0"):
        n = hostile_dataset.n
        angles, own = 0.2 + np.arange(n) / n, np.eye(n + 1, dtype=np.float32)
        captions = own[:-1] * np.cos(angles)[:, None] + own[-1] * np.sin(angles)[:, None]
        return stored(tmp_path, np.stack([own[:-1], captions], axis=1), digest=digit * 64)

    return write


def test_samples_come_by_margin_the_lowest_first(run, pairs, tmp_path):
    plain = opened(run, tmp_path)
    with pytest.raises(ConfigError, match="start again with --neighbours"):
        catalogue_module.find(plain, Query(sort="margin"))
    features = pairs()
    catalogue = with_margins(plain, features, tmp_path, lambda *_: None)
    assert (
        catalogue_module.find(catalogue, Query(sort="margin")).sample_ids.tolist()
        == list(range(features.samples))[::-1]
    )
    assert catalogue_module.find(catalogue, Query(sort="margin", high=0.03)).sample_ids.tolist() == [3, 2, 1, 0]
    (card,) = Answers(read_run(run), catalogue, None, 5).cards([3])
    assert card["margin"] == pytest.approx(np.cos(0.2 + 3 / features.samples), abs=1e-3)
    assert card["log_s"] == {"image": 4.0, "text": -9.0}


def test_margins_are_indexed_once_and_again_for_other_features(run, pairs, tmp_path):
    catalogue, done = opened(run, tmp_path), []
    for digit in "001":
        with_margins(catalogue, pairs(digit), tmp_path, lambda *work: done.append(work))
    n = catalogue.samples
    assert done == [("comparing pairs with negatives", n, n)] * 2
    (part,) = (tmp_path / "index").glob("margin-*")  # that of the older features is gone
    (part / "by-margin.npy").write_bytes(b"")
    with pytest.raises(RunError, match=r"by-margin.npy is damaged.*Delete it, and it will be made again"):
        with_margins(catalogue, pairs("1"), tmp_path, lambda *_: None)


def test_misfits_are_ranked_over_the_whole_run(run, tmp_path):
    copy = type(run)(shutil.copytree(run.path, tmp_path / "run"))
    train_on(copy, {}, 9)  # log s is 0 for all now
    assert catalogue_module.find(opened(copy, tmp_path), Query(sort="misfits")).sample_ids[:3].tolist() == [4, 3, 0]


def test_words_are_found_in_captions_and_keys(find, hostile_dataset):
    captions = hostile_dataset.column("caption").to_pylist()
    with_family = [id for id, caption in enumerate(captions) if "family" in (caption or "")]
    assert find(words="family", sort="id") == with_family
    assert find(words="FAM", sort="id") == with_family  # the last word may be a beginning
    assert find(words="fam family", sort="id") == []
    key = hostile_dataset.column("key").to_pylist()[9]
    assert 9 in find(words=key, sort="id")


@pytest.mark.parametrize(
    "words", ['"', "'", "a OR b", "NEAR(", "*", "caption:x", "x" * 100_000, "\0", ") --", "-", "^"]
)
def test_no_words_are_an_error(find, words):
    assert isinstance(find(words=words), list)


def test_conditions_hold_together(find, hostile_dataset):
    groups = hostile_dataset.column("group").to_pylist()
    of_class = [id for id, group in enumerate(groups) if group == groups[0]]
    assert find(group=groups[0], sort="id") == of_class
    assert find(group=groups[0], kind="ordinary", high=0.02, sort="id") == [id for id in of_class if id < 3]
    assert find(kind="too_few_visits", sort="id") == list(range(VISITED, hostile_dataset.n))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"low": "x"}, "low = 'x': .* a valid number"), ({"sort": "x"}, "sort = 'x': .*'coldest', 'hottest'"),
     ({"kind": "x"}, "choose one of too_few_visits"), ({"side": "x"}, "no temperatures of side 'x'"),
     ({"group": "x"}, "no such class: 'x'")],
)  # fmt: skip
def test_a_query_for_what_is_not_there_says_so(run, folder, given, said):
    with pytest.raises(ConfigError, match=said):
        catalogue_module.find(opened(run, folder), Query.of(given))


def test_a_search_that_finds_very_many_says_that_there_are_more(run, folder, monkeypatch):
    monkeypatch.setattr(texts_module, "MAX_MATCHES", 3)
    monkeypatch.setattr("thermopile.tools.serving.catalogue.MAX_MATCHES", 3)
    found = catalogue_module.find(opened(run, folder), Query(words="family", sort="id"))
    assert (len(found.sample_ids), found.has_more) == (3, True)


def test_the_index_is_made_once_and_again_for_another_snapshot(run, tmp_path):
    copy = type(run)(shutil.copytree(run.path, tmp_path / "run"))
    done = []
    opened(copy, copy.report, lambda *work: done.append(work))
    assert {what for what, *_ in done} == {"reading all snapshots", "indexing the state",
                                           "ranking by tau", "indexing captions", "indexing classes"}  # fmt: skip
    done.clear()
    opened(copy, copy.report, lambda *work: done.append(work))
    assert done == []
    tau = np.linspace(0.2, 0.1, read_run(copy).reader.samples)
    train_on(copy, {"image": tau, "text": tau}, 9)
    newer = opened(copy, copy.report, lambda *work: done.append(work))
    assert {what for what, *_ in done} == {"reading all snapshots", "indexing the state",
                                           "ranking by tau"}  # fmt: skip
    assert newer.coldest["image"][0] == len(tau) - 1
    assert len(list((copy.report / "index").iterdir())) == 2  # the older snapshot's is gone


def test_an_index_that_was_broken_off_is_made_again(run, tmp_path, monkeypatch):
    def broken_off(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(run, tmp_path, broken_off)
    assert list((tmp_path / "index").iterdir()) == []
    assert opened(run, tmp_path).samples == read_run(run).reader.samples


@pytest.mark.parametrize(
    "part", ["state-*/image.tau.npy", "state-*/about.json", "texts-*/texts.sqlite", "texts-*/class.npy"]
)
@pytest.mark.parametrize(
    "damage", [b"", b"\x93NUMPY\x01\x00v\x00{'descr': '|O'", b"x" * 5000], ids=["empty", "objects", "noise"]
)
def test_a_damaged_index_is_one_error_that_names_the_file_and_the_cure(run, tmp_path, part, damage):
    opened(run, tmp_path).close()
    (file,) = (tmp_path / "index").glob(part)
    file.write_bytes(damage)
    with pytest.raises(RunError, match=r"is damaged.*Delete it, and it will be made again"):
        catalogue_module.find(opened(run, tmp_path), Query(words="a"))


def test_ids_beyond_the_samples_in_an_index_are_not_looked_up(run, tmp_path):
    opened(run, tmp_path).close()
    (file,) = (tmp_path / "index").glob("state-*/misfits.npy")
    ids = np.load(file)
    ids[:3] = 2**32 - 1
    np.save(file, ids)
    found = catalogue_module.find(opened(run, tmp_path), Query(sort="misfits", kind="ordinary")).sample_ids
    assert set(found) <= set(range(len(ids)))


def test_an_index_of_another_run_is_refused(run, hostile_run, tmp_path):
    opened(run, tmp_path).close()
    (mine,) = (tmp_path / "index").glob("state-*")
    mine.rename(mine.with_name(f"state-5-{read_run(hostile_run).reader.snapshot.id}"))
    with pytest.raises(RunError, match="does not belong to this run"):
        opened(hostile_run, tmp_path)


ENDLESS = """DROP TABLE samples;
CREATE VIEW samples AS WITH RECURSIVE counted(id) AS (SELECT 0 UNION ALL SELECT id + 1 FROM counted)
SELECT id, '' AS key, '' AS caption, '' AS class, '' AS uri FROM counted WHERE id < 0;"""
GENERATED = """DROP TABLE samples; CREATE TABLE samples
(id INTEGER PRIMARY KEY, key TEXT, caption TEXT AS (hex(zeroblob(1 << 28))), class TEXT, uri TEXT);"""
TRIGGER = "CREATE TRIGGER later AFTER INSERT ON samples BEGIN DELETE FROM words; END;"


@pytest.mark.parametrize("schema", [TRIGGER, GENERATED, "CREATE TABLE more (id);", "DROP TABLE words;", ENDLESS],
                         ids=["trigger", "generated", "one table more", "one table less", "endless view"])  # fmt: skip
def test_an_index_of_other_tables_or_with_code_is_refused_before_any_is_read(run, tmp_path, schema):
    opened(run, tmp_path).close()
    (file,) = (tmp_path / "index").glob("texts-*/texts.sqlite")
    with closing(sqlite3.connect(file)) as changed:
        changed.executescript(schema)
    with pytest.raises(RunError, match=r"holds other tables or views than an index\. Delete it, and it will be made"):
        opened(run, tmp_path)


def test_a_question_that_takes_too_many_steps_is_given_up(run, folder, monkeypatch):
    index = opened(run, folder)
    assert len(catalogue_module.find(index, Query(words="family")).sample_ids)
    monkeypatch.setattr(texts_module, "_MAX_TURNS", 0)
    monkeypatch.setattr(texts_module, "_STEPS", 10)
    with pytest.raises(RunError, match=r"is damaged: interrupted\. Delete it"):
        catalogue_module.find(opened(run, folder), Query(words="family"))


def test_the_limit_of_steps_is_that_of_each_question_not_of_all(run, folder, monkeypatch):
    monkeypatch.setattr(texts_module, "_STEPS", 10)
    index = opened(run, folder)
    for word in (f"family {number}" for number in range(texts_module._MAX_TURNS)):
        catalogue_module.find(index, Query(words=word))


@pytest.mark.parametrize("part", ["state-*/image.tau.npy", "texts-*/texts.sqlite"])
def test_a_pipe_in_the_index_is_not_waited_for(run, tmp_path, part):
    opened(run, tmp_path).close()
    (file,) = (tmp_path / "index").glob(part)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RunError, match=r"is a named pipe, not a regular file\. Delete it"):
        opened(run, tmp_path)


@pytest.mark.parametrize(
    "part", ["index", "index/state-*", "index/state-*/image.tau.npy", "index/texts-*/texts.sqlite"]
)
def test_no_link_is_followed(run, tmp_path, part):
    opened(run, tmp_path / "other").close()
    shutil.copytree(tmp_path / "other", tmp_path / "report")
    (linked,) = (tmp_path / "report").glob(part)
    target = tmp_path / "other" / linked.relative_to(tmp_path / "report")
    shutil.rmtree(linked) if linked.is_dir() else linked.unlink()
    linked.symlink_to(target)
    with pytest.raises(NotRegularFileError):
        opened(run, tmp_path / "report")


def test_images_alone_without_classes_have_one_side_and_no_captions(flat_dataset, tmp_path):
    run = write_run(tmp_path / "run", flat_dataset, {"sample": np.linspace(0.5, 0.1, flat_dataset.n)})
    catalogue = opened(run, run.report)
    assert list(catalogue.coldest) == ["sample"]
    assert catalogue.classes == []
    assert catalogue_module.find(catalogue, Query()).sample_ids.tolist() == list(reversed(range(flat_dataset.n)))
    assert set(np.unique(catalogue.kinds)) <= set(range(len(KIND_NAMES)))
