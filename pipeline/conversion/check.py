"""Check a dataset by reading all of it: the index, every byte of every shard, every picture, every caption."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from ...storage.arrays import Int64s, Records
from ...storage.files import sha256_of
from ...storage.place import AnyPlace, Place
from ..cores import cores
from ..dataset.index import INDEX_FILE, SHARD_FOLDER, TOKENIZER_FILE, ShardSuffix, TokenizerInfo
from ..dataset.samples_table import CAPTIONS, PLACE_IN_SHARD, SamplesTable
from ..dataset.shard import Shard
from ..dataset.tokenizer import encode, end_id_of, load_tokenizer, vocab_size_of
from ..errors import DatasetError
from ..opening import Dataset
from .images import decodes

ROWS_AT_ONCE = 256


class Finding(NamedTuple):
    kind: str
    """digest, file, table, source index, picture, tokens or tokenizer."""
    where: str
    """The file, and the row if the problem is in a row."""
    what: str


class _Opened(NamedTuple):
    dataset: Dataset
    first_id: int
    name: str
    shard: Shard
    records: Records
    """RECORD of every row."""
    captions: list[list[str]] | None
    """The captions of every row; None if the table is unusable."""
    tokenizer: Tokenizer | None


def check_dataset(
    place: Place,
    *,
    tars: AnyPlace | None = None,
    workers: int | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Finding]:
    """Yield every problem of the dataset at `place` as it is found; none if it is sound.

    Compares dataset.json with its checksum, files with their sha256, rows with their checksums, tables with the rows,
    pictures with their height and width, and tokens with all captions encoded again; no source index may occur twice.
    tars: as for Dataset. `workers` threads decode. Calls on_progress with the number of rows checked so far.
    Raises DatasetError if dataset.json is unusable or a shard's file is missing.
    """
    dataset = Dataset(place, tars)
    tokenizer, findings = _open_tokenizer(dataset)
    yield from findings
    seen = np.zeros(0, np.int64)
    with ThreadPoolExecutor(workers or cores()) as threads:
        for number in range(dataset.shards):
            with dataset.files.whole_shard(number):
                name = dataset.index.shard_name(number, "beton")
                yield from _check_digests(dataset, number)
                try:
                    shard = dataset.shard(number)
                    records = shard.records()
                except (DatasetError, OSError) as error:
                    yield Finding("file", name, str(error))
                    continue
                captions, findings = _check_table(dataset, number, records)
                yield from findings
                if int(dataset.first_id[number]) in dataset.index.predecessors.values():
                    seen = seen[:0]  # appended samples come from another listing
                yield from _check_source_index(name, records["source_index"], seen)
                seen = np.concatenate([seen, records["source_index"]])
                first_id = int(dataset.first_id[number])
                opened = _Opened(dataset, first_id, name, shard, records, captions, tokenizer)
                batches = [range(len(records))[at : at + ROWS_AT_ONCE] for at in range(0, len(records), ROWS_AT_ONCE)]
                for rows, findings in zip(batches, threads.map(partial(_check_rows, opened), batches), strict=True):
                    yield from findings
                    on_progress(first_id + rows.stop)


def _open_tokenizer(dataset: Dataset) -> tuple[Tokenizer | None, list[Finding]]:
    if (info := dataset.index.tokenizer) is None:
        return None, []
    try:
        tokenizer = load_tokenizer(dataset.tokenizer_path, context_length=info.context_length)
    except DatasetError as error:
        return None, [Finding("tokenizer", TOKENIZER_FILE, str(error))]
    has, told = (vocab_size_of(tokenizer), end_id_of(tokenizer)), (info.vocab_size, info.end_id)
    if has != told:
        what = f"its vocabulary and closing token are {has}, but {INDEX_FILE} says {told}"
        return None, [Finding("tokenizer", TOKENIZER_FILE, what)]
    return tokenizer, []


def _check_digests(dataset: Dataset, number: int) -> Iterator[Finding]:
    for suffix, digest in dataset.index.shard_digests[number].items():
        name = dataset.index.shard_name(number, cast(ShardSuffix, suffix))
        try:
            if sha256_of(dataset.path / SHARD_FOLDER / name) != digest:
                yield Finding("digest", name, "the bytes differ from those written (sha256)")
        except OSError as error:
            yield Finding("file", name, str(error))


def _check_table(dataset: Dataset, number: int, records: Records) -> tuple[list[list[str]] | None, list[Finding]]:
    """Return a shard's captions, and the mismatches between its samples table and its rows."""
    name = dataset.index.shard_name(number, "parquet")
    expected = {PLACE_IN_SHARD: np.arange(len(records)), "width": records["width"], "height": records["height"]}
    # Open it without digests, which were checked already, to find the table's other problems too.
    digests: tuple[dict[str, str], ...] = tuple({} for _ in dataset.index.shard_digests)
    try:
        index = dataset.index.model_copy(update={"shard_digests": digests})
        table = SamplesTable(dataset.place, index, dataset.files).table_of(number, [*expected, CAPTIONS])
    except (DatasetError, OSError) as error:
        return None, [Finding("table", name, str(error))]
    wrong = [column for column, values in expected.items() if not np.array_equal(table[column], values)]
    findings = [Finding("table", name, f"its column {column!r} does not match the rows") for column in wrong]
    captions = [[text or "" for text in found or [""]] for found in table[CAPTIONS].to_pylist()]
    if dataset.index.tokenizer and not np.array_equal([len(found) for found in captions], records["captions"]):
        return None, [*findings, Finding("table", name, f"its column {CAPTIONS!r} does not match the rows")]
    return captions, findings


