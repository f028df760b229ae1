"""WebDataset tars in a bucket, behind a gateway that counts (object_server.py): conversion, reading, memory.

\b
bytes       bytes and requests of a conversion, by parts, on Ray, with splits, in place
forms       an epoch without steps: a converted dataset in the bucket, an index on disk, the webdataset library
steps       the same with steps of 50 ms, which only sleep
small       `forms` with blocks of 256 rows, smaller than the windows in which a conversion mixes samples
neighbours  how many pairs of a batch come from the same tar, at the size of CC12M; nothing is read
memory      a generated tar of 10⁷ samples is read, and 10⁷ checksums are counted
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from thermopile.pipeline.conversion.content import content_of
from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.cores import cores
from thermopile.pipeline.loading.ffcv_loader import FFCVLoader
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.pipeline.sources import Piece
from thermopile.pipeline.sources import webdataset as webdataset_source
from thermopile.pipeline.sources.shards import MAX_SHARD_ROWS
from thermopile.pipeline.sources.source_file import AHEAD_BYTES, Version
from thermopile.pipeline.sources.webdataset import TarWork, WebDatasetSource
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.storage.bucket import Address
from thermopile.storage.local import LocalPath
from thermopile.storage.place import Place, place_of
from thermopile.trainer.config import DataConfig
from thermopile.trainer.run.build import windows_from
from thermopile.trainer.run.dataset_cache import DatasetCache
from thermopile.trainer.world import ALONE

from .convert import write_tars
from .harness import Figure, Measured, Part, counted, isolated, memory_in_use, peak_memory, script
from .inspect_report import thermopile
from .object_server import SIGNED, Server, object_server, uploaded

MIB = 1 << 20
LEFT_OUT = "webdataset is left out: pip install webdataset"
SHUFFLE_BUFFER = 2_048


@dataclass(frozen=True)
class Conversions:
    """Photographs of 400 × 300 pixels, about 30 KB each, in tars in a bucket."""

    images: int = 20_000
    tars: int = 32
    parts: int = 16


def conversions(sizes: Conversions, directory: Path) -> Measured:
    """Convert the tars in every way, and count what is fetched; the datasets go to the disk."""
    tars = write_tars(directory / "tars", sizes.images, sizes.tars)
    total, out, figures = sum(tar.stat().st_size for tar in tars), directory / "out", list[Figure]()
    with object_server() as server:
        root = uploaded(directory / "tars", Address("bucket", "tars"))
        convert_to = ("convert", "webdataset", str(root))
        with server.gateway() as gateway:
            for way, (words, reads, parts) in _ways(sizes.parts).items():
                before, place = gateway.stats(), out / way
                commands = [[*convert_to, place, *words, *more] for more in _of_parts(parts)]
                with ThreadPoolExecutor(parts) as threads:
                    list(threads.map(lambda command: thermopile(*command), commands))
                if parts > 1:
                    thermopile(*convert_to, place, "--finish")
                fetched, asked = (gateway.stats()[name] - before[name] for name in ("bytes", "requests"))
                processes = parts + (parts > 1)
                figures += [
                    Figure(f"{way}_bytes", f"{way}: bytes fetched / the tars'", "", fetched / total,
                           at_most=1.05 * reads - 0.05 * (reads - 1) + 64 * MIB / total),
                    Figure(f"{way}_requests", f"{way}: requests", "", asked,
                           at_most=fetched / (4 * MIB) + 3 * sizes.tars + processes),
                ]  # fmt: skip
    return Measured(
        f"{sizes.images:,} photographs in {sizes.tars} tars of {total / 1e6:,.0f} MB together, to a disk", "", figures,
        notes=["Asked: (reads + 0.05) × the tars + 64 MiB, of which the sample is; bytes / 4 MiB + 3 a tar + 1 a "
               "process that was started, in requests."],
    )  # fmt: skip


def _ways(parts: int) -> dict[str, tuple[list[str], int, int]]:
    """Words of the command, how often it may read the tars, and the parts that are started at once."""
    ways: dict[str, tuple[list[str], int, int]] = {
        "alone": ([], 1, 1),
        "few_parts": ([], 1, max(2, parts // 4)),
        "parts": ([], 1, parts),
        "in_place": (["--in-place"], 1, 1),
        "longtail": (["--longtail", "10"], 2, 1),
        "holdout": (["--holdout", "0.1"], 3, 1),
    }
    return ways | ({"ray": (["--on", "ray"], 1, 1)} if importlib.util.find_spec("ray") else {})


def _of_parts(parts: int) -> list[list[str]]:
    if parts == 1:
        return [[]]
    return [["--part", f"{part}/{parts}", "--workers", "1"] for part in range(1, parts + 1)]


@dataclass(frozen=True)
class Forms:
    """Pairs of noise, which hardly compresses, in tars as img2dataset writes them: .jpg, .txt and .json."""

    tars: int = 16
    tar_rows: int = 4_096
    edge: int = 72
    """Pixels of a picture's side."""
    block_rows: int = 4_096
    window_blocks: int = 2
    canonical_shards: int = 1
    batch: int = 128
    step_ms: int = 0
    rounds: int = 3
    latency: float = 0.02
    bytes_per_second: float = 125e6

    @property
    def samples(self) -> int:
        return self.tars * self.tar_rows

    @property
    def order(self) -> Order:
        return Order.create(
            self.samples, self.batch, canonical_shards=self.canonical_shards, window_blocks=self.window_blocks,
            blocks_per_shard=self.samples // (self.canonical_shards * self.block_rows),
        )  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """What an epoch took."""

    first_batch: float
    """Seconds from opening to the first batch."""
    rate: float
    """Samples a second after it, without the steps' sleep."""
    wait_ms: float
    """Mean wait for a batch after the first tenth of the epoch, in milliseconds."""
    requests: float
    """A sample."""
    bytes: float
    """A sample."""
    cpu_us: float
    """CPU of the reader and its processes, in microseconds a sample."""


