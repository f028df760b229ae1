"""An interrupted or killed conversion: it resumes where it was, and ends as if it had never stopped."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from thermopile.pipeline.conversion.conversion import Conversion, ConvertSettings, convert
from thermopile.pipeline.conversion.partial import claimed
from thermopile.pipeline.errors import CURE, DatasetExistsError
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.storage.bucket import Address
from thermopile.storage.local import LocalPath

from support.conversions import digests, in_this_process, many_shards
from support.programs import program
from support.programs.converting import convert_both


def interrupt(*anything):
    raise KeyboardInterrupt


@pytest.fixture
def interrupted(tmp_path, picture_folder):
    """A conversion that was interrupted as soon as it had begun."""

    with pytest.raises(KeyboardInterrupt):
        convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1, on_progress=interrupt)
    return tmp_path / "out"


def test_an_interrupted_conversion_is_started_over_unasked_only_before_a_shard_is_finished(
    interrupted, picture_folder, images_dataset, monkeypatch
):
    source = FolderSource(picture_folder)
    with monkeypatch.context() as patch:
        many_shards(patch, rows=100)
        with pytest.raises(KeyboardInterrupt):
            Conversion(source, interrupted, ConvertSettings(seed=7), pool=in_this_process).run(
                on_progress=lambda counts: counts.done and interrupt()
            )
    with pytest.raises(
        DatasetExistsError, match="unfinished conversion; continue it with --resume, or start over with --overwrite"
    ):
        convert(source, interrupted, ConvertSettings(), workers=1)
    convert(source, interrupted, ConvertSettings(), workers=1, overwrite=True)
    assert Dataset(interrupted).index.fingerprint == images_dataset.index.fingerprint
    assert os.listdir(interrupted.parent) == ["out"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": ConvertSettings(image={"quality": 80})}, "image.quality was 90 and is now 80"),
        ({"settings": ConvertSettings(seed=3)}, "seed was 0 and is now 3"),
        ({"selection": np.arange(200)}, "selected was 300 and is now 200"),
        ({"source": GlyphSource(0)}, r'source\.kind was "folder" and is now "glyphs"'),
    ],
)
def test_resuming_with_other_settings_is_refused_naming_what_differs(interrupted, picture_folder, change, words):
    given = {"source": FolderSource(picture_folder), "settings": ConvertSettings()} | change
    with pytest.raises(DatasetExistsError, match=words):
        convert(given.pop("source"), interrupted, given.pop("settings"), workers=1, resume=True, **given)


def test_settings_that_change_no_byte_may_change_on_resume(interrupted, picture_folder):
    settings = ConvertSettings(on_error="fail", max_error_rate=0.5)
    assert convert(FolderSource(picture_folder), interrupted, settings, workers=2, resume=True).index.n == 300


def test_resuming_a_complete_conversion_touches_nothing(tmp_path, picture_folder):
    source, out = FolderSource(picture_folder), tmp_path / "out"
    first = convert(source, out, ConvertSettings(), workers=1, resume=True)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    second = convert(source, out, ConvertSettings(), workers=1, resume=True)
    assert (first.seen, second.seen, second.index.n) == (300, 0, 300)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    with pytest.raises(DatasetExistsError, match="not converted with these settings"):
        convert(source, out, ConvertSettings(seed=1), workers=1, resume=True)
    assert os.listdir(tmp_path) == ["out"]


def test_a_dataset_damaged_before_it_is_in_its_place_is_refused_with_what_to_remove(
    tmp_path, picture_folder, monkeypatch
):
    with monkeypatch.context() as at_the_end:
        at_the_end.setattr("thermopile.pipeline.conversion.partial.Partial.publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1)
    index = tmp_path / ".out.partial" / "dataset" / "dataset.json"
    index.write_text(index.read_text().replace('"n": 300', '"n": 301'))
    with pytest.raises(DatasetExistsError) as refused:
        convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1, resume=True)
    damage = f"{index} cannot be used: it is damaged: its checksum does not match"
    assert str(refused.value) == f"remove {tmp_path / '.out.partial'} to start over: {damage}. {CURE}"


def test_a_second_conversion_to_the_same_place_is_refused(tmp_path, picture_folder):
    def convert_there_as_well(counts):
        convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1, overwrite=True)

    with pytest.raises(DatasetExistsError, match=f"being written by pid {os.getpid()} on"):
        convert(FolderSource(picture_folder), tmp_path / "out", ConvertSettings(), workers=1,
                on_progress=convert_there_as_well)  # fmt: skip


def processes_of_session(session):
    """Processes of a session that have not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == session and state != "Z":
                yield stat.parent.name


