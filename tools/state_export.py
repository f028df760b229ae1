"""Export one snapshot of the state as Parquet, one row per sample; schema and writer are shared by all exports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..files import written_aside
from ..state_store import StateReader
from .state_blocks import read_blocks

SAMPLE_ID = "sample_id"


def export_parquet(
    reader: StateReader, to: Path, columns: Sequence[str], on_progress: Callable[[int], None] = lambda done: None
) -> None:
    """Write sample_id, int64, and `columns`, float32 or uint32, of all samples, ordered by id.

    The file replaces `to` atomically once it is complete and synced; on failure nothing is left behind. Its metadata
    names the snapshot and the dataset. Calls on_progress with the number of rows written so far.
    Raises DamagedChunkError, SnapshotNotFoundError if the run deletes the snapshot meanwhile, OSError.
    """
    schema = state_schema(reader, columns)
    with written_aside(to) as file, parquet_writer(file, schema) as writer:
        for block, rows in read_blocks(reader, columns):
            ids = {SAMPLE_ID: np.arange(block.start, block.stop, dtype=np.int64)}
            # One row group per block, which is what memory holds at a time.
            writer.write_table(pa.table(ids | rows, schema=schema), row_group_size=len(block))
            on_progress(block.stop)


def state_schema(reader: StateReader, columns: Sequence[str]) -> pa.Schema:
    """Return the schema: sample_id, int64, and `columns`, float32 or uint32; metadata names snapshot and dataset."""
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


def parquet_writer(file: BinaryIO, schema: pa.Schema) -> pq.ParquetWriter:
    """Return a writer for rows of the state, including sample_id."""
    # Float values rarely repeat: dictionary encoding would take most of the time and save no space.
    repeating = [field.name for field in schema if field.name != SAMPLE_ID and not pa.types.is_floating(field.type)]
    return pq.ParquetWriter(file, schema, use_dictionary=repeating, column_encoding={SAMPLE_ID: "DELTA_BINARY_PACKED"})
