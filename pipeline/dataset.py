"""The dataset on disk: a directory that one conversion writes and every loader reads. docs/formats.md describes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from .errors import DatasetError
from .stored_jpeg import read_jpeg

if TYPE_CHECKING:
    from .beton import Beton

FORMAT = 1
INDEX_FILE = "dataset.json"
SHARD_FOLDER = "shards"
TOKENIZER_FILE = "tokenizer.json"
ERRORS_FILE = "errors.jsonl"
PLACE_IN_SHARD = "row"
"""Column of the samples table that counts the rows of a shard."""


class ImagePolicy(BaseModel, frozen=True, extra="forbid"):
    """How pictures are stored; recorded in dataset.json."""

    max_size: int = Field(default=512, ge=8)
    """Longest allowed short side in pixels; larger pictures are reduced to it."""
    quality: int = Field(default=90, ge=1, le=100)
    """JPEG quality of pictures that have to be encoded again."""


class TokenizerInfo(BaseModel, frozen=True, extra="forbid"):
    """What an encoder must know of the tokens."""

    vocab_size: int
    """The highest token id and 1."""
    context_length: int
    """Tokens per caption, padded or cut to this length."""
    end_id: int
    """The token that closes every caption: what stands behind the first is padding, and CLIP's tower pools from it."""
    truncated: int = 0
    """Captions that were cut to context_length."""


class DatasetIndex(BaseModel, frozen=True, extra="forbid"):
    """dataset.json, which is written last: a directory without it is no dataset."""

    format: Literal[1]
    n: int
    """Samples; their ids are 0 … n-1."""
    mode: Literal["images", "pairs"]
    first_id: tuple[int, ...]
    """Prefix sums of the shards' rows, shards + 1 numbers: sample_id = first_id[shard] + row."""
    image: ImagePolicy
    tokenizer: TokenizerInfo | None
    source: dict[str, Any]
    shard_digests: tuple[str, ...]
    """sha256 of each shard's .beton followed by its .parquet."""
    fingerprint: str
    """sha256 over all of the above but `source`: equal where ids, pixels and tokens are equal."""


def shard_name(shard: int, suffix: Literal["beton", "parquet"]) -> str:
    return f"shard-{shard:05d}.{suffix}"