def forms(sizes: Forms, directory: Path) -> Measured:
    """Read an epoch of each form, in turns."""
    os.environ["THERMOPILE_CACHE"] = str(directory / "cache")
    total = _noise_tars(directory / "tars", sizes)
    with object_server() as server:
        root = uploaded(directory / "tars", Address("bucket", "tars"))
        for in_place, out in ((False, directory / "converted"), (True, directory / "index")):
            convert(WebDatasetSource([root], in_place=in_place), out, ConvertSettings())
        places = {"converted": uploaded(directory / "converted", Address("bucket", "converted")),
                  "index": place_of(directory / "index")}  # fmt: skip
        index_bytes = sum(path.stat().st_size for path in (directory / "index").rglob("*") if path.is_file())
        _warm_up(directory / "converted", sizes)
        with server.gateway(sizes.latency, sizes.bytes_per_second) as gateway:
            readers: dict[str, Callable[[], Iterator[object]]] = {
                name: partial(_batches, place, sizes) for name, place in places.items()
            }
            if importlib.util.find_spec("webdataset"):
                importlib.import_module("webdataset")  # the first batch waits for no import
                urls = [f"{gateway.url}/bucket/tars/{number:05d}.tar" for number in range(sizes.tars)]
                readers["webdataset"] = partial(_batches_of_webdataset, urls, sizes)
            readings: dict[str, list[Reading]] = {name: [] for name in readers}
            for _ in counted("forms", sizes.rounds):
                for name, reader in readers.items():
                    readings[name].append(_read(reader(), sizes, gateway))
    return Measured(
        f"{sizes.samples:,} pairs in {sizes.tars} tars of {total / 1e6:,.0f} MB together, the index "
        f"{index_bytes / 1e6:.1f} MB on disk; windows of {sizes.window_blocks} of "
        f"{sizes.order.blocks_per_shard} blocks of "
        f"{sizes.block_rows:,} rows in {sizes.canonical_shards} shards; batches of {sizes.batch}, "
        f"steps of {sizes.step_ms} ms; "
        f"{sizes.latency * 1000:.0f} ms a request, {sizes.bytes_per_second / 1e6:.0f} MB/s; medians of {sizes.rounds}",
        f"webdataset by curl, {cores()} workers, shuffle buffers of {SHUFFLE_BUFFER:,}, decoded with Pillow",
        [
            figure
            for form in places
            for figure in _figures_of(form, readings[form], readings.get("webdataset"))
        ],
        notes=[] if "webdataset" in readings else [LEFT_OUT],
    )  # fmt: skip