def kill_at_random(rng, process, partials):
    """Let the conversion begin, kill it when some shards are done, and wait until its workers have noticed."""
    done = sum(1 for partial in partials for _ in partial.glob("parts/*.done.json"))
    wanted = done + rng.integers(0, 3)
    assert process.stdout.readline() == "ready\n"  # and a Ctrl-C in a terminal would not reach its workers
    process.stdin.write("begin\n")
    process.stdin.flush()
    while process.poll() is None and sum(1 for p in partials for _ in p.glob("parts/*.done.json")) < wanted:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.02))
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while remaining := list(processes_of_session(process.pid)):
        assert time.monotonic() < deadline, f"processes {remaining} outlived their parent"
        time.sleep(0.02)


@pytest.mark.soak
def test_a_conversion_killed_at_random_moments_ends_the_same_as_one_never_killed(tmp_path, with_bad_ones, monkeypatch):
    kills = 20
    many_shards(monkeypatch, rows=0)  # has the test put back what convert_both sets
    out, never_killed = tmp_path / "killed" / "out", tmp_path / "never_killed" / "out"
    command = program("converting", with_bad_ones, out)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, **pipes, text=True, start_new_session=True) for _ in range(2)]
    convert_both(with_bad_ones, never_killed, workers=1)
    rng = np.random.default_rng(0)
    for kill in range(kills):
        kill_at_random(rng, processes[kill], [out.with_name(".out.partial"), out.with_name(".out-test.partial")])
        if len(processes) < kills:  # the next one makes ready while this one works
            processes.append(subprocess.Popen(command, **pipes, text=True, start_new_session=True))
    convert_both(with_bad_ones, out, workers=2)
    assert digests(tmp_path / "killed") == digests(tmp_path / "never_killed")


@pytest.mark.wide
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.wide)])
def test_a_conversion_killed_at_any_step_of_its_end_ends_the_same(
    tmp_path, with_bad_ones, images_dataset, monkeypatch, every
):
    many_shards(monkeypatch, rows=120)
    shutil.copytree(images_dataset.path, tmp_path / "out")  # what is to be replaced
    with monkeypatch.context() as before_the_end:
        before_the_end.setattr("thermopile.pipeline.conversion.partial.Partial.assemble", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(FolderSource(with_bad_ones), tmp_path / "out", ConvertSettings(), workers=2, overwrite=True)
    (tmp_path / "never_killed").mkdir()
    shutil.copytree(tmp_path / ".out.partial", tmp_path / "never_killed" / ".out.partial")
    convert(FolderSource(with_bad_ones), tmp_path / "never_killed" / "out", ConvertSettings(), resume=True)
    (tmp_path / "wanted").write_text(json.dumps(digests(tmp_path / "never_killed")))
    result = subprocess.run(program("finishing", with_bad_ones, tmp_path, every), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 30 / every


@pytest.mark.parametrize(("to_bucket", "name"), [(True, "thermopile-shards-link"), (False, "writing-link")])
def test_a_killed_conversions_shards_in_progress_are_removed(tmp_path, monkeypatch, to_bucket, name):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    out = Address("bucket", "out") if to_bucket else LocalPath(tmp_path / "out")
    folder = tmp_path / "temporary" if to_bucket else tmp_path / ".out.partial"
    (tmp_path / "temporary").mkdir()
    if (child := os.fork()) == 0:
        with claimed(out, shared=True) as killed:
            (killed.scratch / "part-00000.7.beton").touch()
            os._exit(9)
    os.waitpid(child, 0)
    assert len(list(folder.glob("*/part-00000.7.beton"))) == 1
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "lock").write_text("keep me")
    (folder / name).symlink_to("elsewhere")
    (folder / f"{name}.lock").touch()
    with claimed(out, shared=True) as living, claimed(out, shared=True):
        assert living.scratch.exists()
        assert list(folder.glob("*/part-00000.7.beton")) == []
        assert (folder / "elsewhere" / "lock").read_text() == "keep me"
        assert (folder / name).is_symlink()
