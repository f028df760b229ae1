"""Train on selected or weighted samples, or without some: from the user's Parquet files to the run's own copy."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...pipeline.dataset.index import FINGERPRINT, FINGERPRINT_COLUMN
from ...pipeline.opening import Dataset
from ...storage.arrays import Float64s, Int64s
from ...storage.files import open_regular, sha256_of
from ...storage.place import Place
from ...storage.selection import IDS, WEIGHTS, WITHOUT, Selection, SelectionError, SelectionWriter
from ..config import DataConfig
from ..errors import ConfigError, one_line

SELECTING = ("select", "weights", "without")
"""Settings of `data`, and command-line options, that name a file."""
SAMPLE_ID, WEIGHT = "sample_id", "weight"
NAMES = ("key", "uri")
"""Columns of the samples table that name a sample in other datasets too, unless they are numbers."""

ROWS_AT_ONCE = 1 << 18
MAX_UNSORTED = 1 << 26
"""Rows sorted in memory, in about a gigabyte. A longer file must be in the order of its ids."""

_log = logging.getLogger(__name__)
_PINNED = re.compile(r"(?P<path>.+)@[0-9]+-[0-9a-f]{64}", re.DOTALL)

Rows = tuple[Int64s, Float64s]
"""Ascending ids [m], and their weights [m], which are read only on request."""


def pinned(file: str, option: str) -> str:
    """Return FILE as FILE@ROWS-SHA256, which reveals another file; unchanged if pinned already.

    option: one of SELECTING, for messages. Raises ConfigError if the file cannot be read or lacks a column.
    """
    if not file or _PINNED.fullmatch(file):
        return file
    with _opened(Path(file), option) as parquet:
        rows = parquet.metadata.num_rows
    return f"{file}@{rows}-{sha256_of(Path(file))}"


def selects(data: DataConfig) -> bool:
    """Return whether a run has its own copy of a selection, weights or holes."""
    return any(getattr(data, option) for option in SELECTING)


def rows_of(pinned: str) -> int:
    """Return the number of rows of a pinned file."""
    return int(pinned.rpartition("@")[2].partition("-")[0])


def as_recorded_file(asked: str, recorded: str) -> str:
    """Return the recorded, pinned file if the asked file has its path and is gone: the run has its own copy."""
    parts = _PINNED.fullmatch(recorded)
    return recorded if parts is not None and asked == parts["path"] and not Path(asked).exists() else asked


def selected_ids(file: Path, dataset: Dataset, option: str = "select") -> Int64s:
    """Return the ids of a dataset's samples in a file, ascending. Raises ConfigError for bad ids, DatasetError."""
    return np.concatenate([ids for ids, _ in _sorted(file, option, dataset)])


def holes_in(file: Path, ids: Int64s | None, dataset: Dataset) -> Int64s:
    """Return the positions of a file's samples, ascending, but for those that are not selected anyway.

    ids: the selected ones; None: all. Raises ConfigError for bad ids, and if none or all are named.
    """
    holes = selected_ids(file, dataset, "without")
    if ids is not None:
        places = np.searchsorted(ids, holes)
        holes = places[ids[np.minimum(places, len(ids) - 1)] == holes]
    if not 0 < len(holes) < (dataset.n if ids is None else len(ids)):
        named = "every sample" if len(holes) else "no sample"
        raise ConfigError(f"--without {file} names {named} that is trained on; choose other samples")
    return holes


