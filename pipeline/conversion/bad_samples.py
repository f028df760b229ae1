"""errors.jsonl: what a conversion left out, a line for each sample, in the order in which they would have had ids."""

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
    """Raises DatasetError for a line that is not one of errors.jsonl."""
    with open_regular(file) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield BadSample(**{name: str(text) for name, text in parse(line).items()})
            except (DamagedJSONError, AttributeError, TypeError) as error:
                raise DatasetError(f"{file}, line {number:,}, is damaged: {error}") from error


def count_reasons(samples: Iterable[BadSample]) -> Counter[str]:
    """How many samples each reason has; reasons that differ in their numbers alone count as one, with N for them."""
    return Counter(_NUMBER.sub("N", sample.reason) for sample in samples)
