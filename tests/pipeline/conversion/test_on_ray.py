"""A conversion on a Ray cluster: whatever dies meanwhile, its dataset is that of one machine."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thermopile.pipeline.conversion import on_ray
from thermopile.pipeline.conversion.conversion import Conversion, ConvertSettings, convert
from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.errors import DatasetError, SourceError
from thermopile.pipeline.sources.folder import FolderSource

from support.conversions import convert_part, digests, many_shards
from support.pictures import draw
from support.programs import program
from support.sources import DeadlySource, FailingOnceSource, PausingSource

pytest.importorskip("ray", reason="needs thermopile[ray]")
pytestmark = pytest.mark.wide

SHARDS = 8
HEALTH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    many_shards(monkeypatch, rows=30)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """240 pictures, every twelfth unusable, and beside them a list of all with captions."""
    root = tmp_path_factory.mktemp("pictures") / "in"
    root.mkdir()
    for i in range(240):
        draw(i).save(root / f"{i:03d}.png") if i % 12 else (root / f"{i:03d}.png").write_bytes(b"no picture")
    rows = [f"{i:03d}.png,picture number {i}\n" for i in range(240)]
    (root.parent / "list.csv").write_text("filepath,title\n" + "".join(rows))
    return root


@pytest.fixture(scope="module")
def of_one_machine(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as monkeypatch:
        many_shards(monkeypatch, rows=30)
        convert(FolderSource(pictures), folder / "out", ConvertSettings(), workers=1)
    return digests(folder / "out")


@pytest.fixture(scope="module")
def nodes():
    """A Ray cluster, named by RAY_ADDRESS, whose head runs no tasks, and two further nodes of one core each."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # the paths of sockets must be short
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(True, head_node_args={"num_cpus": 0, "temp_dir": folder, "_system_config": HEALTH})
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()
    shutil.rmtree(folder)


@pytest.fixture
def on_cluster(nodes):
    """This process is connected to the cluster."""
    with on_ray.cluster(None):
        yield


def pause_at(told, shards):
    (told / "new").write_text(str(shards))
    (told / "new").rename(told / "pause_at")


def pausing(told):
    """Number of tasks that pause in the middle of a shard, or died there."""
    return len(list(told.glob("pausing-*")))


def being_written(told):
    """Numbers of shards that are being written, and that were by writers that died."""
    files = told.glob(".out.partial/writing-*/*.errors.jsonl")
    writers = [file.name.split(".")[1].rpartition("-")[2] for file in files]
    alive = sum(Path("/proc", writer).exists() for writer in writers)
    return alive, len(writers) - alive


def done(told):
    return len(list(told.glob(".out.partial/parts/*.done.json")))


def wait_until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("source", [["csv", "list.csv", "--root", "in"], ["webdataset", "tars"]])
def test_a_cluster_of_this_machine_makes_what_one_machine_does_from_relative_paths(
    pictures, tars_with_bad_ones, tmp_path, source
):
    shutil.copytree(pictures, tmp_path / "in", copy_function=os.link)
    shutil.copytree(tars_with_bad_ones, tmp_path / "tars")
    shutil.copy(pictures.parent / "list.csv", tmp_path)
    kind, name, *root = source
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    printed = []
    for folder, options in (("ray", ["--on", "ray"]), ("one", [])):
        command = [sys.executable, "-m", "thermopile.tools.cli", "convert", kind, name, f"{folder}/out",
                   *root, "--holdout", "40", "--workers", "1", *options]  # fmt: skip
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        printed.append(re.sub(r"[0-9.]+ s, [0-9.,]+ img/s", "", result.stdout.replace(f"{folder}/", "")))
    assert digests(tmp_path / "ray") == digests(tmp_path / "one")
    assert printed[0] == printed[1]


def test_each_node_is_killed_once_at_work_and_the_dataset_is_that_of_one_machine(
    pictures, tmp_path, nodes, on_cluster, of_one_machine
):
    pause_at(tmp_path, 2)
    source = PausingSource(pictures, tmp_path)
    with ThreadPoolExecutor(1) as beside:
        conversion = beside.submit(on_ray.convert_on_ray, Conversion(source, tmp_path / "out"))
        try:
            for killed, node in enumerate(list(nodes.worker_nodes), start=1):
                wait_until(lambda killed=killed: pausing(tmp_path) == killed + 1)
                assert 2 * killed <= done(tmp_path) < SHARDS
                nodes.remove_node(node, allow_graceful=False)
                wait_until(lambda killed=killed: being_written(tmp_path) == (1, killed))
                nodes.add_node(num_cpus=1)
                pause_at(tmp_path, 2 * killed + 2)
        finally:
            pause_at(tmp_path, SHARDS)
        summary = conversion.result()
    assert digests(tmp_path / "out") == of_one_machine
    keys = [sample.key for sample in read_bad_samples(tmp_path / "out" / "errors.jsonl")]
    assert len(keys) == len({*keys}) == summary.left_out == 20
    assert not (tmp_path / ".out.partial").exists()