def write_selection(
    data: DataConfig, dataset: Dataset, folder: Place, of: tuple[DataConfig, Selection, Int64s] | None = None
) -> None:
    """Write a new run's own copy of its selection, weights and holes. data: with pinned files.

    of: settings and own copy of the run that it is a fork of, whose files may be gone, and all holes of the fork.
    Raises ConfigError for bad ids or weights, and for a file that has changed since it was pinned; OSError.
    """
    with SelectionWriter(folder, dataset.n) as writer:
        ids: Int64s | None = None
        if of is not None and of[1].ids is not None:
            ids = writer.add(IDS, [of[1].ids])
        elif data.select:
            ids = writer.add(IDS, (ids for ids, _ in _sorted(unchanged(data.select, "select"), "select", dataset)))
        if of is not None and of[1].weights is not None and data.weights == of[0].weights:
            writer.add(WEIGHTS, [of[1].weights])
        elif data.weights:
            file, kept = unchanged(data.weights, "weights"), dataset.n if ids is None else len(ids)
            # In two passes, so that memory does not grow with the samples.
            total, ends = 0.0, np.zeros(0)
            for piece in _weights(file, ids, dataset):
                total += float(piece.sum())
                ends = np.append(ends, piece)
                ends = np.array([ends.max(), ends[ends < ends.max()].max(initial=0)])  # the two largest, distinct
            if not 0 < (mean := total / kept) < np.inf:
                raise ConfigError(
                    f"--weights {file}: the weights of the run's samples add up to {total:g}; their mean "
                    "must be positive and finite"
                )
            if ends[1] and not np.float32(ends[1] / mean):
                raise ConfigError(
                    f"--weights {file}: the largest weight, {ends[0]:g}, is so large that in float32 all others "
                    f"become 0, the next of which is {ends[1]:g}; lower the largest"
                )
            writer.add(WEIGHTS, (piece / mean for piece in _weights(file, ids, dataset)))
        if data.without:
            writer.add(WITHOUT, [of[2] if of else holes_in(unchanged(data.without, "without"), ids, dataset)])
        writer.finish()


def check_own_copy(data: DataConfig, selection: Selection) -> None:
    """Raise SelectionError unless a run's own copy is complete and made from these files. Reads all of it."""
    about = selection.about
    kept = rows_of(data.select) if data.select else about.samples
    has, asked = (about.ids, about.weights, about.without), (data.select, data.weights, data.without)
    if about.kept != kept or [*map(bool, has)] != [*map(bool, asked)]:
        raise SelectionError(
            f"{selection.folder} is not what config.toml says: a selection of {about.kept:,} samples, in "
            f"{', '.join(about.arrays)}. Restore the run's own"
        )
    selection.verify()


def unchanged(pinned: str, option: str) -> Path:
    """Return the path of a pinned file. Raises ConfigError if it has changed."""
    path, _, pin = pinned.rpartition("@")
    if sha256_of(Path(path)) != (sha256 := pin.partition("-")[2]):
        raise ConfigError(f"--{option} {path} has changed: its sha256 is no longer {sha256}. Pass it again")
    return Path(path)


def _weights(file: Path, ids: Int64s | None, dataset: Dataset) -> Iterator[Float64s]:
    """Yield the weights of the selected ids, or of all samples, in their order. Raises ConfigError if one has none."""
    given = _sorted(file, "weights", dataset)
    samples = dataset.n
    have_ids, have = np.empty(0, np.int64), np.empty(0)
    for start in range(0, samples if ids is None else len(ids), ROWS_AT_ONCE):
        stop = start + ROWS_AT_ONCE
        wanted = np.arange(start, min(stop, samples)) if ids is None else ids[start:stop]
        while not len(have_ids) or have_ids[-1] < wanted[-1]:
            more_ids, more = next(given, (None, None))
            if more_ids is None or more is None:
                break
            have_ids, have = np.concatenate([have_ids, more_ids]), np.concatenate([have, more])
        places = np.minimum(np.searchsorted(have_ids, wanted), len(have_ids) - 1)
        if (lacking := have_ids[places] != wanted).any():
            raise ConfigError(
                f"--weights {file} has no weight for sample {wanted[lacking][0]}; "
                "give every sample of the run one, also those of --without"
            )
        yield have[places]
        left = np.searchsorted(have_ids, wanted[-1], side="right")
        have_ids, have = have_ids[left:], have[left:]
    for _ in given:  # checks the rest
        pass


