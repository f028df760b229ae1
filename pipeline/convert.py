"""A source of samples → a dataset directory, in parallel over shards that know nothing of each other.

The source's listing is permuted (seeded) before it is cut into shards, since data comes sorted by class and blocks
of state are ranges of ids. What is written depends on the source, the seed and the settings, never on the workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from .dataset import (
    ERRORS_FILE,
    FORMAT,
    INDEX_FILE,
    SHARD_FOLDER,
    TOKENIZER_FILE,
    DatasetIndex,
    ImagePolicy,
    TokenizerInfo,
    fingerprint,
    read_index,
    shard_name,
)
from .errors import BadSampleError, DatasetError, DatasetExistsError, SourceError
from .sources import Sample, Source
from .tokenizer import END_ID, encode, load_tokenizer, train_tokenizer

MAX_SHARD_ROWS = 131_072
MIN_SHARD_ROWS = 4_096
"""Every FFCV file is padded to whole pages: tiny shards would be mostly padding."""
WANTED_SHARDS = 64
"""Enough to keep many processes busy to the end, few enough to open at once."""

TABLE_SCHEMA = pa.schema([
    ("row", pa.int64()), ("key", pa.string()), ("uri", pa.string()), ("caption", pa.string()),
    ("group", pa.string()), ("width", pa.int32()), ("height", pa.int32()),
])  # fmt: skip


class ConvertSettings(BaseModel, frozen=True, extra="forbid"):
    """What a conversion may be told."""

    seed: int = Field(default=0, ge=0)
    """Permutes the source's listing."""
    image: ImagePolicy = ImagePolicy()
    vocab_size: int = Field(default=1024, ge=300)
    """Size of the tokenizer trained on the captions: 256 bytes, 3 special tokens, the rest merges."""
    context_length: int = Field(default=32, ge=4)
    """Tokens per caption."""


class BadSample(NamedTuple):
    """A line of errors.jsonl."""

    uri: str
    key: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """What a conversion did."""

    path: Path
    samples: int
    shards: int
    left_out: int
    seconds: float


class _ShardResult(NamedTuple):
    rows: int
    digest: str
    bad: list[BadSample]


