"""Export all samples of a snapshot: their rows of the samples table and of the state, as a file or for FiftyOne.

Of FiftyOne also the way back: the tags that people set in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from ...pipeline.dataset.index import FINGERPRINT, FINGERPRINT_COLUMN
from ...pipeline.dataset.samples_table import PLACE_IN_SHARD
from ...pipeline.opening import Dataset
from ...storage.files import read_regular, written_aside
from ...storage.local import LocalPath
from ...storage.place import place_of
from ...storage.sealed_json import DamagedJSONError, parse
from ...trainer.errors import ConfigError, RunError, one_line
from ...trainer.run_directory import refuse_in_run
from . import AnyArray, Int64s, OnDone, silent
from .opening import Inspection, read_blocks
from .temperatures.kinds import BY_FEATURES, KIND, KIND_NAMES, Codes, KindRules

if TYPE_CHECKING:
    from .feature_findings.by_features import ByFeatures
    from .features.confirmation import Confirmation
    from .features.solving import SolvedTemperatures

SAMPLE_ID, KIND_FROM, MARGIN = "sample_id", "kind_from", "margin"
TAU_SOLVED, OF_MISFITS = "tau_solved", ("misfit_rank", "expected_precision", "planted")
LEVELS = ("state", "forward_pass", "features")
"""Values of kind_from."""
SUFFIX, KEEP, DROP = ".fiftyone", "keep", "drop"
UNTYPED = (None, math.inf, -math.inf)


def write_folder(to: Path, tables: Iterable[pa.Table], dataset: Dataset) -> None:
    """Write rows and their stored JPEGs to a new folder, for `fiftyone.types.FiftyOneDataset`.

    Without metadata.json, FiftyOne takes a field's type from its values; for that, null, nan and inf are left out.
    """
    with LocalPath(to).built() as folder:
        (folder / "data").mkdir(parents=True)
        with open(folder / "samples.json", "x", encoding="utf-8") as file:
            for number, row in enumerate(row for table in tables for row in table.to_pylist()):
                path = f"data/{row['sample_id']}.jpg"
                (folder / path).write_bytes(dataset.jpeg(row["sample_id"]))
                usable = {name: value for name, value in row.items() if value == value and value not in UNTYPED}
                named = {name.replace("/", "_"): value for name, value in usable.items()}
                line = json.dumps(named | {"filepath": path, "tags": []})
                file.write(f",\n{line}" if number else f'{{"samples": [\n{line}')
            file.write("\n]}\n")


def _parquet_writer(file: BinaryIO, schema: pa.Schema) -> pq.ParquetWriter:
    # Float values rarely repeat: dictionary encoding would take most of the time and save no space.
    repeating = [field.name for field in schema if field.name != SAMPLE_ID and not pa.types.is_floating(field.type)]
    return pq.ParquetWriter(file, schema, use_dictionary=repeating, column_encoding={SAMPLE_ID: "DELTA_BINARY_PACKED"})


_WRITERS = {".parquet": _parquet_writer, ".csv": pyarrow.csv.CSVWriter}


def _write(to: Path, tables: Iterator[pa.Table], dataset: Dataset | None) -> None:
    """Write tables in the format of the suffix of `to`, which they replace once it is complete."""
    if to.suffix.lower() == SUFFIX:
        if dataset is None:
            raise RunError(f"{to} needs the pictures of the run's dataset; say with --data where it is now")
        return write_folder(to, tables, dataset)
    first = next(tables)
    with written_aside(to) as file, _WRITERS[to.suffix.lower()](file, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def check_target(to: Path, suffixes: Collection[str] = (*_WRITERS, SUFFIX), *, overwrite: bool) -> None:
    """Raise ConfigError if `to` is unusable: another suffix than these, no folder, a run's own, existing file."""
    if to.suffix.lower() not in suffixes:
        raise ConfigError(f"{to} does not end in {' or '.join(suffixes)}; choose another name")
    if not to.absolute().parent.is_dir():
        raise ConfigError(f"{to}: directory {to.absolute().parent} does not exist; create it first")
    if to.is_dir():
        raise ConfigError(f"{to} is a directory; choose another name")
    if to.exists() and not overwrite:
        raise ConfigError(f"{to} exists; choose another name, or replace it with --overwrite")
    refuse_in_run(place_of(to), is_file=True)


def export_rows(
    inspection: Inspection,
    to: Path,
    on_progress: OnDone = silent,
    confirmation: Confirmation | None = None,
    by_features: ByFeatures | None = None,
    more: pa.Table | None = None,
) -> None:
    """Write one row per sample, ordered by id, as Parquet, CSV or a folder for FiftyOne by the suffix of `to`.

    Columns: sample_id, int64; those of the samples table, if the dataset could be opened; every field of the state,
    float32; visits and last_step, uint32; kind, kind_from, dataset_fingerprint, text. The file replaces `to` once it is
    complete and synced; on failure nothing is left behind. confirmation: kinds decided by a forward pass, and the
    column margin, float32, null elsewhere. by_features: kinds, and columns SIDE/tau_solved, float32, null where a
    sample has no features, 0 where no temperature is low enough, infinite where none is high enough. more: a row of
    other columns for each sample. Calls on_progress with the rows written. Raises RunError if the run has no snapshot
    yet, DamagedChunkError, SnapshotNotFoundError if the run deletes the snapshot meanwhile, DatasetError, OSError.
    """

    def tables() -> Iterator[pa.Table]:
        """Yield all rows of the export, block by block; metadata names snapshot and dataset."""
        reader, dataset, rules = inspection.state, inspection.dataset, KindRules.of(inspection)
        snapshot, fingerprint = reader.snapshot, reader.dataset_fingerprint
        facts = {"snapshot": snapshot.id, "tag": snapshot.tag, "step": str(snapshot.step)}
        metadata = {f"thermopile.{name}": fact for name, fact in facts.items()} | {FINGERPRINT: fingerprint}
        names, samples = sample_columns(inspection), None
        for block, rows in read_blocks(reader, inspection.columns):
            columns: dict[str, Any] = {SAMPLE_ID: np.arange(block.start, block.stop, dtype=np.int64)}
            if dataset:
                # Every block but the last is as long as the first, so pieces of the table line up with blocks.
                samples = samples or dataset.tables(names, len(block))
                table = next(samples)
                columns |= {name: table[name] for name in names}
            columns |= rows
            if by_features:
                solved = by_features.solved
                for side, of_side in solved.sides.items():
                    tau = _placed(block, solved.sample_ids, of_side.tau, np.full(len(block), np.nan, np.float32))
                    columns[f"{side}/{TAU_SOLVED}"] = pa.array(tau, from_pandas=True)
            columns |= _kind_columns(block, rules.kinds(rows, block), confirmation, by_features)
            if more:
                columns |= {name: more[name].slice(block.start, len(block)) for name in more.column_names}
            columns[FINGERPRINT_COLUMN] = pa.repeat(fingerprint, len(block))
            yield pa.table(columns, metadata=metadata)
            on_progress(block.stop, reader.samples)

    _write(to, tables(), inspection.dataset)


