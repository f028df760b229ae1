"""`make mutants` breaks lines that are there."""

from pathlib import Path

TESTS = Path(__file__).parent


def test_each_chosen_line_occurs_once_in_its_file(monkeypatch):
    monkeypatch.syspath_prepend(TESTS / "mutants")
    from chosen import CHOSEN

    found = {each.name: (TESTS.parent / each.file).read_text("utf-8").count(each.line) for each in CHOSEN}
    assert found == dict.fromkeys(found, 1)
    assert all((TESTS / test).is_file() for each in CHOSEN for test in each.tests)
