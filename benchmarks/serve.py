"""`thermopile inspect --serve` on a run of many samples, made for the purpose: its answers' times and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from .harness import Figure, Measured, Part, counted, isolated, script
from .inspect_report import make_run


@dataclass(frozen=True)
class Sizes:
    """A run on pairs with six fields a row, and its dataset."""

    rows: int = 10**7
    """Rounded up to whole shards."""
    rounds: int = 5


class Served(NamedTuple):
    """A server that runs, and when it was started."""

    connection: HTTPConnection
    token: str
    pid: int
    started: float

    def answer(self, place: str, **given: object) -> tuple[bytes, float]:
        """Return an answer and the seconds that it took."""
        began = time.perf_counter()
        self.connection.request("GET", f"{self.token}{place}?{urlencode(given)}")
        reply = self.connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{place}: {reply.status} {body[:200]!r}")
        return body, time.perf_counter() - began

    def peak_megabytes(self) -> float:
        """Return the most memory that the server had, pages of mapped files included."""
        words = Path(f"/proc/{self.pid}/status").read_text().split()
        return int(words[words.index("VmHWM:") + 1]) * 1024 / 1e6


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Make the run and its index, then start the server again and ask it questions."""
    samples, _ = isolated(make_run, sizes.rows, directory)
    with _served(directory / "run") as server:
        index_seconds, making = time.perf_counter() - server.started, server.peak_megabytes()
    index = directory / "run" / "report" / "index"
    with _served(directory / "run") as server:
        server.answer("samples")
        first = time.perf_counter() - server.started
        about = json.loads(server.answer("about")[0])
        slowest: dict[str, float] = {}
        for number in counted("rounds", sizes.rounds):
            for name, place, given in _questions(server, about, number):
                slowest[name] = max(slowest.get(name, 0.0), server.answer(place, **given)[1])
        peak = server.peak_megabytes()
    worst = max(slowest, key=lambda name: slowest[name])
    return Measured(
        f"the page of {samples:,} pairs of six fields, served; the slowest answer of {sizes.rounds} rounds",
        "",
        [
            Figure("first_seconds", "first answer, from the start of the process", "s", first, at_most=5),
            Figure("slowest_ms", f"slowest later answer ({worst})", "ms", 1000 * slowest[worst], at_most=300),
            *(Figure(f"ms_{'_'.join(name.replace(',', '').split())}", name, "ms", 1000 * seconds)
              for name, seconds in slowest.items()),
            Figure("peak_mb", "peak memory, mapped pages included", "MB", peak, at_most=1500),
            Figure("index_seconds", "making the index, once", "s", index_seconds),
            Figure("index_peak_mb", "peak memory while making it", "MB", making),
            Figure("index_mb", "the index on disk", "MB", sum(f.stat().st_size for f in index.rglob("*.*")) / 1e6),
        ],
    )  # fmt: skip


def _questions(server: Served, about: dict[str, Any], number: int) -> list[tuple[str, str, dict[str, object]]]:
    """Return (name, place, query) of what a reader asks for, with other words, classes and samples in each round."""
    classes, samples = about["classes"], about["samples"]
    id = (number + 1) * 104_729 % samples
    *_, word = json.loads(server.answer(f"sample/{id}")[0])["caption"].split()
    by_class = {"group": classes[number % len(classes)]} if classes else {}
    return [
        ("coldest", "samples", {}),
        ("hottest, far back", "samples", {"sort": "hottest", "start": samples // 2 + number}),
        ("a word", "samples", {"words": word}),
        ("a kind", "samples", {"kind": "rare", "sort": "hottest", "side": "text"}),
        ("a class, by log s", "samples", {"sort": "misfits", **by_class}),
        ("a range of tau, by id", "samples", {"low": 0.02 + number / 1000, "high": 0.2, "sort": "id"}),
        ("a sample with its history", f"sample/{id}", {}),
        ("a picture", f"picture/{id}", {}),
    ]


@contextmanager
def _served(run: Path) -> Iterator[Served]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "thermopile.tools.cli", "inspect", str(run), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().strip())
            connection = HTTPConnection(address.hostname or "", address.port, timeout=600)
            yield Served(connection, address.path, process.pid, started)
        finally:
            process.terminate()


PARTS = {"page": Part(measure, Sizes(), Sizes(rows=2000, rounds=2))}

if __name__ == "__main__":
    script(__doc__, PARTS, "zarr")()