def export_solved(found: SolvedTemperatures, dataset: Dataset, to: Path) -> None:
    """Write the samples whose temperatures were solved, with their columns of the samples table and SIDE/tau_solved.

    In the format of the suffix of `to`, which is replaced once the file is complete. Raises DatasetError, OSError.
    """
    table = dataset.take(found.sample_ids, [name for name in dataset.schema.names if name != PLACE_IN_SHARD])
    table = table.add_column(0, SAMPLE_ID, pa.array(found.sample_ids))
    for side, solved in found.sides.items():
        table = table.append_column(f"{side}/{TAU_SOLVED}", pa.array(solved.tau))
    table = of_dataset(table, {FINGERPRINT: dataset.index.fingerprint})
    _write(to, iter([table]), dataset)


def of_dataset(table: pa.Table, metadata: Mapping[str, str]) -> pa.Table:
    """Return a table of ids with this metadata, of which the dataset's fingerprint becomes a column too."""
    column = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int8), [metadata[FINGERPRINT]])
    return table.append_column(FINGERPRINT_COLUMN, column).replace_schema_metadata(metadata)


def sample_columns(inspection: Inspection) -> list[str]:
    """Return the samples table's columns to export: all but the row in the shard; none without a dataset."""
    if inspection.reader is None or inspection.dataset is None:
        return []
    own = {PLACE_IN_SHARD, SAMPLE_ID, KIND, KIND_FROM, MARGIN, *OF_MISFITS, FINGERPRINT_COLUMN, *inspection.columns}
    return [name for name in inspection.dataset.schema.names if name not in own]


def _placed(block: range, ids: Int64s, values: AnyArray, others: AnyArray) -> AnyArray:
    """Return values of samples, ids ascending, at their places in a block; of its others, those given, [m]."""
    here = slice(*np.searchsorted(ids, (block.start, block.stop)))
    others[ids[here] - block.start] = values[here]
    return others


def _kind_columns(
    block: range, kinds: Codes, confirmation: Confirmation | None, by_features: ByFeatures | None
) -> dict[str, pa.Array]:
    """Return the columns of a block's kinds, int8 [m] by the state alone, of which level decided them, and margins."""
    levels, margins = np.zeros(len(block), np.int8), dict[str, pa.Array]()
    if by_features:
        found = by_features.kinds
        decided = np.isin(found.codes, BY_FEATURES)
        ids, codes = found.sample_ids[decided], found.codes[decided]
        kinds, levels = _placed(block, ids, codes, kinds), _placed(block, ids, np.full_like(codes, 2), levels)
    if confirmation:
        ids, codes = confirmation.sample_ids, confirmation.kinds
        kinds, levels = _placed(block, ids, codes, kinds), _placed(block, ids, np.ones_like(codes), levels)
        margin = _placed(block, ids, confirmation.margin, np.full(len(block), np.nan, np.float32))
        margins[MARGIN] = pa.array(margin, from_pandas=True)
    names = {KIND: pa.array(KIND_NAMES).take(pa.array(kinds)), KIND_FROM: pa.array(LEVELS).take(pa.array(levels))}
    return names | margins


def tagged_ids(file: Path, dataset: Dataset) -> dict[str, Int64s]:
    """Return the ids tagged KEEP and DROP in the samples.json of a FiftyOneDataset that FiftyOne exported.

    Raises ConfigError if it is another file, or has another dataset's samples.
    """
    found, known = {KEEP: list[int](), DROP: list[int]()}, {dataset.index.fingerprint, *dataset.index.predecessors}
    try:
        for sample in parse(read_regular(file, 1 << 30))["samples"]:
            sample_id, tags = sample["sample_id"], {*sample["tags"]}
            if sample[FINGERPRINT_COLUMN] not in known or sample_id not in range(dataset.n):
                raise ConfigError(f"--tags {file} has sample {sample_id!r:.40} of another dataset than {dataset.place}")
            for tag in found.keys() & tags:
                found[tag].append(sample_id)
    except (OSError, DamagedJSONError) as error:
        raise ConfigError(f"--tags {file} cannot be read: {one_line(error)}") from error
    except (LookupError, TypeError) as error:
        raise ConfigError(f"--tags {file} is not the samples.json of a FiftyOneDataset; export one") from error
    return {tag: np.array(ids, np.int64) for tag, ids in found.items()}
