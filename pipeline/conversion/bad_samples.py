"""errors.jsonl: the samples that a conversion left out, one per line, in the order of the ids they would have had."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ...files import open_regular
from ...sealed_json import DamagedJSONError, parse
from ..errors import DatasetError

_NUMBER = re.compile(r"\d[\d,.]*")


class BadSample(NamedTuple):
    """A line of errors.jsonl."""

    uri: str
    key: str
    reason: str

    def line(self) -> str:
        return json.dumps(self._asdict(), ensure_ascii=False) + "\n"


def read_bad_samples(file: Path) -> Iterator[BadSample]:
    """Yield the lines of errors.jsonl. Raises DatasetError for a damaged line."""
    with open_regular(file) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield BadSample(**{name: str(text) for name, text in parse(line).items()})
            except (DamagedJSONError, AttributeError, TypeError) as error:
                raise DatasetError(f"{file}, line {number:,}, is damaged: {error}") from error


def count_reasons(samples: Iterable[BadSample]) -> Counter[str]:
    """Count samples per reason; reasons that differ only in numbers count as one, with N in their place."""
    return Counter(_NUMBER.sub("N", sample.reason) for sample in samples)
