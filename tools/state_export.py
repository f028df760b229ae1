"""One snapshot of the state as a Parquet file: a line for every sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..state_store import StateReader
from ..state_store.schema import COUNTERS
from ..trainer.files import sync_directory

SAMPLE_ID = "sample_id"
ROWS_AT_ONCE = 1 << 18
"""Rows of a row group, in whole blocks: what is in memory at a time."""


def export_parquet(
    reader: StateReader, to: Path, columns: Sequence[str], on_progress: Callable[[int], None] = lambda done: None
) -> None:
    """Write sample_id, int64, and `columns`, float32 or uint32, of all samples in the order of their ids.

    The file takes the place of what was at `to` once it is whole and on the disk; where anything fails, nothing is
    left. Its metadata names the snapshot and the dataset. on_progress is told the number of rows written so far.
    Raises DamagedChunkError, SnapshotNotFoundError where the run deletes the snapshot meanwhile, OSError.
    """
    schema = _schema(reader, columns)
    rows = max(1, ROWS_AT_ONCE // reader.block_rows) * reader.block_rows
    # Few values of a float field repeat: looking for a dictionary of them takes most of the time, and space.
    encoding = {"use_dictionary": [*COUNTERS], "column_encoding": {SAMPLE_ID: "DELTA_BINARY_PACKED"}}
    with _written_aside(to) as file, pq.ParquetWriter(file, schema, **encoding) as writer:
        for start in range(0, reader.samples, rows):
            stop = min(start + rows, reader.samples)
            ids = {SAMPLE_ID: np.arange(start, stop, dtype=np.int64)}
            writer.write_table(pa.table(ids | reader.rows(start, stop, columns), schema=schema), row_group_size=rows)
            on_progress(stop)


def _schema(reader: StateReader, columns: Sequence[str]) -> pa.Schema:
    types = [(name, pa.float32() if name in reader.fields else pa.uint32()) for name in columns]
    return pa.schema(
        [(SAMPLE_ID, pa.int64()), *types],
        metadata={
            "thermopile.snapshot": reader.snapshot.id,
            "thermopile.tag": reader.snapshot.tag,
            "thermopile.step": str(reader.snapshot.step),
            "thermopile.dataset_fingerprint": reader.dataset_fingerprint,
        },
    )


@contextmanager
def _written_aside(to: Path) -> Iterator[BinaryIO]:
    """A file beside `to` that takes its place at the end, and is removed where anything fails."""
    # With the process's number: two exports to one name must not write into one file.
    beside = to.with_name(f".{to.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(to)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(to.parent)
