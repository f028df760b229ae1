"""The scripts for Slurm in the documentation, with other numbers and paths, on a cluster of two hosts."""

import re

import pytest

from thermopile.trainer.run_directory import RunDirectory

from support.cli import answer
from support.conversions import digests
from support.in_place import write_tars
from support.runs import assert_same_run, finish
from support.slurm import DOCS, needs_slurm, replaced, scripts, slurm, wait_until

pytestmark = [pytest.mark.timeout(1200), needs_slurm]

SRUN, TORCHRUN = scripts("several_gpus.md", "Slurm")
FEWER = {"--ntasks-per-node=8": "--ntasks-per-node=2", "--cpus-per-task=12": "--cpus-per-task=2"}


def without_gpus(script):
    return re.sub("#SBATCH --gpus-per-node=.*\n", "", script)


def as_torchrun(script):
    """The script with the fragment's options in place of its own, and the fragment's commands in place of srun's."""
    options, commands = re.fullmatch(r"((?:#SBATCH .*\n)+)([^#](?:.*\n)+)", TORCHRUN).groups()
    head = script[: script.index("srun ")]
    for line in options.splitlines():
        name = line.split("=")[0]
        assert re.search(f"^{name}=", head, re.MULTILINE), line
        head = re.sub(f"^{name}=.*", line, head, flags=re.MULTILINE)
    return head + commands


@pytest.fixture(scope="module")
def cluster(hosts, tmp_path_factory):
    with slurm(hosts[:2], tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def submit(cluster, run, pairs_dataset, settings):
    """Return a function that submits a script of the documentation that trains, and returns the job's number."""
    ours = {"/scratch/runs/cc12m": run.path, "/scratch/cc12m": pairs_dataset.path, "cc12m.toml": "settings.toml"}
    cluster.write("settings.toml", "\n".join(settings))

    def submit(script, replacements):
        cluster.write("train.sbatch", replaced(without_gpus(script), ours | replacements))
        return cluster.run("sbatch --parsable train.sbatch")

    return submit


def wait_for(run, steps, cluster, job):
    def has_steps():
        return run.metrics_file.exists() and run.metrics_file.read_bytes().count(b"\n") >= steps

    wait_until(has_steps, lambda: (cluster.fields(job), cluster.said(job)))


def assert_stopped_and_finished(cluster, job, run, whole):
    wait_for(run, 10, cluster, job)
    cluster.run(f"scancel --signal=USR1 {job}")
    cluster.finish(job)
    assert cluster.fields(job)["Restarts"] == "1"
    assert re.search(r"stopped at step (\d+) by SIGUSR1.*resuming at step \1\n", cluster.said(job), re.DOTALL)
    assert_same_run(run, whole)


@pytest.mark.wide
def test_a_run_that_a_signal_stops_is_requeued_and_loses_nothing(cluster, submit, run, whole):
    assert_stopped_and_finished(cluster, submit(SRUN, FEWER), run, whole(4))


@pytest.mark.soak
def test_a_run_under_torchrun_that_a_signal_stops_is_requeued_and_loses_nothing(cluster, submit, run, whole):
    fewer = {"--nproc-per-node 8": "--nproc-per-node 2", "--cpus-per-task=96": "--cpus-per-task=4"}
    assert_stopped_and_finished(cluster, submit(as_torchrun(SRUN), fewer), run, whole(4))


@pytest.mark.soak
def test_the_signal_comes_before_the_end_of_a_job_s_time(cluster, submit, run, settings):
    cluster.write("settings.toml", replaced("\n".join(settings), {"epochs=12": "epochs=1000000"}))
    job = submit(SRUN, FEWER | {"--time=24:00:00": "--time=00:11:00"})  # the signal then comes within a minute
    wait_until(lambda: "resuming at step" in cluster.said(job), lambda: cluster.said(job))
    assert cluster.fields(job)["Restarts"] == "1"
    cluster.run(f"scancel {job}")


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """A folder of 30 MB in tars, of which a conversion makes four shards."""
    folder = tmp_path_factory.mktemp("tars") / "tars"
    write_tars(folder, 8, 512)
    return folder


@pytest.fixture(scope="module")
def whole_set(cluster, tars, tmp_path_factory):
    """What one command makes of the tars."""
    out = tmp_path_factory.mktemp("whole_set") / "set"
    cluster.run(f"thermopile convert webdataset {tars} {out}")
    return out


PARTS = {
    "--array=1-8 --cpus-per-task=16": "--array=1-3 --cpus-per-task=1",
    "$SLURM_ARRAY_TASK_ID/8": "$SLURM_ARRAY_TASK_ID/3",
}


@pytest.mark.soak
def test_an_array_of_parts_one_of_which_fails_at_first_makes_the_dataset_of_one_command(
    cluster, tars, whole_set, tmp_path
):
    array, chain, _ = scripts("convert_large.md", "Conversion on several machines")
    (again,) = re.findall(r"`(parts=.*?)`", (DOCS / "convert_large.md").read_text("utf-8"))
    ours = {"/data/cc12m-set": tmp_path / "set", "/data/cc12m": tars}
    cluster.write("convert.sbatch", replaced(array, ours | PARTS))
    parts, finish = replaced(chain, ours).strip().split("\n")
    never = cluster.run(f"{parts}; scancel ${{parts}}_2; {finish}").split()[-1]
    cluster.wait(never, JobState="PENDING", Reason="DependencyNeverSatisfied")
    cluster.run(f"scancel {never}")
    cluster.finish(cluster.run(f"{replaced(again, {'--array=5': '--array=2'})}; {finish}").split()[-1])
    assert digests(tmp_path / "set") == digests(whole_set)


ASSERT_SAME_DATASET = """
from thermopile.pipeline.opening import Dataset
from thermopile.storage.bucket import Address
_, *address, path = sys.argv
assert Dataset(Address(*address)).index.fingerprint == Dataset(path).index.fingerprint
"""


@pytest.mark.soak
def test_parts_and_training_as_one_chain_of_jobs_in_a_bucket(
    cluster, hosts, bucket, tars, settings, whole_set, tmp_path
):
    array, chain, _ = scripts("convert_large.md", "Two examples")
    ours = {"s3://bucket/cc12m-set": "s3://bucket/set", "s3://bucket/cc12m": tars}
    cluster.write("settings.toml", "\n".join(settings))
    cluster.write("convert.sbatch", replaced(array, ours | PARTS))
    fewer = {
        "--gpus=1 --cpus-per-task=16": "--cpus-per-task=1",
        "batch_size=1024": "batch_size=384",
        "runs/cc12m": tmp_path / "run",
        "cc12m.toml": "settings.toml",
    }
    cluster.finish(cluster.run(replaced(chain, ours | fewer), **bucket, THERMOPILE_SCRATCH=tmp_path).split()[-1])
    assert answer("status", tmp_path / "run")["state"] == "finished"
    finish([hosts[0].start("bucket", "set", whole_set, code=ASSERT_SAME_DATASET, **bucket)])
