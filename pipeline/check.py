"""Is a dataset sound? Everything is read again: the index, every byte of every shard, every picture, every caption."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from ..files import sha256_of
from .beton import Beton
from .cores import cores
from .dataset import INDEX_FILE, SHARD_FOLDER, TOKENIZER_FILE, Dataset, TokenizerInfo, shard_name
from .errors import DatasetError
from .images import decodes
from .tokenizer import encode, end_id_of, load_tokenizer, vocab_size_of

ROWS_AT_ONCE = 256


class Finding(NamedTuple):
    """Something that is wrong with a dataset."""

    kind: str
    """digest, file, table, source index, picture, tokens or tokenizer."""
    where: str
    """The file, with the row where it is about one."""
    what: str


class _Shard(NamedTuple):
    name: str
    beton: Beton
    captions: list[str] | None
    """Of every row; None in a dataset without, and where the table is of another length than the FFCV file."""
    vocabulary: TokenizerInfo | None
    tokenizer: Tokenizer | None


def check_dataset(
    path: Path, *, workers: int | None = None, on_progress: Callable[[int], None] = lambda done: None
) -> Iterator[Finding]:
    """Everything that is wrong with the dataset at `path`, as it is found; nothing where it is sound.

    Compared are dataset.json with its fingerprint, every shard with its sha256, the tables with the FFCV files, every
    picture with its height and width, the tokens with what the tokenizer makes of the captions; no source index may
    come twice. `workers` threads decode. on_progress is told the number of rows checked so far.
    Raises DatasetError where dataset.json cannot be used, or a shard's file is missing.
    """
    dataset = Dataset(path)
    tokenizer, findings = _open_tokenizer(dataset)
    yield from findings
    seen = np.zeros(0, np.int64)
    with ThreadPoolExecutor(workers or cores()) as threads:
        for number in range(dataset.shards):
            try:
                shard, findings = _open(dataset, number, tokenizer)
            except (DatasetError, OSError, pa.ArrowException) as error:
                yield Finding("file", shard_name(number, "beton"), str(error))
                continue
            yield from findings
            yield from _check_source_index(shard, seen)
            seen = np.concatenate([seen, shard.beton.source_index])
            batches = [
                range(len(shard.beton))[at : at + ROWS_AT_ONCE] for at in range(0, len(shard.beton), ROWS_AT_ONCE)
            ]
            for rows, findings in zip(batches, threads.map(partial(_check_rows, shard), batches), strict=True):
                yield from findings
                on_progress(int(dataset.first_id[number]) + rows.stop)


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


def _open(dataset: Dataset, number: int, tokenizer: Tokenizer | None) -> tuple[_Shard, list[Finding]]:
    name = shard_name(number, "beton")
    files = [dataset.path / SHARD_FOLDER / name, dataset.path / SHARD_FOLDER / shard_name(number, "parquet")]
    findings = []
    if sha256_of(*files) != dataset.index.shard_digests[number]:
        findings.append(Finding("digest", name, "these are not the bytes that were written (sha256)"))
    beton, table = dataset.beton(number), pq.read_table(files[1])
    for column, expected in (("row", np.arange(len(beton))), ("width", beton.widths), ("height", beton.heights)):
        if column not in table.column_names or not np.array_equal(table[column], expected):
            findings.append(Finding("table", files[1].name, f"its column {column!r} does not fit the FFCV file"))
    fits = "caption" in table.column_names and len(table) == len(beton)
    captions = [caption or "" for caption in table["caption"].to_pylist()] if fits else None
    return _Shard(name, beton, captions, dataset.index.tokenizer, tokenizer), findings


def _check_source_index(shard: _Shard, seen: NDArray[np.int64]) -> Iterator[Finding]:
    indices, rows = np.unique(shard.beton.source_index, return_index=True)
    if len(indices) < len(shard.beton):
        yield Finding("source index", shard.name, f"{len(shard.beton) - len(indices):,} rows repeat another row's")
    for row in rows[np.isin(indices, seen)].tolist():
        index = shard.beton.source_index[row]
        yield Finding("source index", f"{shard.name}, row {row:,}", f"{index:,} comes in an earlier shard as well")


def _check_rows(shard: _Shard, rows: range) -> list[Finding]:
    wrong = [(row, "picture", reason) for row in rows if (reason := _wrong_with_picture(shard.beton, row))]
    if shard.vocabulary is not None:
        wrong += [(row, "tokens", reason) for row, reason in _wrong_with_tokens(shard, shard.vocabulary, rows)]
    return [Finding(kind, f"{shard.name}, row {row:,}", reason) for row, kind, reason in sorted(wrong)]


def _wrong_with_picture(beton: Beton, row: int) -> str:
    jpeg, width, height = beton.jpeg(row), int(beton.widths[row]), int(beton.heights[row])
    try:
        with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
            size = image.size
    except Exception as error:  # noqa: BLE001 Pillow raises nearly anything on a damaged file
        return f"no JPEG: {type(error).__name__}"
    if size != (width, height):
        return f"{size[0]}×{size[1]} pixels, where {width}×{height} are written down"
    return "" if decodes(jpeg, height, width) else "it cannot be decoded to its end"


def _wrong_with_tokens(shard: _Shard, info: TokenizerInfo, rows: range) -> Iterator[tuple[int, str]]:
    if shard.beton.context_length != info.context_length:
        yield rows.start, f"{shard.beton.context_length} tokens, where {INDEX_FILE} says {info.context_length}"
        return
    tokens = shard.beton.tokens(np.array(rows))
    outside = ((tokens < 0) | (tokens >= info.vocab_size)).any(axis=1)
    unclosed = ~(tokens == info.end_id).any(axis=1)
    others = np.zeros(len(rows), bool)
    if shard.tokenizer is not None and shard.captions is not None:
        others = (encode(shard.tokenizer, shard.captions[rows.start : rows.stop]).tokens != tokens).any(axis=1)
    for reason, bad in (
        (f"a token is not below {info.vocab_size}", outside),
        (f"the closing token {info.end_id} is missing", unclosed),
        ("these are not the caption's", others & ~outside & ~unclosed),
    ):
        yield from ((rows[place], reason) for place in np.flatnonzero(bad).tolist())