def _sorted(file: Path, option: str, dataset: Dataset) -> Iterator[Rows]:
    """Yield the rows of a file in the order of their ids, in pieces. Raises ConfigError for bad rows, DatasetError."""
    where, last = f"--{option} {file}", -1
    with _opened(file, option) as parquet:
        columns = [SAMPLE_ID, *NAMES, *([WEIGHT] if option == "weights" else [])]
        columns = [name for name in columns if name in parquet.schema_arrow.names]
        names = [name for name in NAMES if name in columns]
        known = _samples_of_named(parquet, dataset, where)
        rows, samples = parquet.metadata.num_rows, known or dataset.n
        if rows > MAX_UNSORTED:
            batches = parquet.iter_batches(ROWS_AT_ONCE, columns=columns)
            pieces: Iterator[pa.Table] = (pa.Table.from_batches([batch]) for batch in batches)
        else:
            pieces = iter([parquet.read(columns=columns)])
        for piece in pieces:
            texts = _texts(piece, names) if names else None
            # Where all names are numbers, another dataset has the same ones.
            if not (known or (names and pc.all(pc.match_substring_regex(texts, "[^0-9\\x00]")).as_py())):
                _doubt(where, option)
            if SAMPLE_ID not in columns:
                piece = piece.append_column(SAMPLE_ID, _named(texts, names, dataset, samples, where))
                texts = None
            ids, weights = _checked(piece, where, samples)
            if rows <= MAX_UNSORTED and (np.diff(ids) < 0).any():
                order = np.argsort(ids)
                ids, weights = ids[order], weights[order] if len(weights) else weights
                texts = texts.take(order) if texts else None
            steps = np.diff(ids, prepend=last)
            if (steps < 0).any():
                raise ConfigError(
                    f"{where} has {rows:,} rows that are not sorted; above {MAX_UNSORTED:,} "
                    f"rows, write them in the order of {SAMPLE_ID}"
                )
            if (steps == 0).any():
                raise ConfigError(f"{where} has sample {ids[steps == 0][0]} more than once; remove repeated rows")
            last = int(ids[-1]) if len(ids) else last
            for start in range(0, len(ids), ROWS_AT_ONCE):
                here = slice(start, start + ROWS_AT_ONCE)
                if texts:
                    own = _texts(dataset.take(ids[here], names), names)
                    for row in map(int, np.flatnonzero(pc.not_equal(own, texts[here]))):
                        both = " and ".join(names)
                        raise ConfigError(
                            f"{where}: {SAMPLE_ID} and {both} name different samples: {ids[here][row]} is "
                            f"{_shown(own[row])} here, not {_shown(texts[here][row])}. Use a file made for this "
                            f"dataset, or leave {SAMPLE_ID} out to go by {both}"
                        )
                yield ids[here], weights[here]


def _samples_of_named(parquet: pq.ParquetFile, dataset: Dataset, where: str) -> int | None:
    """Return the samples of the dataset that a file names: this one, or one that it grew from; None without a name."""
    schema, index = parquet.schema_arrow, dataset.index
    named = {text for key, text in (schema.metadata or {}).items() if key == FINGERPRINT.encode()}
    if FINGERPRINT_COLUMN in schema.names:
        for batch in parquet.iter_batches(ROWS_AT_ONCE, columns=[FINGERPRINT_COLUMN]):
            table = pa.Table.from_batches([batch])
            named.update(_texts(table, [FINGERPRINT_COLUMN]).unique().to_pylist())
    known = {name.encode(): n for name, n in {**index.predecessors, index.fingerprint: index.n}.items()}
    if len(named) > 1 or not named <= {b"", *known}:
        others = " and ".join(f"{name[:12].decode(errors='replace')}…" for name in sorted(named))
        of = f"another dataset, whose fingerprint is {others}" if len(named) == 1 else f"several datasets, {others}"
        raise ConfigError(
            f"{where} names samples of {of}; this one's is {index.fingerprint[:12]}…. Use a file made for this "
            f"dataset, or one with no other columns than {' and '.join(NAMES)}"
        )
    return next((known.get(name) for name in named), None)


@cache  # warns once, though files are read twice and more
def _doubt(where: str, option: str) -> None:
    """Refuse ids that may be another dataset's where they withdraw samples, and warn of them elsewhere."""
    message = (
        f"{where} does not say which dataset's samples it names. Keep the column {FINGERPRINT_COLUMN}, key or uri of "
        "the file that it is made from (of numbers alone, all), or add the first: the `fingerprint` in dataset.json"
    )
    if option == "without":
        raise ConfigError(message)
    _log.warning("%s. They are taken for this dataset's", message)


def _texts(table: pa.Table, columns: Sequence[str]) -> pa.ChunkedArray:
    """Return the texts of each row as bytes, those of several columns with a NUL between; null is empty."""
    texts = (table[name].cast(pa.large_string()).cast(pa.large_binary()).fill_null(b"") for name in columns)
    return pc.binary_join_element_wise(*texts, pa.scalar(b"\0", pa.large_binary()))


