"""Serve a run whose texts answer no search: SQLite counts for ever, without the limit that a question has."""

import sys

from thermopile.tools.cli import main
from thermopile.tools.serving.texts import Texts


def count_for_ever(texts: Texts, words: str) -> None:
    print("endless", flush=True)
    texts._connection.set_progress_handler(None, 0)
    texts._ask("WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n")


Texts.matches = count_for_ever
main(["inspect", sys.argv[1], "--serve", "--to", sys.argv[2]])
