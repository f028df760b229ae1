"""The ranks of a run find each other: a store in rank 0's process, their places, and the network between them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

from .errors import RanksLostError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

MEETING_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits at each step of the start for others, which a wrong option may have ended already."""
CONNECT_TIMEOUT, RETRY_SECONDS = timedelta(seconds=5), 0.2
"""How long a rank tries one port of rank 0, which may be that of a rank 0 that died, and then waits."""

BOOT = Path("/proc/sys/kernel/random/boot_id")
_ANNOUNCED = "thermopile"
_ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""


class Member(NamedTuple):
    """What a rank tells the others of itself."""

    host: str
    process: int
    cores: list[int]
    """The process's affinity mask."""
    address: str
    """IPv4 address of this machine on the way to MASTER_ADDR, of the loopback if that names this machine."""
    port: int
    """Accepts connections in silence until the process ends."""
    machine: str
    """Its boot: two machines may have one name, and the containers of one machine several."""

    def __str__(self) -> str:
        return f"{self.host}, process {self.process}"


def meet(public: Store, rank: int, size: int) -> tuple[TCPStore, list[Member]]:
    """Return a store that rank 0's process holds, and all ranks, once all have come. Called by all ranks.

    public: a store that all ranks reach. That of torchrun outlives its ranks, so it may have the port of a rank 0 that
    died before a restart: the others try until the store at a port is the announced one, and free for them.
    Raises RanksLostError after MEETING_TIMEOUT.
    """
    host, keys = os.environ["MASTER_ADDR"], [f"member/{each}" for each in range(size)]
    silent = socket.create_server(("", 0))
    cores, address, port = sorted(os.sched_getaffinity(0)), _address_towards(host), silent.getsockname()[1]
    os.register_at_fork(after_in_child=silent.close)  # it is open until this process ends, not its children
    own = Member(socket.gethostname(), os.getpid(), cores, address, port, BOOT.read_text())
    store = _store_of_rank_0(public, host, rank, json.dumps(own)) if rank else _new_store(public, host, json.dumps(own))
    try:
        store.wait(keys, MEETING_TIMEOUT)
        return store, [Member(*json.loads(store.get(key))) for key in keys]
    except RuntimeError as error:
        missing = [0]
        with suppress(RuntimeError):  # rank 0 is gone, and its store
            missing = [each for each, key in enumerate(keys) if not store.check([key])]
        raise RanksLostError(
            f"rank {rank} could not join all {size} ranks: {', '.join(map(str, missing))} not there. Check the "
            f"messages of the others, and whether they can reach {host}:{store.port}"
        ) from error


def _new_store(public: Store, host: str, own: str) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    store, name = TCPStore(host, 0, is_master=True, timeout=MEETING_TIMEOUT, wait_for_workers=False), token_hex(8)
    store.set(name, "")
    store.set("member/0", own)
    public.set(_ANNOUNCED, f"{store.port} {name}")
    return store


def _store_of_rank_0(public: Store, host: str, rank: int, own: str) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    end, port, reason = time.monotonic() + MEETING_TIMEOUT.total_seconds(), "?", "it has not come"
    while time.monotonic() < end:
        try:
            port, name = public.get(_ANNOUNCED).decode().split()
            store = TCPStore(host, int(port), is_master=False, timeout=CONNECT_TIMEOUT, wait_for_workers=False)
            if store.check([name]) and store.compare_set(f"member/{rank}", "", own).decode() == own:
                return store
            reason = "another process answers"
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
        time.sleep(RETRY_SECONDS)
    raise RanksLostError(
        f"rank {rank} cannot reach rank 0 at {host}:{port}: {reason}. Check rank 0's messages, "
        "that MASTER_ADDR is its machine, and that no firewall closes ports between the machines"
    )


def connected_to(member: Member) -> socket.socket:
    """Return a connection from rank 0's machine to another rank's process, which may still be made, or fail."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex((member.address, member.port))
    return connection


def is_reset(connection: socket.socket) -> bool:
    """Return whether the process at the other end has ended since the last call."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


def choose_interface(rank: int, members: list[Member]) -> None:
    """Let gloo use the interface that leads to other machines; it would use the one with the machine's own name.

    That name's address is often one of the loopback. Without other machines, gloo chooses.
    """
    address, others = members[rank].address, [each.address for each in members if not each.address.startswith("127.")]
    if others and address.startswith("127."):  # MASTER_ADDR names this machine
        address = _address_towards(others[0])
    if others and (interface := _interface_with(address)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


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