def _named(given: pa.ChunkedArray, names: Sequence[str], dataset: Dataset, samples: int, where: str) -> pa.ChunkedArray:
    """Return the id of each row's sample, the only one among the first `samples` with these texts in these columns."""
    wanted, start = given.unique(), 0
    ids, count = np.zeros((2, len(wanted)), np.int64)
    for table in dataset.tables(names, ROWS_AT_ONCE):
        places = pc.index_in(_texts(table.slice(0, max(0, samples - start)), names), value_set=wanted)
        hit = places.drop_null().to_numpy()
        ids[hit] = start + np.flatnonzero(places.is_valid())
        np.add.at(count, hit, 1)
        start += len(table)
    if len(wrong := np.flatnonzero(count != 1)):
        few = ", ".join(f"{_shown(wanted[int(place)])} ({count[place]} samples)" for place in wrong[:3])
        raise ConfigError(
            f"{where}: {len(wrong):,} rows do not name one sample of {dataset.place} by {' and '.join(names)}: {few}; "
            f"correct or remove them, or give the column {SAMPLE_ID} too"
        )
    return pa.array(ids).take(pc.index_in(given, value_set=wanted))


def _shown(text: pa.Scalar) -> str:
    return repr(text.as_py().replace(b"\0", b", ")[:80].decode(errors="replace"))


def _checked(piece: pa.Table, where: str, samples: int) -> Rows:
    """Return a piece's ids, int64 [m], and weights, float64 [m]. Raises ConfigError for an impossible value."""
    for name, column in zip(piece.column_names, piece.columns, strict=True):
        if column.null_count:
            raise ConfigError(f"{where} has rows without a {name} (null); remove them")
    column = piece[SAMPLE_ID]
    low, high = (value.as_py() for value in pc.min_max(column).values()) if len(column) else (0, 0)
    if low < 0 or high >= samples:
        raise ConfigError(
            f"{where} has sample {low if low < 0 else high:,}, but the dataset has the ids 0 … "
            f"{samples - 1:,}; use ids of this dataset"
        )
    ids: Int64s = column.cast(pa.int64()).to_numpy()
    if WEIGHT not in piece.column_names:
        return ids, np.empty(0)
    weights: Float64s = piece[WEIGHT].cast(pa.float64()).to_numpy()
    if (bad := ~(np.isfinite(weights) & (weights >= 0))).any():
        raise ConfigError(f"{where} has weight {weights[bad][0]:g} for sample {ids[bad][0]}; it must be finite and ≥ 0")
    return ids, weights


@contextmanager
def _opened(path: Path, option: str) -> Iterator[pq.ParquetFile]:
    """Open a file with the option's columns. Raises ConfigError if it is not Parquet or has no rows."""
    try:
        with open_regular(path) as file, pq.ParquetFile(file) as parquet:
            _check_columns(parquet.schema_arrow, path, option)
            if not parquet.metadata.num_rows:
                raise ConfigError(f"--{option} {path} has no rows; leave it out")
            yield parquet
    except pa.ArrowException as error:
        raise ConfigError(f"--{option} {path} is not a Parquet file, or is damaged: {one_line(error)}") from error
    except OSError as error:
        raise ConfigError(f"--{option} {error.filename or path} cannot be read: {error.strerror or error}") from error


def _check_columns(schema: pa.Schema, path: Path, option: str) -> None:
    needed = [*([] if {*NAMES} & {*schema.names} else [SAMPLE_ID]), *([WEIGHT] if option == "weights" else [])]
    known = [name for name in (SAMPLE_ID, *NAMES, FINGERPRINT_COLUMN) if name in schema.names]
    for name in dict.fromkeys([*needed, *known]):
        if schema.names.count(name) > 1:
            raise ConfigError(f"--{option} {path} has {schema.names.count(name)} columns {name!r}; keep one")
        if name not in schema.names:
            raise ConfigError(f"--{option} {path} has no column {name!r}; it has {', '.join(schema.names)}")
        kind = schema.field(name).type
        is_number = pa.types.is_integer(kind) or (name != SAMPLE_ID and pa.types.is_floating(kind))
        lost_zeros = name in NAMES and is_number and SAMPLE_ID not in schema.names
        if lost_zeros or (name in (SAMPLE_ID, WEIGHT) and not is_number):
            must_hold = {WEIGHT: "numbers", SAMPLE_ID: "whole numbers"}.get(name, "text, with its zeros")
            raise ConfigError(f"--{option} {path}: the column {name!r} is {kind}; it must hold {must_hold}")