def _check_source_index(name: str, source_index: Int64s, seen: Int64s) -> Iterator[Finding]:
    indices, rows = np.unique(source_index, return_index=True)
    if len(indices) < len(source_index):
        yield Finding("source index", name, f"{len(source_index) - len(indices):,} rows repeat another row's index")
    for row in rows[np.isin(indices, seen)].tolist():
        yield Finding("source index", f"{name}, row {row:,}", f"{source_index[row]:,} also occurs in an earlier shard")


def _check_rows(opened: _Opened, rows: range) -> list[Finding]:
    with ExitStack() as held:
        with suppress(DatasetError):  # a damaged record, which is found below
            held.enter_context(opened.dataset.files.hold(opened.first_id + np.array(rows)))
        wrong = [(row, "picture", reason) for row in rows if (reason := _wrong_with_picture(opened, row))]
    if (info := opened.dataset.index.tokenizer) is not None:
        wrong += [(row, "tokens", reason) for row, reason in _wrong_with_tokens(opened, info, rows)]
    return [Finding(kind, f"{opened.name}, row {row:,}", reason) for row, kind, reason in sorted(wrong)]


def _wrong_with_picture(opened: _Opened, row: int) -> str:
    height, width = (int(opened.records[name][row]) for name in ("height", "width"))
    try:
        jpeg = opened.dataset.jpeg(opened.first_id + row)
    except DatasetError as error:
        return str(error)
    return "" if decodes(jpeg, height, width) else "it cannot be decoded completely"


def _wrong_with_tokens(opened: _Opened, info: TokenizerInfo, rows: range) -> Iterator[tuple[int, str]]:
    of_row = [np.empty((0, info.context_length), np.int32)]
    captions: list[tuple[int, int]] = []  # row and number of each caption
    for row in rows:
        try:
            of_row.append(opened.shard.tokens_of(row))
            captions += ((row, number) for number in range(len(of_row[-1])))
        except DatasetError as error:
            yield row, str(error)
    tokens = np.concatenate(of_row)
    unclosed = ~(tokens == info.end_id).any(axis=1)
    others = np.zeros(len(captions), bool)
    if opened.tokenizer is not None and opened.captions is not None and captions:
        texts = [opened.captions[row][number] for row, number in captions]
        others = (encode(opened.tokenizer, texts).tokens != tokens).any(axis=1)
    for reason, bad in (
        (f"the closing token {info.end_id} is missing", unclosed),
        ("the tokens do not match the caption", others & ~unclosed),
    ):
        for place in np.flatnonzero(bad).tolist():
            row, number = captions[place]
            yield row, f"{reason} (caption {number + 1})" if number else reason
