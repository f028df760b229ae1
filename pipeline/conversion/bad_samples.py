"""errors.jsonl, which lists the samples that a conversion left out."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ...storage.place import Place
from ...storage.sealed_json import DamagedJSONError, parse
from ..errors import DatasetError
from ..sources import BadSample


def line_of(sample: BadSample) -> str:
    """Return a line of errors.jsonl; lines follow the order of the ids that the samples would have had."""
    return json.dumps(sample._asdict(), ensure_ascii=False) + "\n"


def read_bad_samples(file: Place) -> Iterator[BadSample]:
    """Yield the lines of errors.jsonl. Raises DatasetError for a damaged line."""
    with file.opened() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield BadSample(**{name: str(text) for name, text in parse(line).items()})
            except (DamagedJSONError, AttributeError, TypeError) as error:
                raise DatasetError(f"{file}, line {number:,}, is damaged: {error}") from error


def count_reasons(samples: Iterable[BadSample]) -> Counter[str]:
    """Count samples per reason; reasons that differ only in numbers count as one, with N for the number."""
    return Counter(re.sub(r"\d[\d,.]*", "N", sample.reason) for sample in samples)
