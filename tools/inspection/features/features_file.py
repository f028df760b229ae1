"""Features of a run's samples, of all or of drawn ones, made once and read a few megabytes at a time.

A header of 4096 bytes, one line of sealed JSON padded with spaces; of drawn samples their ids, int64 [rows], ascending;
and the features, float16 [rows, sides, d], those of all samples in the order of their ids. The file is read with pread,
so that one that shrinks meanwhile is an error, not a signal.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....pipeline.dataset.raw_bytes import read_at
from ....storage.files import RegularFile, refuse_link, written_aside
from ....storage.kernels import kernel
from ....storage.sealed_json import DamagedJSONError, seal_line, unseal
from ....trainer.errors import RunError
from .. import Float32s, Int64s

NAME = "features.f16"
HEADER_BYTES = 4096
FEATURE_ROWS_AT_ONCE = 1024
"""Few enough that a block, as float32, stays in the processor's cache."""
_LARGEST = np.uint32(0x3C01)
"""The float16 above 1: no element of a row of norm 1 is larger."""


class UnusableFeaturesError(RunError):
    """The file is missing, damaged, or holds the features of other encoders; they can be made again."""


class FeaturesOf(BaseModel):
    """Whose features a file holds."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[2] = 2
    samples: int = Field(ge=1, lt=1 << 40)
    """Of the dataset."""
    views: int = Field(default=0, ge=0, le=16)
    """Augmented views of each picture, as the recipe draws them; 0: the picture itself, and the caption of pairs."""
    checkpoint: str = Field(max_length=100)
    """step-N."""
    weights: Literal["averaged", "raw"]
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    """sha256 of everything that determines the features: the checkpoint's digests and the settings of the encoders."""

    def __str__(self) -> str:
        return f"{self.checkpoint} ({self.weights} weights, {self.samples:,} samples, {self.digest[:12]}…)"


class _Header(FeaturesOf):
    rows: int = Field(ge=1, lt=1 << 40)
    """Samples whose features the file holds; fewer than all are drawn ones."""
    sides: int = Field(ge=1, le=16)
    """1: pictures only; 2: pictures and captions; else, views."""
    dim: int = Field(ge=1, le=1 << 16)


