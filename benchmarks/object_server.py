"""An S3 server for tests: moto's, as a process of its own, and a gateway before it that is slow, fails or goes away.

with object_server() as server, server.gateway(latency=0.02, bytes_per_second=200e6, failing=0.05) as gateway:
    ...  # AWS_ENDPOINT_URL leads to the gateway; gateway.stop() and gateway.start() are an outage
    gateway.cut_off("^PUT .*/latest", seconds=10)  # an outage that begins in this request, which arrives at its end
"""

import argparse
import asyncio
import importlib.util
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode, urlsplit

if TYPE_CHECKING:
    from thermopile.storage.bucket import Address

PIECE = 1 << 16
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "of-tests", "AWS_SECRET_ACCESS_KEY": "secret-of-tests", "AWS_REGION": "us-east-1"}
SIGNED = "Authorization: AWS4-HMAC-SHA256 Credential=of-tests/20260101/us-east-1/s3/aws4_request"
"""The header of a request by other clients than ours: the server checks no signature."""


class Server:
    """The address of a server that speaks S3, and the process behind it."""

    def __init__(self, command: list[str], port: int) -> None:
        self.url, self._command, self._port = f"http://127.0.0.1:{port}", command, port
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(self._command)} does not answer")
            time.sleep(0.02)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def cut_off(self, request: str, seconds: float, skip: int = 0) -> None:
        """Let a gateway fail all requests for so long, from the next one that matches.

        request: expression for its first line and the beginning of its body. It arrives at the server when the outage
        ends, and nobody gets the answer. skip: such requests to let pass before.
        """
        query = urlencode({"request": request, "seconds": seconds, "skip": skip})
        urllib.request.urlopen(f"{self.url}/-/cut?{query}").close()

    def stats(self) -> dict[str, int]:
        """Return what a gateway counted: requests, those that it failed, outages, bytes sent."""
        with urllib.request.urlopen(f"{self.url}/-/stats") as answer:
            stats: dict[str, int] = json.load(answer)
            return stats

    @contextmanager
    def gateway(self, latency: float = 0, bytes_per_second: float = 0, failing: float = 0) -> Iterator["Server"]:
        """Put a gateway before the server, to which AWS_ENDPOINT_URL leads meanwhile."""
        port = free_port()
        given = [str(value) for value in (port, int(self.url.rpartition(":")[2]), latency, bytes_per_second, failing)]
        gateway = Server([sys.executable, str(Path(__file__)), *given], port)
        before = os.environ["AWS_ENDPOINT_URL"]
        try:
            _lead_to(gateway.url)
            yield gateway
        finally:
            _lead_to(before)
            gateway.stop()


@contextmanager
def object_server() -> Iterator[Server]:
    """Start a server with one empty bucket, `bucket`, and lead the environment's credentials and endpoint to it."""
    if importlib.util.find_spec("moto") is None:
        import pytest

        pytest.skip("needs moto's S3 server: pip install 'moto[server]'")
    port = free_port()
    server = Server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    before = dict(os.environ)
    os.environ.update(CREDENTIALS)
    try:
        _lead_to(server.url)
        server_made_bucket(server.url, "bucket")
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        _forget_connections()
        server.stop()