def _figures_of(form: str, ours: list[Reading], others: list[Reading] | None) -> Iterator[Figure]:
    for name, words, unit in (
        ("rate", "read", "/s"), ("wait_ms", "mean wait for a batch", "ms"), ("requests", "requests a sample", ""),
        ("bytes", "bytes a sample", "B"), ("first_batch", "first batch", "s"), ("cpu_us", "CPU a sample", "µs"),
    ):  # fmt: skip
        one, other = (
            median(getattr(reading, name) for reading in found) if found else None for found in (ours, others)
        )
        assert one is not None
        yield Figure(f"{form}_{name}", f"{form}: {words}", unit, one, other, more_is_better=name == "rate")


def _noise_tars(folder: Path, sizes: Forms) -> int:
    """Write the tars, all of the same samples under other keys; return their bytes."""
    folder.mkdir()
    random, pictures, total = np.random.default_rng(0), list[bytes](), 0
    for _ in range(sizes.tar_rows):
        file = io.BytesIO()
        pixels = random.integers(0, 256, (sizes.edge, sizes.edge, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        pictures.append(file.getvalue())
    for number in range(sizes.tars):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for place, picture in enumerate(pictures):
                key, about = f"{number:05d}{place:06d}", b'{"url": "%s"}' % (b"x" * 400)
                for suffix, data in (("jpg", picture), ("txt", b"noise %d of %d" % (place, number)), ("json", about)):
                    member = tarfile.TarInfo(f"{key}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        total += (folder / f"{number:05d}.tar").stat().st_size
    return total


def _warm_up(path: Path, sizes: Forms) -> None:
    """Compile what is compiled once on a machine."""
    with _loader(Dataset(path), sizes) as loader:
        next(loader.epoch(0))


def _loader(dataset: Dataset, sizes: Forms) -> FFCVLoader:
    return FFCVLoader(dataset, sizes.order, recipe=RECIPES["clip"], image_size=32, views=1)


def _batches(place: Place, sizes: Forms) -> Iterator[object]:
    dataset, order = Dataset(place), sizes.order
    cache = DatasetCache.of(DataConfig(cache=1 << 40), dataset, ALONE)
    assert cache is not None
    limit = cache.needed(order) * 3 // 2  # a third to read ahead into, as in `Order.for_memory`
    with _loader(dataset, sizes) as loader, dataset.files.expect(windows_from(0, order, 1), order, limit):
        for step, batch in enumerate(loader.epoch(0), start=1):
            dataset.files.finished(step)
            yield batch


def _batches_of_webdataset(urls: list[str], sizes: Forms) -> Iterator[object]:
    import webdataset

    pairs = webdataset.WebDataset([f"pipe:curl -sf -H '{SIGNED}' {url}" for url in urls], shardshuffle=len(urls))
    batches = pairs.shuffle(SHUFFLE_BUFFER).decode("pil").to_tuple("jpg", "txt").batched(sizes.batch)
    yield from webdataset.WebLoader(batches, num_workers=cores(), batch_size=None)


def _read(batches: Iterator[object], sizes: Forms, gateway: Server) -> Reading:
    before, waits, cpu = gateway.stats(), list[float](), sum(os.times()[:4])
    while True:
        asked = time.perf_counter()
        if next(batches, None) is None:
            break
        waits.append(time.perf_counter() - asked)
        time.sleep(sizes.step_ms / 1000)
    seconds, read = sum(waits[1:]), sizes.batch * (len(waits) - 1)
    requests, fetched = (gateway.stats()[name] - before[name] for name in ("requests", "bytes"))
    later, cpu_us = waits[len(waits) // 10 :], 1e6 * (sum(os.times()[:4]) - cpu) / sizes.samples
    return Reading(waits[0], read / seconds, 1000 * sum(later) / len(later), requests / sizes.samples,
                   fetched / sizes.samples, cpu_us)  # fmt: skip


@dataclass(frozen=True)
class Neighbours:
    """The size of CC12M."""

    tars: int = 1_242
    tar_rows: int = 9_662
    batch: int = 1_024
    batches: int = 100
    cache_percent: int = 25


def neighbours(sizes: Neighbours, directory: Path) -> Measured:
    """Draw batches as ids, and as a shuffle buffer draws them."""
    samples = sizes.tars * sizes.tar_rows
    order = Order.for_memory(samples * sizes.cache_percent // 100, samples, sizes.batch)
    steps = np.linspace(0, order.steps_per_epoch - 1, sizes.batches).astype(int).tolist()
    ours = [_same_tar(order.batch_ids(0, step) // sizes.tar_rows) for step in steps]
    full, buffered = (sizes.tar_rows - 1) / (samples - 1), None
    if importlib.util.find_spec("webdataset"):
        buffered = float(np.mean([*map(_same_tar, _buffered(sizes))]))
    return Measured(
        f"{sizes.tars:,} tars of {sizes.tar_rows:,} samples, {sizes.batches} batches of {sizes.batch:,}; windows of "
        f"{order.window_blocks} of {order.blocks_per_shard} blocks of {order.block_rows:,} rows in "
        f"{order.canonical_shards} shards, for a cache of {sizes.cache_percent} % of the samples",
        f"webdataset's shuffle buffer of {SHUFFLE_BUFFER:,} over shuffled tars, batches made by a worker",
        [
            Figure("same_tar_percent", "pairs of a batch from one tar", "%", 100 * float(np.mean(ours)),
                   None if buffered is None else 100 * buffered),
            Figure("over_full_shuffle", "the same / that of a full shuffle", "", float(np.mean(ours)) / full,
                   None if buffered is None else buffered / full),
        ],
        notes=[] if buffered is not None else [LEFT_OUT],
    )  # fmt: skip


def _same_tar(tars: NDArray[np.int64]) -> float:
    """Return the share of pairs whose tars are the same; tars: int64 [batch]."""
    _, counts = np.unique(tars, return_counts=True)
    return float((counts * (counts - 1)).sum() / (len(tars) * (len(tars) - 1)))


def _buffered(sizes: Neighbours) -> Iterator[NDArray[np.int64]]:
    """Yield the tars of each batch's samples, int64 [batch]."""
    from webdataset.filters import shuffle

    tars = np.random.default_rng(0).permutation(sizes.tars).tolist()
    samples = (tar for tar in tars for _ in range(sizes.tar_rows))
    shuffled = shuffle(SHUFFLE_BUFFER, initial=SHUFFLE_BUFFER, seed=0)(samples)
    for _ in range(sizes.batches):
        yield np.array([*islice(shuffled, sizes.batch)])


@dataclass(frozen=True)
class Memory:
    """A tar of pictures alone."""

    samples: int = 10_000_000


def memory(sizes: Memory, directory: Path) -> Measured:
    """Read a tenth of the samples, all of them, and count as many checksums, each in a process of its own."""
    few, many = (isolated(_peak_of_reading, directory, samples) for samples in (sizes.samples // 10, sizes.samples))
    files = _row_records(directory, sizes.samples)
    counting = isolated(_growth_of_counting, files, sizes.samples)
    return Measured(
        f"a tar of {sizes.samples:,} samples of 1 KiB, made as it is read, and the .rows files of as many",
        "a tenth of the samples",
        [
            Figure("reading_mb", "most memory of reading", "MB", many / 1e6, few / 1e6),
            Figure("grown_mb", "of that, more than a tenth takes", "MB", max(0, many - few) / 1e6, at_most=8),
            Figure("counting", "memory of counting, a sample", "B", counting / sizes.samples, at_most=16),
        ],
    )


class GeneratedTar:
    """The file of a tar of equal pictures under two names in turn; what WebDatasetSource uses of SourceFile."""

    _samples = b""

    def __init__(self, place: Place, version: Version) -> None:
        self.place, self.size = place, version[0]
        if not self._samples:
            headers = [tarfile.TarInfo(f"{name}.jpg") for name in "ab"]
            for header in headers:
                header.size = 300
            two = b"".join(header.tobuf(tarfile.USTAR_FORMAT) + bytes(tarfile.BLOCKSIZE) for header in headers)
            type(self)._samples = two * (2 + AHEAD_BYTES // len(two))

    def read_piece(self, at: int, count: int) -> bytes:
        """Return `count` bytes from `at`, of which the last two blocks of the file are its end."""
        place, end = at % (4 * tarfile.BLOCKSIZE), self.size - 2 * tarfile.BLOCKSIZE
        held = self._samples[place : place + max(0, min(count, end - at))]
        return held + bytes(max(0, min(at + count, self.size) - at - len(held)))


def _peak_of_reading(directory: Path, samples: int) -> int:
    tar = directory / f"{samples}.tar"
    tar.touch()
    os.truncate(tar, 2 * tarfile.BLOCKSIZE * (samples + 1))  # of this size, but without a byte on the disk
    source = WebDatasetSource([tar])
    source.mode = "images"
    work = TarWork(0, [Piece(0, 0, tar.stat().st_size, 0)], 0)
    with patch.object(webdataset_source, "SourceFile", GeneratedTar):
        found = sum(read.sample is not None for read in source.read(work))
    assert found == samples, found
    return peak_memory()


def _row_records(directory: Path, samples: int) -> list[LocalPath]:
    """Write .rows files of random numbers."""
    random, files = np.random.default_rng(0), list[LocalPath]()
    for first in range(0, samples, MAX_SHARD_ROWS):
        path = directory / f"{first}.rows"
        path.write_bytes(random.bytes(64 * (1 + min(MAX_SHARD_ROWS, samples - first))))
        files.append(LocalPath(path))
    return files


def _growth_of_counting(files: list[LocalPath], samples: int) -> int:
    before = memory_in_use()
    content_of(files, samples, pairs=True, blank=0)
    return peak_memory() - before


_SMALL_BLOCKS = Forms(tars=4, block_rows=256, window_blocks=4, canonical_shards=8, rounds=1)
_FEW = Forms(tars=2, tar_rows=128, edge=32, block_rows=64, batch=16, rounds=1)

PARTS = {
    "bytes": Part(conversions, Conversions(), Conversions(images=64, tars=4, parts=2)),
    "forms": Part(forms, Forms(), _FEW),
    "steps": Part(forms, Forms(step_ms=50, rounds=1), replace(_FEW, step_ms=1)),
    "small": Part(
        forms, Forms(block_rows=256, window_blocks=4, canonical_shards=8, rounds=1), replace(_FEW, block_rows=32)
    ),
    "neighbours": Part(neighbours, Neighbours(), Neighbours(tars=20, tar_rows=1_000, batch=64, batches=4)),
    "memory": Part(memory, Memory(), Memory(10_000)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "obstore", "moto", "ffcv", "webdataset")()
