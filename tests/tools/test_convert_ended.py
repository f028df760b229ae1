"""`thermopile convert` when something ends it: an interrupt, a store that goes away, a cluster that is not there."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import islice

import pytest
from obstore.store import MemoryStore

from thermopile.pipeline.conversion.conversion import ConvertSettings
from thermopile.pipeline.errors import SourceError
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.bucket import Address
from thermopile.storage.bucket_errors import ObjectStoreError
from thermopile.tools.convert import _convert
from thermopile.tools.convert_splits import Split

from support.cli import assert_one_line, cli
from support.conversions import in_this_process, many_shards
from support.pictures import draw

run = partial(cli, "convert")


@pytest.mark.wide
def test_an_interrupted_conversion_says_how_to_continue(tmp_path):
    command = [sys.executable, "-m", "thermopile.tools.cli", "convert", "glyphs", str(tmp_path / "glyphs")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    parts = tmp_path / ".glyphs.partial" / "dataset" / "shards"
    while not (parts.is_dir() and any(parts.iterdir())):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.split("\n")[-4:-1] == [
        "Finished shards are kept; continue with the same command and --resume.",
        "",
        "Aborted!",
    ]
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == [".glyphs.partial"]
    assert_one_line(run("glyphs", tmp_path / "glyphs"), 2, "unfinished conversion; continue it with --resume")


def test_a_store_that_went_away_is_not_asked_again(monkeypatch, capsys):
    monkeypatch.setattr("thermopile.storage.bucket.PATIENCE_SECONDS", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    def convert(*arguments, **options):
        raise ObjectStoreError("the first error")

    split = Split(out := Address("away-bucket", "out"), out, GlyphSource(0, test=True), None, None)
    with pytest.raises(ObjectStoreError, match="the first error"):
        _convert(convert, split, ConvertSettings())
    assert "continue with the same command and --resume" in capsys.readouterr().err


GO_ON, KEPT = "continue with the same command and --resume.", "Finished shards are kept; "


@pytest.mark.parametrize(
    ("is_remote", "shards", "error", "said"),
    [
        (False, 0, SourceError("wrong"), ""),
        (False, 1, SourceError("wrong"), KEPT + GO_ON),
        (False, 1, KeyboardInterrupt(), KEPT + GO_ON),
        (True, 0, SourceError("wrong"), GO_ON),
        (True, 1, SourceError("wrong"), KEPT + GO_ON),
        (True, 1, PermissionError("refused"), GO_ON),
        (True, 1, KeyboardInterrupt(), GO_ON),
    ],
)
def test_shards_are_said_to_be_kept_where_one_is_known_to_be(tmp_path, monkeypatch, is_remote, shards, error, said):
    def pool(job, parts, counted, on_progress):
        in_this_process(job, islice(parts, shards), counted, on_progress)
        raise error

    many_shards(monkeypatch, rows=8)
    monkeypatch.setattr("thermopile.tools.convert.processes", lambda workers: pool)
    store = MemoryStore()
    monkeypatch.setattr("thermopile.storage.bucket._store", lambda bucket, repeats=0: store)
    for number in range(20):
        draw(number).save(tmp_path / f"{number}.jpg")
    out = "s3://bucket/out" if is_remote else tmp_path / "new" / "out"
    ended = run("folder", tmp_path, out)
    assert ended.exit_code == 1
    assert [line for line in ended.stderr.splitlines() if "--resume" in line] == [said] * bool(said)
    if shards:
        assert_one_line(run("folder", tmp_path, out), 2, "unfinished conversion; continue it with --resume")


def test_on_ray_excludes_parts_and_names_what_is_missing(tmp_path, monkeypatch):
    for option in (["--part", "1/2"], ["--finish"]):
        assert_one_line(run("glyphs", tmp_path / "out", "--on", "ray", *option), 2, "leave out --part and --finish")
    with monkeypatch.context() as without_ray:
        without_ray.setitem(sys.modules, "ray", None)
        assert_one_line(run("glyphs", tmp_path / "out", "--on", "ray"), 1, "pip install 'thermopile[ray]'")
    assert os.listdir(tmp_path) == []


@pytest.mark.wide
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ray://127.0.0.1:9", "ray[client]"),
        ("far://", "cannot use the Ray cluster far://"),
        ("127.0.0.1:1", "cannot use the Ray cluster 127.0.0.1:1: [Errno 111] Connection refused"),
        ("nowhere.invalid:6379", "cannot use the Ray cluster nowhere.invalid:6379"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_named_in_one_line(tmp_path, address, words):
    pytest.importorskip("ray", reason="needs thermopile[ray]")
    (tmp_path / "grpc.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "RAY_ADDRESS": address}
    result = subprocess.run([sys.executable, "-m", "thermopile.tools.cli", "convert", "glyphs", tmp_path / "out",
                             "--on", "ray"], env=environment, capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert words in line
