"""The ranks of a run find each other: a store in rank 0's process, their places, and the network between them."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Self

from .errors import RanksLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

MEETING_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits at each step of the start for others, which a wrong option may have ended already."""
CONNECT_TIMEOUT = timedelta(seconds=5)
"""How long a rank tries one address of rank 0, which may be that of a rank 0 that died."""
RETRY_SECONDS = 0.2

_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""


class Member(NamedTuple):
    """What the ranks tell each other of themselves."""

    host: str
    process: int
    address: str
    """IPv4 address of this machine on the way to MASTER_ADDR; that of the loopback if it is the same machine."""
    cores: list[int]
    """The process's affinity mask."""

    @classmethod
    def own(cls) -> Self:
        address = _address_towards(os.environ["MASTER_ADDR"])
        return cls(socket.gethostname(), os.getpid(), address, sorted(os.sched_getaffinity(0)))

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}"


def meet(public: Store, rank: int, size: int) -> tuple[TCPStore, list[Member]]:
    """Return a store that rank 0's process holds, and all ranks, once all have come. Called by all ranks.

    public: a store that all ranks reach. That of torchrun outlives its ranks, so it may have the address of a rank 0
    that died before a restart: the others try again until the store at an address is the announced one, in which no
    process has their place.
    Raises RanksLostError, with the ranks that are missing, after MEETING_TIMEOUT.
    """
    store, keys = _store_of_rank_0(public, rank, json.dumps(Member.own())), [f"member/{each}" for each in range(size)]
    try:
        store.wait(keys, MEETING_TIMEOUT)
        return store, [Member(*json.loads(store.get(key))) for key in keys]
    except RuntimeError as error:
        missing = [0]
        with suppress(RuntimeError):  # rank 0 is gone, and its store
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise RanksLostError(
            f"rank {rank} could not join all {size} ranks: {', '.join(map(str, missing))} not there. Check the "
            f"messages of the others, and whether they can reach {os.environ['MASTER_ADDR']}:{store.port}"
        ) from error


def _store_of_rank_0(public: Store, rank: int, own: str) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    host, place, key = os.environ["MASTER_ADDR"], f"member/{rank}", "thermopile"
    at = host
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, timeout=MEETING_TIMEOUT, wait_for_workers=False)
        name = secrets.token_hex(8)
        store.set(name, "")
        store.set(place, own)
        public.set(key, f"{store.port} {name}")
        return store
    deadline = time.monotonic() + MEETING_TIMEOUT.total_seconds()
    while True:
        try:
            port, name = public.get(key).decode().split()
            at = f"{host}:{port}"
            with socket.create_connection((host, int(port)), CONNECT_TIMEOUT.total_seconds()):  # TCPStore would insist
                pass
            store = TCPStore(host, int(port), is_master=False, timeout=CONNECT_TIMEOUT, wait_for_workers=False)
            if store.check([name]) and store.compare_set(place, "", own).decode() == own:
                return store
            reason = "another process answers"
        except (RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
        if time.monotonic() > deadline:
            raise RanksLostError(
                f"rank {rank} cannot reach rank 0 at {at}: {reason}. Check rank 0's messages, that "
                "MASTER_ADDR is its machine, and that no firewall closes ports between the machines"
            )
        time.sleep(RETRY_SECONDS)


def choose_interface(rank: int, members: list[Member]) -> str:
    """Let gloo use the interface that leads to other machines' ranks, and describe it; without such, gloo chooses.

    gloo would use the address of the machine's own name, which often is one of the loopback.
    """
    address = members[rank].address
    abroad = [member.address for member in members if not member.address.startswith("127.")]
    if abroad and address.startswith("127."):  # MASTER_ADDR names this machine
        address = _address_towards(abroad[0])
    if (found := _interface_with(address)) and abroad:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    return f"{address} on {os.environ.get('GLOO_SOCKET_IFNAME', 'an interface of its own choice')}"


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to a host, "127.0.0.1" if it has none; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 1))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _interface_with(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
