"""What finished runs scored: lines of a file, one for each, and how far two methods are apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from thermopile.files import write_atomically
from thermopile.trainer.errors import RunError

from reproduction.plan import Mode, Run

BANDS = ("all", "head", "medium", "tail")


class Measure(NamedTuple):
    """A score, by its place in `thermopile eval --json`."""

    label: str
    parts: tuple[tuple[str, str], ...]
    """Method and variant; of several the mean."""


PROBE = Measure("linear probe", (("probe", "sgd"),))
KNN = Measure("k-NN", (("knn", "10"),))
RETRIEVAL = Measure("R@1", (("image_to_text", "1"), ("text_to_image", "1")))
ZERO_SHOT = Measure("zero-shot", (("zero_shot", "top1"),))
DECIDES: dict[Mode, Measure] = {"unimodal": PROBE, "bimodal": RETRIEVAL}
"""The score that a search goes by, over all classes, and that verdicts are about."""


class Temperatures(NamedTuple):
    """Figures of one side's samples."""

    mean: float
    skewness: float
    """0 for a normal distribution, above 0 for a long tail of high temperatures."""
    deciles: list[float]
    """Lowest to highest, 11."""
    spearman: float | None
    """Correlation of class size and the class's mean tau; None where there is nothing to rank."""
    permuted: float | None
    """Correlation with the samples' classes permuted; None where no permutation leaves anything to rank."""
    sizes: list[int]
    """Samples of each class, the largest class first."""
    class_means: list[float]
    """Mean tau of each class."""


class Result(NamedTuple):
    """What one run came to."""

    run: Run
    scores: dict[str, dict[str, dict[str, float | None]]]
    """As in `thermopile eval --json`: method, variant, band → share of 1. Empty where training failed."""
    temperatures: dict[str, Temperatures]
    """Side, `image` and `text` or `sample` -> its figures; empty where no sample has a temperature of its own."""
    seconds: float
    """Time of training and scoring, on one core."""
    machine: dict[str, Any]
    version: str
    """thermopile's."""
    failed: str = ""
    """Why the training did not end."""

    def share(self, measure: Measure, band: str = "all") -> float | None:
        """Share of correct test samples; None if not scored, 0 if training failed."""
        if self.failed:
            return 0.0
        found = [self.scores.get(method, {}).get(variant, {}).get(band) for method, variant in measure.parts]
        known = [share for share in found if share is not None]
        return fmean(known) if len(known) == len(found) else None

    def line(self) -> str:
        """One line of JSON, which `Results.read` reads."""
        fields = self._asdict() | {"run": self.run._asdict()}
        fields["temperatures"] = {side: figures._asdict() for side, figures in self.temperatures.items()}
        return json.dumps(fields, allow_nan=False) + "\n"

    @classmethod
    def of_line(cls, line: str) -> Result:
        fields = json.loads(line)
        temperatures = {side: Temperatures(**figures) for side, figures in fields["temperatures"].items()}
        return cls(**fields | {"run": Run(**fields["run"]), "temperatures": temperatures})


class Results:
    """All finished runs."""

    def __init__(self, every: Iterable[Result] = ()) -> None:
        self._by_key = {result.run.key: result for result in every}

    @classmethod
    def read(cls, file: Path) -> Results:
        """Return the runs of a file, none where there is no file; a last line without its end was not written whole.

        Raises RunError for any other line that is not a result.
        """
        text = file.read_text("utf-8") if file.exists() else ""
        results = cls()
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
            try:
                results.add(Result.of_line(line))
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(
                    f"{file}, line {number}, is not a result ({error}); delete it to make its run again"
                ) from error
        return results

    def add(self, result: Result) -> None:
        self._by_key[result.run.key] = result

    def append(self, result: Result, file: Path) -> None:
        """Add a result, here and as a line of the file, in the place of a last line that was not written whole."""
        text = file.read_bytes() if file.exists() else b""
        write_atomically(file, text[: text.rfind(b"\n") + 1] + result.line().encode())
        self.add(result)

    def of(self, run: Run) -> Result | None:
        return self._by_key.get(run.key)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)
