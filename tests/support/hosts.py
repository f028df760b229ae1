"""Hosts of a network on this machine, each with its own interfaces, name, boot_id, /etc/hosts and disk.

A host finds its own name at 127.0.1.1, as Debian installs a machine, and those of the others at their addresses.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from thermopile.benchmarks.object_server import CREDENTIALS

from support.certificates import certified
from support.started import COMMAND_LINE

SERVER = "10.77.0.100"
SWITCH = """
ip link set lo up
ip link add switch type bridge
ip address add $SERVER/24 dev switch
ip link set switch up
"""
HOST = """
hostname $NAME
mount -t tmpfs none "$DISK"
mkdir "$DISK/tmp"
echo "$HOSTS" >"$DISK/hosts"
mount --bind "$DISK/hosts" /etc/hosts
cat /proc/sys/kernel/random/uuid >"$DISK/boot_id"
mount --bind "$DISK/boot_id" /proc/sys/kernel/random/boot_id
ip link set lo up
ip address add $ADDRESS/24 dev eth7
ip link set eth7 up
"""
AMAZON = "s3.us-east-1.amazonaws.com", "bucket.s3.us-east-1.amazonaws.com"
ENTER = """
import ctypes
spaces = [os.open(f"/proc/{keeper}/ns/{{kind}}", os.O_RDONLY) for kind in ("net", "uts", "mnt")]
for space in spaces:
    assert ctypes.CDLL(None).setns(space, 0) == 0
    os.close(space)
"""
MAKE_BUCKET = """
import time
from thermopile.benchmarks.object_server import server_made_bucket
while True:
    try:
        server_made_bucket(os.environ["AWS_ENDPOINT_URL"], "bucket")
        break
    except OSError:
        time.sleep(0.1)
"""
WAIT_FOR_CHECKPOINT = """
import time
from thermopile.trainer.checkpoints.checkpoint_files import latest_checkpoint
from thermopile.trainer.run_directory import RunDirectory
while not latest_checkpoint(RunDirectory(sys.argv[1]).checkpoints):
    time.sleep(0.1)
"""
COMPARE = """
from thermopile.trainer.run_directory import RunDirectory
from support.runs import assert_same_run
assert_same_run(*map(RunDirectory, sys.argv[1:]))
"""


@contextmanager
def namespaces(*kinds):
    """Yield the id of a process with namespaces of its own, which end with it."""
    command = ("unshare", *kinds, "sh", "-c", "echo ready; exec cat")  # cat ends when this process does
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout.readline() == b"ready\n"
        yield keeper.pid


def inside(keeper, *command):
    """Return what runs a command in the namespaces of a process."""
    return ("nsenter", "--target", str(keeper), "--net", "--uts", "--mount", *command)


def run_in(keeper, script, **environment):
    """Run a shell script in the namespaces of a process."""
    subprocess.run(inside(keeper, "sh", "-e", "-c", script), env=os.environ | environment, check=True)


class Host:
    """A machine of a network, and what runs there."""

    def __init__(self, network, name, keeper, start_program):
        self.name, self._network, self._keeper, self._start = name, network, keeper, start_program

    def start(self, *arguments, code=COMMAND_LINE, **environment):
        """Start `thermopile ARGUMENTS`, as `start_program` does, here."""
        local = {"TMPDIR": self._network.disk / "tmp", "THERMOPILE_SCRATCH": self._network.disk / "scratch"}
        return self._start(*arguments, code=ENTER.format(keeper=self._keeper) + code, **local, **environment)

    def inside(self, *command):
        """Return what runs a command here."""
        return inside(self._keeper, *command)

    def kill(self):
        """Kill all processes here at once, as far as one can see from elsewhere."""
        space = os.readlink(f"/proc/{self._keeper}/ns/net")
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is no process of this user's
                if process.name != str(self._keeper) and os.readlink(process / "ns" / "net") == space:
                    os.kill(int(process.name), signal.SIGKILL)

    def path(self, path):
        """Return where others see a path of this host."""
        return Path(f"/proc/{self._keeper}/root{path}")

    def plug(self, state):
        """Pull the cable out of the switch ("down"), or put it back ("up")."""
        self._network.on_switch(f"ip link set to-{self.name} {state}")


class Network:
    """Hosts on a switch, and an object server there."""

    def __init__(self, disk, switch):
        self.disk, self.hosts, self._switch = disk, [], switch
        self.bucket = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://{SERVER}:5000"}
        """Variables that lead a host to the object server."""

    def on_switch(self, script):
        run_in(self._switch, script, SERVER=SERVER)

    def add(self, name, number, names, keeper, start_program):
        self.on_switch(f"ip link add to-{name} type veth peer name eth7 netns {keeper}")
        self.on_switch(f"ip link set to-{name} master switch up")
        others = [f"10.77.0.{place} {each}" for place, each in enumerate(names, start=1) if each != name]
        hosts = "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, " ".join([SERVER, *AMAZON])])
        run_in(keeper, HOST, NAME=name, DISK=str(self.disk), HOSTS=hosts, ADDRESS=f"10.77.0.{number}")
        self.hosts.append(Host(self, name, keeper, start_program))

    @contextmanager
    def object_server(self):
        """Serve an empty bucket, s3://bucket."""
        with self._served(self.bucket["AWS_ENDPOINT_URL"], "-p", "5000"):
            yield self.bucket

    @contextmanager
    def amazon(self, folder):
        """Serve an empty bucket at Amazon's own names; yield variables to reach it by. folder: for certificates."""
        certificate, key, authority = certified(folder, *(f"DNS:{name}" for name in AMAZON))
        secure = ("-p", "443", "-s", "-c", str(certificate), "-k", str(key))
        variables = CREDENTIALS | {"SSL_CERT_FILE": str(authority)}
        with self._served(f"https://{AMAZON[0]}", *secure, **variables):
            yield variables

    @contextmanager
    def _served(self, url, *options, **variables):
        command = ("nsenter", "--target", str(self._switch), "--net", sys.executable, "-m", "moto.server")
        server = subprocess.Popen((*command, "-H", SERVER, *options), stderr=subprocess.DEVNULL)
        try:
            assert self.hosts[0].start(code=MAKE_BUCKET, **variables, AWS_ENDPOINT_URL=url).end()[0] == 0
            yield
        finally:
            server.kill()
            server.wait()


@contextmanager
def network(names, disk, start_program):
    """Yield a network of hosts. disk: an empty folder, which is another one on each host."""
    may = ("unshare", "--net", "--uts", "--mount", "sh", "-c", "hostname here && ip link add name one type bridge")
    if not shutil.which("ip") or subprocess.run(may, capture_output=True, check=False).returncode:
        pytest.skip("needs ip of iproute2, and the right to make network namespaces")
    with ExitStack() as end:
        made = Network(disk, end.enter_context(namespaces("--net")))
        made.on_switch(SWITCH)
        for number, name in enumerate(names, start=1):
            keeper = end.enter_context(namespaces("--net", "--uts", "--mount"))
            made.add(name, number, names, keeper, start_program)
        try:
            yield made
        finally:
            for host in made.hosts:
                host.kill()