class FeaturesFile:
    """Features of norm 1: side 0 holds the pictures', side 1 the captions', or each those of a view. Thread-safe."""

    drawn: Int64s | None = None
    """int64 [rows], ascending: the samples whose features these are; None: all."""

    def __init__(self, path: Path, of: FeaturesOf | None = None) -> None:
        """Open a file; of: whose features it must hold.

        Raises UnusableFeaturesError, NotRegularFileError for a link or anything but a file, OSError.
        """
        refuse_link(path)
        try:
            self._file = RegularFile(path)
        except FileNotFoundError:
            raise UnusableFeaturesError(f"{path} does not exist") from None
        self.path, text = path, np.empty(HEADER_BYTES, np.uint8)
        try:
            if not read_at(self._file.number, 0, text):
                raise DamagedJSONError("it was cut short")
            header = _Header.model_validate(unseal(text.tobytes().rstrip()))
        except (DamagedJSONError, ValidationError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise UnusableFeaturesError(f"{path} is not a file of features: {reason}") from error
        self.of = FeaturesOf(**header.model_dump(exclude={"rows", "sides", "dim"}))
        self.samples, self.sides, self.dim = header.rows, header.sides, header.dim
        self._row_bytes = 2 * self.sides * self.dim
        self._begin = HEADER_BYTES + 8 * (self.samples if self.samples != header.samples else 0)
        if self._file.size != (expected := self._begin + self.samples * self._row_bytes):
            raise UnusableFeaturesError(f"{path} has {self._file.size:,} bytes, not {expected:,}: it was cut short")
        if self._begin > HEADER_BYTES:
            self.drawn = ids = np.empty(self.samples, "<i8")
            read_at(self._file.number, HEADER_BYTES, ids.view(np.uint8))
            if not (ids[0] >= 0 and ids[-1] < header.samples and (ids[1:] > ids[:-1]).all()):
                raise UnusableFeaturesError(f"{path} is damaged: it names samples that the dataset does not have")
        if of is not None and self.of != of:
            raise UnusableFeaturesError(f"{path} holds the features of {self.of}, which differ from those of {of}")

    def rows(self, sample_ids: Int64s) -> Float32s:
        """Return the features of samples, ids int64 [m] in 0 … n - 1, float32 [m, sides, d].

        Raises RunError if they cannot be read or are damaged.
        """
        stored = np.empty((len(sample_ids), self.sides * self.dim), np.uint16)
        for place, sample_id in enumerate(sample_ids.tolist()):
            self._read(sample_id, stored[place : place + 1])
        return self._decoded(stored, np.empty(stored.shape, np.float32))

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Float32s]]:
        """Yield the id of the first sample of each block and its features, float32 [up to 1024, sides, d].

        The next block overwrites the memory of the one before. Raises as `rows`.
        """
        stop = self.samples if stop is None else stop
        stored = np.empty((FEATURE_ROWS_AT_ONCE, self.sides * self.dim), np.uint16)
        decoded = np.empty(stored.shape, np.float32)
        for first in range(start, stop, FEATURE_ROWS_AT_ONCE):
            count = min(FEATURE_ROWS_AT_ONCE, stop - first)
            self._read(first, stored[:count])
            yield first, self._decoded(stored[:count], decoded[:count])

    def _read(self, first: int, stored: NDArray[np.uint16]) -> None:
        if not read_at(self._file.number, self._begin + first * self._row_bytes, stored.reshape(-1).view(np.uint8)):
            raise RunError(f"{self.path} cannot be read at sample {first}: it was cut short or the disk is failing")

    def _decoded(self, stored: NDArray[np.uint16], into: Float32s) -> Float32s:
        if not _decode(stored, into.view(np.uint32)):
            raise RunError(f"{self.path} is damaged: it holds features that are not of norm 1; remove it")
        return into.reshape(-1, self.sides, self.dim)


def write_features(path: Path, of: FeaturesOf, batches: Iterable[Float32s], drawn: Int64s | None = None) -> None:
    """Write features atomically. batches: float32 [any, sides, d] in id order, rows of norm 1.

    drawn: int64 [rows], ascending, the samples whose features these are; None: all.

    A file or link at `path` is replaced. Raises OSError, and what `batches` raises; then nothing is left behind.
    """
    with written_aside(path) as file:
        written, rows = 0, of.samples if drawn is None else len(drawn)
        for batch in batches:
            if not written:
                header = _Header(**of.model_dump(), rows=rows, sides=batch.shape[1], dim=batch.shape[2])
                file.write(seal_line(header.model_dump()).ljust(HEADER_BYTES))
                if rows < of.samples:
                    file.write(np.asarray(drawn, "<i8").tobytes())
            file.write(batch.astype("<f2").tobytes())
            written += len(batch)
        if written != rows:
            raise RunError(f"features of {written:,} samples were made, not of {rows:,}")


@kernel()
def _decode(stored: NDArray[np.uint16], into: NDArray[np.uint32]) -> bool:
    """Write the bits of float16 as those of float32, both [m, d]. Returns whether all are -1 … 1, hence no NaN.

    The exponent is re-biased by a product with 2¹¹², which is exact, for subnormal numbers too. numpy (2.4) takes six
    times as long where the processor has no AVX-512.
    """
    rows, width = stored.shape
    values, largest = into.view(np.float32), np.uint32(0)
    for row in range(rows):
        for k in range(width):
            bits = np.uint32(stored[row, k])
            magnitude = bits & np.uint32(0x7FFF)
            largest = max(largest, magnitude)
            into[row, k] = (magnitude << np.uint32(13)) | ((bits & np.uint32(0x8000)) << np.uint32(16))
        for k in range(width):
            values[row, k] *= np.float32(2.0**112)
    return bool(largest <= _LARGEST)
