"""Creating and opening a store, or refusing to."""

import re

import numpy as np
import pytest

from thermopile.state_store.durable import Repository, list_snapshots
from thermopile.state_store.errors import StoreExistsError, StoreMismatchError, StoreNotFoundError
from thermopile.state_store.reader import StateReader

from support.commits import (
    commit,
)


def test_a_store_is_not_created_over_anything(create, path):
    path.mkdir(parents=True)
    (path / "notes.txt").write_text("keep me")
    with pytest.raises(StoreExistsError, match="exists already"):
        create()
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


def test_a_store_is_not_created_over_another(create, path):
    create().close()
    with pytest.raises(StoreExistsError, match="exists already; resume that run"):
        create()


def test_looking_for_a_store_where_there_is_none_creates_nothing(path, resume):
    for look in (StateReader.open, list_snapshots, lambda path: resume(path=path)):
        with pytest.raises(StoreNotFoundError, match="holds no state store"):
            look(path)
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"dataset_fingerprint": "cc3m-7"}, "dataset fingerprint: the store has glyphs-1, this run has cc3m-7"),
        ({"samples": 101}, "number of samples: the store has 100, this run has 101"),
        ({"fields": {"image/log_s": -np.inf}}, "fields: the store has {'image/log_s': -inf, 'image/tau': 0.05}, this"),
        (
            {"fields": {"image/log_s": -np.inf, "image/tau": 0.07}},
            "this run has {'image/log_s': -inf, 'image/tau': 0.07}",
        ),
    ],
)
def test_a_store_made_for_another_run_is_refused_naming_both_sides(create, resume, path, new_rows, changes, difference):
    with create() as store:
        store.put(np.array([2, 99, 40]), new_rows(3), step=1)
        store.snapshot(1, epoch=0).result()
    with pytest.raises(StoreMismatchError, match=re.escape(difference)):
        resume(at="step-0", **changes)
    assert [s.tag for s in list_snapshots(path)] == ["step-0", "step-1"], "a refused resume has undone a snapshot"
    resume().close()


def test_opening_prints_no_warning_of_the_storage(repository, path, capfd):
    commit(Repository(path), 1)
    assert capfd.readouterr() == ("", "")