def test_a_file_system_that_fails_for_a_moment_is_tried_again(pictures, tmp_path, on_cluster, of_one_machine):
    (tmp_path / "fail_once").touch()
    source = FailingOnceSource(pictures, tmp_path)
    on_ray.convert_on_ray(Conversion(source, tmp_path / "out"))
    assert not (tmp_path / "fail_once").exists()
    assert digests(tmp_path / "out") == of_one_machine


def test_a_sample_that_kills_every_process_ends_the_conversion(pictures, tmp_path, on_cluster, monkeypatch):
    monkeypatch.setattr(on_ray, "MAX_RETRIES", 1)
    source = DeadlySource(pictures, tmp_path)
    with pytest.raises(DatasetError, match=r"^Ray could not convert a shard: .*\. Continue with the same command$"):
        on_ray.convert_on_ray(Conversion(source, tmp_path / "out"))
    assert (tmp_path / ".out.partial" / "plan.json").exists()


def test_a_node_that_does_not_see_the_files_is_named_with_one_of_them(pictures, tmp_path, on_cluster):
    reads = [pictures, tmp_path / "nowhere"]
    with pytest.raises(DatasetError, match=f"the node .* does not see {reads[1]}: the source and the output must be"):
        on_ray.convert_on_ray(Conversion(FolderSource(pictures), tmp_path / "out"), reads=reads)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on_error": "fail"}, r"'[0-9]+\.png': not a JPEG.*Fix it, or leave such samples out"),
        ({"max_error_rate": 0}, r"^at least [0-9]+ of 240 samples cannot be used; .*are listed in .*errors\.jsonl"),
    ],
)
def test_samples_that_may_not_be_left_out_end_it_as_on_one_machine(pictures, tmp_path, on_cluster, settings, words):
    pause_at(tmp_path, 2)
    source = PausingSource(pictures, tmp_path)
    with pytest.raises(SourceError, match=words):
        on_ray.convert_on_ray(Conversion(source, tmp_path / "out", ConvertSettings(**settings)))
    wait_until(lambda: being_written(tmp_path)[0] == 0)  # those that paused were cancelled
    assert done(tmp_path) < SHARDS


def test_a_picture_that_changed_since_an_earlier_command_began_is_refused_by_a_node(pictures, tmp_path, on_cluster):
    source = FolderSource(shutil.copytree(pictures, tmp_path / "in"))
    convert_part(source, tmp_path / "out", ConvertSettings(), 1, 2, workers=1)
    for path in (tmp_path / "in").iterdir():
        path.write_bytes(path.read_bytes())
    with pytest.raises(SourceError, match=r"^.+\.png was changed after the conversion began.*remove .*out\.partial"):
        on_ray.convert_on_ray(Conversion(source, tmp_path / "out"))


def test_shards_done_before_an_interrupt_or_a_kill_are_kept_and_it_can_finish(
    pictures, tmp_path, nodes, of_one_machine
):
    command, kept = program("converting_on_ray", pictures, "out"), {}
    for shards, end in ((2, signal.SIGINT), (4, signal.SIGKILL)):
        pause_at(tmp_path, shards)
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        wait_until(lambda: pausing(tmp_path) == 2)
        process.send_signal(end)
        assert process.wait() == -end
        wait_until(lambda: being_written(tmp_path)[0] == 0)  # its tasks end with it
        for file in tmp_path.glob("pausing-*"):
            file.unlink()
        for file in tmp_path.glob(".out.partial/dataset/shards/*.beton"):
            assert kept.setdefault(file.name, file.stat().st_mtime_ns) == file.stat().st_mtime_ns
        assert shards <= len(kept) < SHARDS
    pause_at(tmp_path, SHARDS)
    subprocess.run(command, cwd=tmp_path, check=True)
    assert digests(tmp_path / "out") == of_one_machine
    for name, written in kept.items():
        assert (tmp_path / "out" / "shards" / name).stat().st_mtime_ns == written
