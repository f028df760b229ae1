"""Reading a dataset's bytes from an object store: obstore, which thermopile uses, beside s3fs (`pip install s3fs`).

The server is moto's, on this machine, in a process of its own. Both clients read the same ranges, as many at once.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from thermopile.storage.bucket import Address

from .harness import Figure, Measured, Part, script, take_turns
from .object_server import object_server


@dataclass(frozen=True)
class Sizes:
    """Ranges of objects of 64 MiB."""

    range_bytes: int = 8 << 20
    objects: int = 8
    at_once: int = 8
    rounds: int = 5


OBJECT_BYTES = 64 << 20


def measure(sizes: Sizes, directory: Path) -> Measured:
    """Read every byte of the objects once a round each, in ranges; CPU seconds are this process's."""
    with object_server():
        addresses = [Address("bucket", f"shard-{number}") for number in range(sizes.objects)]
        for address in addresses:
            address.write(os.urandom(OBJECT_BYTES))
        ranges = [(address, at) for at in range(0, OBJECT_BYTES, sizes.range_bytes) for address in addresses]
        cpu: dict[str, list[float]] = {"obstore": [], "s3fs": []}

        def measured(name: str, read: Callable[[], int]) -> Callable[[int], float]:
            def rate(_: int) -> float:
                began, cpu_before = perf_counter(), _cpu_seconds()
                count = read()
                assert count == sizes.objects * OBJECT_BYTES
                cpu[name].append((_cpu_seconds() - cpu_before) / count * 1e9)
                return count / (perf_counter() - began) / 1e6

            return rate

        contenders = {
            "obstore": measured("obstore", lambda: with_obstore(ranges, sizes)),
            "s3fs": measured("s3fs", lambda: asyncio.run(with_s3fs(ranges, sizes))),
        }
        rates = take_turns("ranges", contenders, sizes.rounds)
    return Measured(
        f"{sizes.objects} objects of 64 MiB in ranges of {sizes.range_bytes >> 10:,} KiB, {sizes.at_once} at once",
        "s3fs",
        [
            Figure.of_rounds("rate", "read", "MB/s", rates["obstore"], rates["s3fs"], more_is_better=True),
            Figure("cpu", "CPU of the client", "s/GB", median(cpu["obstore"]), median(cpu["s3fs"])),
        ],
    )  # fmt: skip


def with_obstore(ranges: list[tuple[Address, int]], sizes: Sizes) -> int:
    """Read the ranges as the package does, and return their bytes."""
    with ThreadPoolExecutor(sizes.at_once) as threads:
        return sum(threads.map(lambda place: len(place[0].read_range(place[1], sizes.range_bytes)), ranges))


async def with_s3fs(ranges: list[tuple[Address, int]], sizes: Sizes) -> int:
    """Read the ranges with s3fs's own asynchronous calls, and return their bytes."""
    from s3fs import S3FileSystem

    files: Any = S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"], asynchronous=True, skip_instance_cache=True)
    session, allowed = await files.set_session(), asyncio.Semaphore(sizes.at_once)

    async def read(address: Address, at: int) -> int:
        async with allowed:
            return len(await files._cat_file(str(address), start=at, end=at + sizes.range_bytes))

    try:
        return sum(await asyncio.gather(*(read(*place) for place in ranges)))
    finally:
        await session.close()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


PARTS = {
    "large": Part(measure, Sizes(), Sizes(objects=1, rounds=1)),
    "small": Part(measure, Sizes(range_bytes=256 << 10, objects=2), Sizes(range_bytes=8 << 20, objects=1, rounds=1)),
}

if __name__ == "__main__":
    script(__doc__, PARTS, "obstore", "s3fs")()