def convert(
    source: Source,
    out: Path,
    settings: ConvertSettings,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    tokenizer_from: Path | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Summary:
    """Write the dataset directory `out`; it appears whole, or not at all.

    tokenizer_from: use the tokenizer of this dataset instead of training one, as a test set must.
    on_progress is told the number of samples done so far, a few times a second.
    Raises DatasetExistsError as refuse_existing does, and SourceError where no sample is usable.
    """
    started = time.monotonic()
    with _built_aside(out, overwrite) as building:
        (building / SHARD_FOLDER).mkdir()
        tokenizer = _prepare_tokenizer(source, building, settings, tokenizer_from)
        listing = np.random.default_rng(settings.seed).permutation(len(source))
        rows = _shard_rows(len(source))
        parts = [listing[start : start + rows] for start in range(0, len(source), rows)]
        results = _run(source, parts, building, settings, workers or os.cpu_count() or 1, on_progress)
        bad = [sample for result in results for sample in result.bad]
        results = _close_ranks(building, results)
        if not results:
            first = f"{bad[0].uri}: {bad[0].reason}"
            raise SourceError(f"none of the {len(source):,} samples is usable; the first: {first}")
        _write_lines(building / ERRORS_FILE, [sample._asdict() for sample in bad])
        _write_index(building, source, settings, tokenizer, results)
    return Summary(out, sum(result.rows for result in results), len(results), len(bad), time.monotonic() - started)


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise DatasetExistsError where `out` is there; with overwrite, only where it is something else than a dataset."""
    if out.exists() and not overwrite:
        raise DatasetExistsError(f"{out} exists; choose another directory, or replace it with --overwrite")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        try:
            read_index(out)
        except DatasetError as error:
            message = f"{out} is not replaced, --overwrite replaces only datasets: {error}"
            raise DatasetExistsError(message) from error


@contextmanager
def _built_aside(out: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary directory beside `out` that takes its place at the end, and is removed where anything fails."""
    refuse_existing(out, overwrite)
    building, replaced = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.replaced")
    for left_by_a_kill in (building, replaced):
        shutil.rmtree(left_by_a_kill, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        if out.exists():
            out.rename(replaced)
        building.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _prepare_tokenizer(
    source: Source, building: Path, settings: ConvertSettings, given: Path | None
) -> Tokenizer | None:
    if source.mode != "pairs":
        return None
    path = building / TOKENIZER_FILE
    if given is not None:
        shutil.copyfile(given, path)
    else:
        train_tokenizer(source.captions(), vocab_size=settings.vocab_size).save(str(path))
    return load_tokenizer(path, context_length=settings.context_length)


def _shard_rows(samples: int) -> int:
    return min(MAX_SHARD_ROWS, max(MIN_SHARD_ROWS, -(-samples // WANTED_SHARDS)))


def _run(
    source: Source,
    parts: list[NDArray[np.int64]],
    building: Path,
    settings: ConvertSettings,
    workers: int,
    on_progress: Callable[[int], None],
) -> list[_ShardResult]:
    """Convert every shard in a pool of processes. A worker that raises or dies ends this call with its cause."""
    # Spawned, not forked: torch and numba, which FFCV imports, keep threads that do not survive a fork.
    context = get_context("spawn")
    done, stop = context.Value("Q", 0), context.Value("b", 0, lock=False)
    arguments = (source, building, settings, done, stop)
    pool = ProcessPoolExecutor(min(workers, len(parts)), context, _start_worker, arguments)
    try:
        with _interrupts_ignored():
            futures = [pool.submit(_convert_shard, shard, part) for shard, part in enumerate(parts)]
        waiting: set[Future[_ShardResult]] = set(futures)
        while waiting:
            finished, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in finished:
                future.result()
            on_progress(done.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise DatasetError("a conversion process ended without a word, as when memory runs out; "
                           "try again with fewer --workers") from None  # fmt: skip
    finally:
        stop.value = 1
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started meanwhile never see Ctrl-C, which a terminal sends them too; `stop` tells them to end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Worker(NamedTuple):
    source: Source
    building: Path
    settings: ConvertSettings
    tokenizer: Tokenizer | None
    done: Any
    """Counts samples, over all workers."""
    stop: Any
    """Set where the conversion has failed, or was interrupted."""


_worker: _Worker


def _start_worker(source: Source, building: Path, settings: ConvertSettings, done: Any, stop: Any) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    path = building / TOKENIZER_FILE
    tokenizer = load_tokenizer(path, context_length=settings.context_length) if path.exists() else None
    _worker = _Worker(source, building, settings, tokenizer, done, stop)


def _end_with_parent() -> None:
    """A parent that is killed tells nobody; its workers would wait for work for ever."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _convert_shard(shard: int, source_indices: NDArray[np.int64]) -> _ShardResult:
    """Write one shard: the usable samples in the order given, and the list of the others."""
    from .beton import BetonRow, write_beton
    from .images import to_stored

    table: list[dict[str, Any]] = []
    bad: list[BadSample] = []

    def rows() -> Iterator[BetonRow]:
        for source_index in source_indices.tolist():
            if _worker.stop.value:
                raise InterruptedError("the conversion was stopped")
            try:
                sample = _worker.source[source_index]
                image = to_stored(sample.picture, _worker.settings.image)
            except BadSampleError as error:
                source = _worker.source
                bad.append(BadSample(source.uri(source_index), source.key(source_index), str(error)))
                continue
            finally:
                with _worker.done.get_lock():
                    _worker.done.value += 1
            table.append(_table_row(len(table), sample, image.width, image.height))
            tokens = encode(_worker.tokenizer, [sample.caption or ""])[0] if _worker.tokenizer else None
            yield BetonRow(image.jpeg, image.height, image.width, tokens, source_index)

    folder = _worker.building / SHARD_FOLDER
    beton, parquet = folder / shard_name(shard, "beton"), folder / shard_name(shard, "parquet")
    context_length = _worker.settings.context_length if _worker.tokenizer else None
    written = write_beton(beton, rows(), most_rows=len(source_indices), context_length=context_length)
    pq.write_table(pa.Table.from_pylist(table, schema=TABLE_SCHEMA), parquet)
    return _ShardResult(written, _digest_and_sync(beton, parquet), bad)


def _table_row(row: int, sample: Sample, width: int, height: int) -> dict[str, Any]:
    return {"row": row, "key": sample.key, "uri": sample.uri, "caption": sample.caption,
            "group": sample.group, "width": width, "height": height}  # fmt: skip


def _digest_and_sync(*files: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            os.fsync(file.fileno())
    return digest.hexdigest()


def _close_ranks(building: Path, results: list[_ShardResult]) -> list[_ShardResult]:
    """Drop shards without a single usable sample and number the others densely."""
    kept = 0
    for shard, result in enumerate(results):
        for suffix in ("beton", "parquet"):
            file = building / SHARD_FOLDER / shard_name(shard, suffix)
            if result.rows == 0:
                file.unlink()
            else:
                file.rename(building / SHARD_FOLDER / shard_name(kept, suffix))
        kept += result.rows > 0
    return [result for result in results if result.rows]


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


def _write_index(
    building: Path, source: Source, settings: ConvertSettings, tokenizer: Tokenizer | None, results: list[_ShardResult]
) -> None:
    first_id = np.concatenate([[0], np.cumsum([result.rows for result in results])])
    tokens = tokenizer and TokenizerInfo(
        vocab_size=tokenizer.get_vocab_size(), context_length=settings.context_length, end_id=END_ID
    )
    index: dict[str, Any] = {
        "format": FORMAT,
        "n": int(first_id[-1]),
        "mode": source.mode,
        "first_id": first_id.tolist(),
        "image": settings.image.model_dump(),
        "tokenizer": tokens.model_dump() if tokens else None,
        "source": source.describe() | {"samples": len(source), "permutation_seed": settings.seed},
        "shard_digests": [result.digest for result in results],
    }
    index["fingerprint"] = fingerprint(index)
    DatasetIndex.model_validate(index)
    with (building / INDEX_FILE).open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
