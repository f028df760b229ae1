"""The samples' texts in SQLite: keys, captions and classes by id, and a full-text index of them."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from ...pipeline.dataset.samples_table import CAPTIONS
from ...pipeline.opening import Dataset
from ...trainer.errors import RunError
from ..inspection import Int64s, OnDone

MAX_MATCHES = 50_000
"""Samples that a search for words finds at most, those with the lowest ids: more take too long to count."""
_STEPS, _MAX_TURNS = 1 << 16, 1000
"""Steps of SQLite's machine between two looks at the limit, and looks that a question may take: a second or two."""
_MADE = """
CREATE TABLE samples (id INTEGER PRIMARY KEY, key TEXT, caption TEXT, class TEXT, uri TEXT);
CREATE VIRTUAL TABLE words USING fts5(caption, key, content='samples', content_rowid='id', columnsize=0);
"""
_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"


class Text(NamedTuple):
    """One sample's texts in the samples table, as stored: not escaped, of any length."""

    key: str
    caption: str
    """All its captions, a line each; empty if it has none, like the class."""
    group: str
    uri: str


class Texts:
    """Searches the texts of a dataset that `write_texts` has written. For any number of threads."""

    def __init__(self, path: Path) -> None:
        """path: a regular file. Raises RunError if it is damaged, or holds anything but what `write_texts` writes."""
        self._path, self._lock, self._turns = path, Lock(), 0
        # The file lies in a run directory, which may come from anyone: it is not written to, and runs nothing. A view,
        # a trigger or a generated column would.
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(address, uri=True, check_same_thread=False)
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self._connection.set_progress_handler(self._is_endless, _STEPS)
        self._ask("PRAGMA trusted_schema = OFF")
        with closing(sqlite3.connect(":memory:")) as new:
            new.executescript(_MADE)
            if self._ask(_SCHEMA) != new.execute(_SCHEMA).fetchall():
                raise damaged(path, "it holds other tables or views than an index")

    def matches(self, words: str) -> Int64s:
        """Return the ids of samples whose caption or key has all these words, ascending, at most MAX_MATCHES.

        The last word may be the beginning of one.
        """
        quoted = ['"{}"'.format(word.replace('"', '""').replace("\0", "")) for word in words.split()]
        if not quoted:
            return np.empty(0, np.int64)
        question = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY rowid LIMIT ?"
        rows = self._ask(question, (" ".join(quoted) + "*", MAX_MATCHES))
        return np.fromiter((id for (id,) in rows), np.int64, len(rows))

    def of(self, sample_ids: Sequence[int]) -> list[Text]:
        """Return the texts of a few samples, in the given order; empty ones for ids that are not there."""
        marks = ", ".join("?" * len(sample_ids))
        rows = self._ask(f"SELECT id, key, caption, class, uri FROM samples WHERE id IN ({marks})", sample_ids)
        found = {id: Text(*(str(words or "") for words in texts)) for id, *texts in rows}
        return [found.get(id, Text("", "", "", "")) for id in sample_ids]

    def close(self) -> None:
        self._connection.close()

    def _ask(self, question: str, values: Sequence[int | str] = ()) -> list[tuple[int | str, ...]]:
        try:
            with self._lock:
                self._turns = 0
                return self._connection.execute(question, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise damaged(self._path, error) from error

    def _is_endless(self) -> bool:
        self._turns += 1
        return self._turns > _MAX_TURNS


def damaged(path: Path, why: object) -> RunError:
    """Return the error for a damaged part of the index."""
    return RunError(f"{path} is damaged: {why}. Delete it, and it will be made again")


def write_texts(dataset: Dataset, path: Path, on_progress: OnDone) -> None:
    """Write the texts of all samples into a new file. Calls on_progress with the samples written.

    Raises DatasetError.
    """
    first = 0
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        # A file that is not whole is never read, so no journal is needed.
        file.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; {_MADE}")
        for table in dataset.tables(["key", CAPTIONS, "group", "uri"], 1 << 14):
            keys, found, groups, uris = (column.to_pylist() for column in table.itercolumns())
            texts = ["\n".join(filter(None, each or ())) or None for each in found]
            rows = list(zip(range(first, dataset.n), keys, texts, groups, uris, strict=False))
            file.execute("BEGIN")
            file.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", rows)
            file.executemany("INSERT INTO words (rowid, key, caption) VALUES (?, ?, ?)", [row[:3] for row in rows])
            file.execute("COMMIT")
            first += len(table)
            on_progress(first, dataset.n)
