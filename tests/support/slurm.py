"""Slurm on hosts of a network: a controller, a node on each host, and nothing of it elsewhere on this machine."""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# A job that is requeued waits until its credentials have expired: two minutes unless set, at least six seconds.
# As the usual proctrack/cgroup, pgid signals a task without the ranks that it has started, if it is torchrun.
CONFIG = """
ClusterName=tests
SlurmctldHost={names[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""
PROGRAMS = {"thermopile": "thermopile", "torchrun": "torch.distributed.run"}
"""Name on the PATH of jobs -> module."""
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
needs_slurm = pytest.mark.skipif(bool(MISSING), reason=f"needs Debian's slurm-wlm and munge: there is no {MISSING}")


def scripts(page, heading):
    """The shell scripts below a heading of a page of the documentation."""
    (section,) = re.findall(
        rf"^#+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", (DOCS / page).read_text("utf-8"), re.M | re.S
    )
    return re.findall(r"^```sh\n(.*?)^```", section, re.M | re.S)


def replaced(script, replacements):
    """The script with other words in these places, each of which it must have."""
    for words, others in replacements.items():
        assert words in script, words
        script = script.replace(words, str(others))
    return script


def wait_until(is_so, why=str, within=200):
    """Wait until a function returns a true value; when the time is up, fail with what `why()` returns."""
    end = time.monotonic() + within
    while not is_so():
        assert time.monotonic() < end, why()
        time.sleep(0.1)


class Cluster:
    """What a user sees of it.

    folder: where scripts are, and what jobs write to stdout and stderr.
    """

    def __init__(self, host, folder, environment):
        self.folder, self._host, self._environment = folder, host, environment

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def run(self, script, **environment):
        """Run a shell script in the folder, which jobs have as theirs; return what it says to stdout."""
        command = self._host.inside("env", f"--chdir={self.folder}", "bash", "-e", "-c", script)
        variables = self._environment | environment
        return subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def fields(self, job):
        """What Slurm says of a job: JobState, ExitCode, Restarts, …"""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run(f"scontrol show job {job} --oneliner")))

    def said(self, job):
        """What a job has written to stdout and stderr."""
        file = self.folder / f"slurm-{job}.out"
        return file.read_text() if file.exists() else ""

    def wait(self, job, **fields):
        """Wait until a job has these fields."""
        wait_until(lambda: fields.items() <= self.fields(job).items(), lambda: (self.fields(job), self.said(job)))

    def finish(self, job):
        """Wait until a job has ended, well."""
        wait_until(
            lambda: self.fields(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), lambda: self.said(job)
        )
        assert self.fields(job)["JobState"] == "COMPLETED", (self.fields(job), self.said(job))


def configure(folder, names):
    """Write what the daemons read, and the programs of jobs."""
    for name in ("state", "bin", "jobs", *names):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, names=names, nodes=",".join(names)))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # loaded, but not used
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    for name, module in PROGRAMS.items():
        (folder / "bin" / name).touch(0o755)
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')


@contextmanager
def slurm(hosts, folder):
    """Yield a cluster of these hosts. folder: empty, on a disk of all."""
    configure(folder, [host.name for host in hosts])
    environment = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    files = {"key-file": "key", "socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    munged = ("munged", "--foreground", "--force", *(f"--{each}={folder}/munge.{name}" for each, name in files.items()))
    with (folder / "log").open("w") as log, ExitStack() as end:
        for command in (munged, hosts[0].inside("slurmctld", "-D"), *(host.inside("slurmd", "-D") for host in hosts)):
            daemon = end.enter_context(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            end.callback(daemon.kill)
        for host in hosts:
            end.callback(host.kill)  # jobs outlive the daemons
        cluster = Cluster(hosts[0], folder / "jobs", environment)
        cluster.run(f"srun --quiet --nodes={len(hosts)} true")  # waits until all nodes are there
        yield cluster
