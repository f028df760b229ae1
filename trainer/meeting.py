"""The ranks of a run find each other: connections to rank 0, their places, and the network between them."""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import token_bytes, token_hex
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from .errors import RanksLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEETING_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits at each step of the start for others, which a wrong option may have ended already."""
CONNECT_SECONDS, RETRY_SECONDS = 5.0, 0.2
"""How long a rank tries one port of rank 0, which may be that of a rank 0 that died, and then waits."""

BOOT = Path("/proc/sys/kernel/random/boot_id")
SECRET = "THERMOPILE_SECRET"
"""Environment variable: a secret from the launcher, which strangers that can read its store do not know."""
_ANNOUNCED, _TOWARDS = "thermopile", "thermopile/towards"
"""Keys of the launcher's store: rank 0's address, port and secret; an address of a rank on another machine."""


class RankProcess(NamedTuple):
    """What a rank tells the others of itself."""

    host: str
    process: int
    cores: list[int]
    """The process's affinity mask."""
    address: str
    """Address of this machine on the way to MASTER_ADDR, of the loopback if that names this machine."""
    machine: str
    """Its boot: two machines may have one name, and the containers of one machine several."""

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}"


Meeting = tuple[str, list[RankProcess], dict[int, Connection]]
"""A name that only the ranks know; the ranks; connections by rank: from rank 0 to all others, or to rank 0."""


def meet(public: Store, rank: int, size: int) -> Meeting:
    """Return once all ranks have come and proved that they know the secret. Called by all ranks.

    Rank 0 listens until then only, and where the others are. No other rank listens.

    public: a store that all ranks reach. That of torchrun outlives its ranks, so it may have the port of a rank 0 that
    died before a restart: the others try until the process at a port knows the announced secret, and takes them.
    Raises RanksLostError after MEETING_TIMEOUT.
    """
    host, cores = os.environ["MASTER_ADDR"], sorted(os.sched_getaffinity(0))
    own = RankProcess(socket.gethostname(), os.getpid(), cores, _address_towards(host), BOOT.read_text())
    end = time.monotonic() + MEETING_TIMEOUT.total_seconds()
    return _join_rank_0(public, host, rank, own, end) if rank else _gather(public, host, size, own, end)


def _gather(public: Store, host: str, size: int, own: RankProcess, end: float) -> Meeting:
    address, secret, name = own.address, token_hex(16), token_hex(16)
    found, connections = {0: own}, dict[int, Connection]()

    def admit(stranger: socket.socket) -> None:
        with suppress(OSError, EOFError):
            connection = _introduced(stranger, secret, b"0", b"1")
            rank, member = json.loads(connection.recv_bytes())
            connections[rank], found[rank] = connection, RankProcess(*member)

    with suppress(RuntimeError):  # the launcher's store is gone, or nobody has come to it
        if _is_loopback(address) and int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size:  # its name for itself
            address = _address_towards(public.get(_TOWARDS).decode())
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as door:
            door.settimeout(RETRY_SECONDS)
            public.set(_ANNOUNCED, f"{address} {door.getsockname()[1]} {secret}")
            while len(found) < size and time.monotonic() < end:
                with suppress(TimeoutError):  # in threads: a stranger who says nothing keeps nobody waiting
                    Thread(target=admit, args=(door.accept()[0],), daemon=True).start()
        public.delete_key(_ANNOUNCED)
    if missing := [str(each) for each in range(size) if each not in found]:
        raise RanksLostError(
            f"rank 0 could not join all {size} ranks: {', '.join(missing)} not there. Check the messages of the "
            f"others, and whether they can reach {host}"
        )
    members = [found[each] for each in range(size)]
    for connection in connections.values():
        with suppress(OSError):  # that rank has ended
            connection.send_bytes(json.dumps([name, members]).encode())
    return name, members, connections


def _join_rank_0(public: Store, host: str, rank: int, own: RankProcess, end: float) -> Meeting:
    address, port, reason = host, "?", "it has not come"
    while (left := end - time.monotonic()) > 0:
        try:
            if not _is_loopback(own.address):
                public.set(_TOWARDS, own.address)
            address, port, secret = public.get(_ANNOUNCED).decode().split()
            stranger = socket.create_connection((address, int(port)), CONNECT_SECONDS)
            connection = _introduced(stranger, secret, b"1", b"0")
            connection.send_bytes(json.dumps([rank, own]).encode())
            reason = "other ranks are not there"
            if connection.poll(left):
                name, members = json.loads(connection.recv_bytes())
                return name, [RankProcess(*each) for each in members], {0: connection}
        except (RuntimeError, OSError, EOFError) as error:
            reason = str(error).partition("\n")[0] or "it has ended"
        time.sleep(RETRY_SECONDS)
    raise RanksLostError(
        f"rank {rank} cannot reach rank 0 at {address}:{port}: {reason}. Check rank 0's messages, "
        "that MASTER_ADDR is its machine, and that no firewall closes ports between the machines"
    )


def _introduced(stranger: socket.socket, secret: str, own: bytes, other: bytes) -> Connection:
    """Return the connection once both ends have proved that they know the secret, and THERMOPILE_SECRET if it is set.

    own, other: tell the ends apart, so that neither can be sent its own proof. Raises OSError.
    """
    key = hmac.digest(os.environ.get(SECRET, "").encode(), secret.encode(), "sha256")
    with stranger:
        stranger.settimeout(CONNECT_SECONDS)
        stranger.sendall(mine := token_bytes(32))
        theirs = stranger.recv(32)
        stranger.sendall(hmac.digest(key, own + theirs + mine, "sha256"))
        if not hmac.compare_digest(stranger.recv(32), hmac.digest(key, other + mine + theirs, "sha256")):
            raise ConnectionError(f"another process answers, or one with another {SECRET}")
        stranger.settimeout(None)
        connection = Connection(stranger.detach())
    os.register_at_fork(after_in_child=connection.close)  # it is open until this process ends, not its children
    return connection


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def choose_interface(rank: int, members: list[RankProcess]) -> None:
    """Let gloo use the interface that leads to other machines; it would use the one with the machine's own name.

    That name's address is often one of the loopback. Without other machines, gloo chooses.
    """
    address, others = members[rank].address, [each.address for each in members if not _is_loopback(each.address)]
    if others and _is_loopback(address):  # MASTER_ADDR names this machine
        address = _address_towards(others[0])
    if others and (interface := _interface_with(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to a host, "127.0.0.1" if it has none; sends nothing."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