def uploaded(folder: Path, to: "Address") -> "Address":
    """Write all files of a folder to objects below an address, which is returned."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            (to / path.relative_to(folder).as_posix()).write(path)
    return to


def server_made_bucket(url: str, name: str) -> None:
    """Make a bucket."""
    request = urllib.request.Request(f"{url}/{name}", method="PUT", headers=dict([SIGNED.split(": ")]))
    urllib.request.urlopen(request).close()


def _lead_to(url: str) -> None:
    os.environ["AWS_ENDPOINT_URL"] = url
    _forget_connections()


def _forget_connections() -> None:
    from thermopile.storage import bucket

    bucket._store.cache_clear()


def free_port() -> int:
    """Return a port below those that systems give to clients.

    Of those, a client that calls a server which is away may be given the server's own: it then calls itself, and the
    server cannot come back.
    """
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class _Gateway:
    """Passes one request a connection on to the server, late and at a limited rate, or fails it."""

    def __init__(self, upstream: int, latency: float, bytes_per_second: float, failing: float) -> None:
        self._upstream, self._latency, self._rate, self._failing = upstream, latency, bytes_per_second, failing
        self._random, self._free_at = random.Random(0), 0.0
        self._stats = {"requests": 0, "failed": 0, "outages": 0, "bytes": 0}
        self._cut: tuple[re.Pattern[bytes], float] | None = None
        self._skip, self._away_until, self._late = 0, 0.0, set[asyncio.Task[None]]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if b" /-/stats " in head:
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + json.dumps(self._stats).encode())
            elif b" /-/cut?" in head:
                asked = parse_qs(urlsplit(head.split()[1].decode()).query)
                self._cut = re.compile(asked["request"][0].encode(), re.DOTALL), float(asked["seconds"][0])
                self._skip = int(asked["skip"][0])
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            elif await self._is_away(head, reader):
                writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            else:
                await self._pass_on(head, reader, writer)
            await writer.drain()
        writer.close()

    async def _is_away(self, head: bytes, reader: asyncio.StreamReader) -> bool:
        """Return whether there is an outage, which this request may begin."""
        now = asyncio.get_running_loop().time()
        if self._cut is None:
            return now < self._away_until
        body = b""
        if length := re.search(rb"\r\n[Cc]ontent-[Ll]ength: *([0-9]+)", head):
            body = await reader.readexactly(int(length[1]))
            reader._buffer[:0] = body  # type: ignore[attr-defined]  # put it back
        request, seconds = self._cut
        if not request.search(head.partition(b"\r\n")[0] + b"\n" + body[:4096]):
            return False
        if self._skip:
            self._skip -= 1
            return False
        self._cut, self._away_until = None, now + seconds
        self._stats["outages"] += 1
        late = asyncio.ensure_future(self._arrive_late(head, body, seconds))
        self._late.add(late)
        late.add_done_callback(self._late.discard)
        return True

    async def _arrive_late(self, head: bytes, body: bytes, seconds: float) -> None:
        await asyncio.sleep(seconds)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        writer.write(re.sub(rb"\r\n[Cc]onnection:[^\r]*", b"", head[:-2]) + b"Connection: close\r\n\r\n" + body)
        await reader.read()
        writer.close()

    async def _pass_on(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._stats["requests"] += 1
        await asyncio.sleep(self._latency)
        failure = (
            self._random.choice(("500", "reset", "cut", "silence")) if self._random.random() < self._failing else ""
        )
        self._stats["failed"] += bool(failure)
        if failure == "reset":
            writer.transport.abort()
            return
        if failure == "500":
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        if failure == "silence":
            await asyncio.sleep(3)
            writer.transport.abort()
            return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        server_writer.write(re.sub(rb"\r\n[Cc]onnection:[^\r]*", b"", head[:-2]) + b"Connection: close\r\n\r\n")
        body = asyncio.ensure_future(self._copy(reader, server_writer))
        try:
            await self._copy(server_reader, writer, cut=failure == "cut", counted=True)
        finally:
            body.cancel()
            server_writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, cut: bool = False, counted: bool = False
    ) -> None:
        while piece := await reader.read(PIECE):
            if counted:
                self._stats["bytes"] += len(piece)
                if cut:  # a body that is slow, and then ends before its end
                    writer.write(piece[: len(piece) // 2])
                    await asyncio.sleep(0.5)
                    writer.transport.abort()
                    return
            writer.write(piece)
            await writer.drain()
            if self._rate:
                now = asyncio.get_running_loop().time()
                self._free_at = max(now, self._free_at) + len(piece) / self._rate
                await asyncio.sleep(self._free_at - now)


async def _serve(port: int, upstream: int, latency: float, bytes_per_second: float, failing: float) -> None:
    gateway = _Gateway(upstream, latency, bytes_per_second, failing)
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, kind in {"port": int, "upstream": int, "latency": float, "rate": float, "failing": float}.items():
        parser.add_argument(name, type=kind)
    asyncio.run(_serve(*vars(parser.parse_args()).values()))