def fingerprint(index: dict[str, Any]) -> str:
    """sha256 of the index without `source` (which names a place on one machine) and without itself."""
    kept = {key: value for key, value in index.items() if key not in ("source", "fingerprint")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Dataset:
    """A converted dataset, opened for reading.

    Raises DatasetError where the directory is no dataset, is incomplete, or is of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(path)
        self.first_id = np.array(self.index.first_id, np.int64)
        for shard in range(len(self.first_id) - 1):
            for suffix in ("beton", "parquet"):
                if not (file := path / SHARD_FOLDER / shard_name(shard, suffix)).is_file():
                    raise DatasetError(f"{file} is missing, though {INDEX_FILE} names it. Convert the dataset again.")

    @property
    def n(self) -> int:
        return self.index.n

    @property
    def shards(self) -> int:
        return len(self.first_id) - 1

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_FILE

    def locate(self, sample_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard and row of each id, int64 [b] both. Raises DatasetError for an id out of range."""
        if len(sample_ids) and (sample_ids.min() < 0 or sample_ids.max() >= self.n):
            raise DatasetError(
                f"sample ids {sample_ids.min()} to {sample_ids.max()} asked of {self.path}, "
                f"which holds 0 to {self.n - 1}"
            )
        shard = np.searchsorted(self.first_id, sample_ids, side="right") - 1
        return shard, sample_ids - self.first_id[shard]

    @cached_property
    def _betons(self) -> dict[int, Beton]:
        return {}

    def beton(self, shard: int) -> Beton:
        """A shard's pixels and tokens, memory-mapped once."""
        from .beton import Beton

        if shard not in self._betons:
            beton = Beton(self.path / SHARD_FOLDER / shard_name(shard, "beton"))
            if len(beton) != (rows := int(self.first_id[shard + 1] - self.first_id[shard])):
                raise DatasetError(
                    f"{self.path}: shard {shard} holds {len(beton):,} rows, but {INDEX_FILE} says "
                    f"{rows:,}. Convert the dataset again."
                )
            self._betons[shard] = beton
        return self._betons[shard]

    def jpeg(self, sample_id: int) -> bytes:
        """The stored JPEG of one sample.

        Raises DatasetError for an id out of range, and where the shard is damaged; OSError where it cannot be read.
        """
        shard, row = (int(place[0]) for place in self.locate(np.array([sample_id], np.int64)))
        file = self.path / SHARD_FOLDER / shard_name(shard, "beton")
        return read_jpeg(file, row, int(self.first_id[shard + 1] - self.first_id[shard]))

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the samples table for all n samples, in the order of the ids."""
        files = [self.path / SHARD_FOLDER / shard_name(shard, "parquet") for shard in range(self.shards)]
        return pa.chunked_array([chunk for file in files for chunk in pq.read_table(file, columns=[name])[name].chunks])

    def tables(self, names: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Columns of the samples table, so many rows at a time (the last ones fewer), in the order of the ids.

        Raises DatasetError where a column or a row is missing, or a file is damaged.
        """
        pending, held = [], 0
        for shard in range(self.shards):
            for batch in self._batches(shard, names, rows):
                pending.append(batch)
                held += len(batch)
                while held >= rows:
                    table = pa.Table.from_batches(pending)
                    yield table.slice(0, rows)
                    pending, held = table.slice(rows).to_batches(), held - rows
        if held:
            yield pa.Table.from_batches(pending)

    def _batches(self, shard: int, names: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        with self._open_table(shard, names) as parquet:
            yield from parquet.iter_batches(batch_size=rows, columns=list(names))

    @cached_property
    def schema(self) -> pa.Schema:
        """Names and types of the samples table's columns, by its first shard. Raises DatasetError."""
        with self._open_table(0, []) as parquet:
            return parquet.schema_arrow

    def take(self, sample_ids: NDArray[np.int64], names: Sequence[str]) -> pa.Table:
        """Columns of the samples table for ids, int64 [b], in the order asked; reads the shards that they are in.

        Raises DatasetError for an id out of range, and where a column or a row is missing, or a file is damaged.
        """
        shards, rows = self.locate(sample_ids)
        by_shard = np.argsort(shards, kind="stable")
        first_of_shard = np.flatnonzero(np.diff(shards[by_shard], prepend=-1))
        pieces = []
        for places in np.split(by_shard, first_of_shard)[1:]:
            with self._open_table(int(shards[places[0]]), names) as parquet:
                pieces.append(parquet.read(columns=list(names)).take(rows[places]))
        table = pa.concat_tables(pieces) if pieces else self.schema.empty_table().select(list(names))
        in_order = bool((np.diff(shards) >= 0).all())  # as all samples are, whose texts need not be copied once more
        return table if in_order else table.take(np.argsort(by_shard, kind="stable"))

    @contextmanager
    def _open_table(self, shard: int, names: Sequence[str]) -> Iterator[pq.ParquetFile]:
        """A shard's part of the samples table, which has these columns, and every row."""
        file = self.path / SHARD_FOLDER / shard_name(shard, "parquet")
        wanted = int(self.first_id[shard + 1] - self.first_id[shard])
        try:
            with pq.ParquetFile(file) as parquet:
                if missing := [name for name in names if name not in parquet.schema_arrow.names]:
                    known = ", ".join(parquet.schema_arrow.names)
                    raise DatasetError(f"{file} has no column {', '.join(map(repr, missing))}; it has {known}")
                if parquet.metadata.num_rows != wanted:
                    raise DatasetError(f"{file} holds {parquet.metadata.num_rows:,} rows, but {INDEX_FILE} says "
                                       f"{wanted:,}. Convert the dataset again.")  # fmt: skip
                yield parquet
        except pa.ArrowException as error:
            raise DatasetError(f"{file} cannot be read: {error}. Convert the dataset again.") from error

    def rows(self, sample_ids: Sequence[int]) -> list[dict[str, Any]]:
        """The samples table's rows of a few ids, in the order asked, each with its `sample_id`.

        Raises DatasetError as `take` does.
        """
        table = self.take(np.array(sample_ids, np.int64), self.schema.names)
        return [{"sample_id": int(id), **row} for id, row in zip(sample_ids, table.to_pylist(), strict=True)]


def read_index(path: Path) -> DatasetIndex:
    """dataset.json of a dataset, checked. Raises DatasetError where the directory is none."""
    file = path / INDEX_FILE
    try:
        raw = json.loads(file.read_text("utf-8"))
        index = DatasetIndex.model_validate(raw)
    except FileNotFoundError:
        message = f"{path} is no dataset: it has no {INDEX_FILE}. Make one with `thermopile convert`."
        raise DatasetError(message) from None
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise DatasetError(f"{file} cannot be used: {reasons}") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} cannot be used: {error}") from error
    first_id = np.array(index.first_id, np.int64)
    if len(first_id) < 2 or first_id[0] != 0 or first_id[-1] != index.n or (np.diff(first_id) <= 0).any():
        raise DatasetError(
            f"{file} cannot be used: first_id is not the prefix sums of shards' rows up to n = {index.n}"
        )
    if fingerprint(raw) != index.fingerprint:
        raise DatasetError(f"{file} cannot be used: it was changed by hand (its fingerprint does not fit)")
    return index
