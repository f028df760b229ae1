"""What finished runs came to: a line of a file for each, and beside it which test samples were right."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermopile.storage.files import write_atomically
from thermopile.trainer.errors import RunError

from .plan import Data, Mode, Run, base_of, is_searched_on

BANDS = ("all", "head", "medium", "tail")
NEIGHBOURS = 10


class Measure(NamedTuple):
    """A score: the share of test samples that are right."""

    label: str
    parts: tuple[str, ...]
    """What is counted; of several the mean."""


PROBE = Measure("linear probe", ("probe",))
KNN = Measure("k-NN", ("knn",))
RETRIEVAL = Measure("R@1", ("image_to_text", "text_to_image"))
TO_TEXT, TO_IMAGE = Measure("image to text", ("image_to_text",)), Measure("text to image", ("text_to_image",))
ZERO_SHOT = Measure("zero-shot", ("zero_shot",))
DECIDES: dict[Mode, Measure] = {"unimodal": PROBE, "bimodal": RETRIEVAL}
"""The score that a search goes by, over all classes, and that verdicts are about."""


LOOKED_AT = 4000
"""Samples whose near-copies are counted among all, at most."""


class Temperatures(NamedTuple):
    """Figures of one side's samples."""

    mean: float
    skewness: float
    """0 for a normal distribution, above 0 for a long tail of high temperatures."""
    kurtosis: float
    """Excess: 0 for a normal distribution."""
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
    alignment: float | None
    """Correlation of tau and the similarity of a picture and its caption; None on images."""
    copies: float | None = None
    """Correlation of tau and the number of a picture's near-copies; None on glyphs."""
    words: float | None = None
    """Correlation of tau and the number of captions that have the caption's rarest word; None on glyphs."""


class Result(NamedTuple):
    """What one run came to."""

    run: Run
    scores: dict[str, dict[str, float]]
    """What is counted -> band -> share of 1. Empty where training failed."""
    temperatures: dict[str, Temperatures]
    """Side, `image` and `text` or `sample` -> its figures; empty where no sample has a temperature of its own."""
    seconds: float
    """Time of training and scoring, on one core."""
    machine: dict[str, Any]
    version: str
    """thermopile's."""
    commit: str
    """The commit of the code that trained; its version where it is not a checkout."""
    failed: str = ""
    """Why the training did not end."""

    def share(self, measure: Measure, band: str = "all") -> float | None:
        """Share of correct test samples; None if not scored, as where training failed."""
        found = [self.scores[part][band] for part in measure.parts if part in self.scores]
        return fmean(found) if len(found) == len(measure.parts) else None

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
    """All finished runs of one commit, whose runs are no other's."""

    def __init__(self, every: Iterable[Result] = ()) -> None:
        self._by_key = {result.run.key: result for result in every}
        self._bits: dict[str, dict[str, str]] = {}
        self._searched: dict[str, Result] = {}
        self.searches: dict[tuple[Mode, str, int], Any] = {}
        """What was found in these results: mode, method and batch size -> its search. Forgotten when one is added."""

    @classmethod
    def read(cls, file: Path) -> Results:
        """Return the runs of a file, none where there is no file; a last line without its end was not written whole.

        Raises RunError for any other line that is not a result, or is of another commit than those before it.
        """
        results = cls()
        for line, words in _lines(beside(file)):
            with _refused(beside(file), line):
                bits = json.loads(words)
                results._bits[bits.pop("run")] = bits
        for line, words in _lines(file):
            with _refused(file, line):
                results.add(Result.of_line(words))
        return results

    @property
    def commit(self) -> str | None:
        """The commit of all runs; None while there is none."""
        return next((result.commit for result in self), None)

    def add(self, result: Result) -> None:
        """Add a result. Raises ValueError if it is of another commit."""
        if self.commit not in (None, result.commit):
            raise ValueError(f"made by commit {result.commit}, those before it by {self.commit}")
        self._by_key[result.run.key] = result
        self.searches.clear()

    def append(self, result: Result, right: dict[str, NDArray[np.bool_]], file: Path) -> None:
        """Add a result, here and as a line of the file. right: what is counted -> test samples, kept beside it."""
        if right:
            bits = {name: b64encode(np.packbits(of_samples).tobytes()).decode() for name, of_samples in right.items()}
            _append(beside(file), json.dumps({"run": _short(result.run), **bits}) + "\n")
            self._bits[_short(result.run)] = bits
        _append(file, result.line())  # last: a run that has a line has its samples
        self.add(result)

    def add_tests(self, data: Data, tests: dict[str, NDArray[np.int64]], file: Path) -> None:
        """Keep what the test samples of this data are, int64 [samples] by name, in the file of what was right."""
        words = {name: b64encode(zlib.compress(values.tobytes())).decode() for name, values in tests.items()}
        _append(beside(file), json.dumps({"run": f"tests of {data}", **words}) + "\n")
        self._bits[f"tests of {data}"] = words

    def tests(self, data: Data) -> dict[str, NDArray[np.int64]]:
        """Return what `add_tests` kept; empty if it kept nothing."""
        kept = self._bits.get(f"tests of {base_of(data).removesuffix('-all')}", {})
        return {name: np.frombuffer(zlib.decompress(b64decode(words)), np.int64) for name, words in kept.items()}

    def take_searches(self, other: Results) -> None:
        """Take settings from another's searches where these have none; what is compared is never another's."""
        self._searched = {result.run.key: result for result in other if is_searched_on(result.run.data)}
        self.searches.clear()

    def of(self, run: Run) -> Result | None:
        return self._by_key.get(run.key) or self._searched.get(run.key)

    def right(self, result: Result, part: str, samples: int) -> NDArray[np.bool_] | None:
        """Which test samples are right, bool [samples]; none if training failed, None if it was not kept."""
        if result.failed:
            return np.zeros(samples, np.bool_)
        if (bits := self._bits.get(_short(result.run), {}).get(part)) is None:
            return None
        return np.unpackbits(np.frombuffer(b64decode(bits), np.uint8), count=samples).astype(np.bool_)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)


def beside(file: Path) -> Path:
    return file.with_name(f"{file.stem}_right{file.suffix}")


def _short(run: Run) -> str:
    return sha256(run.key.encode()).hexdigest()[:16]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    text = file.read_text("utf-8") if file.exists() else ""
    return enumerate(text[: text.rfind("\n") + 1].splitlines(), 1)


def _append(file: Path, line: str) -> None:
    """Add a line, in the place of a last one that was not written whole."""
    text = file.read_bytes() if file.exists() else b""
    write_atomically(file, text[: text.rfind(b"\n") + 1] + line.encode())


@contextmanager
def _refused(file: Path, line: int) -> Iterator[None]:
    """Raise what a line is not as a RunError that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file}, line {line}, is not a result ({error}); delete it to make its run again") from error
