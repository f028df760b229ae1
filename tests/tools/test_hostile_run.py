"""Runs that somebody sends: links, pipes, devices and nonsense in the place of every file, before every command.

A command ends in one line of error or does what it should; nothing outside of the run changes, and nothing hangs.
"""

import os
import shutil
import socket
import tempfile

import pytest
from click.testing import CliRunner

from thermopile.tools.cli import main
from thermopile.trainer.run_directory import RunDirectory

SETTINGS = ("epochs=1", "batch_size=32", "canonical_shards=2", "data.image_size=16", "data.workers=1", "model.dim=8",
            "model.image.config.width=4", "log_every=1")  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def trained(hostile_dataset, tmp_path_factory):
    """A run of two steps, with one checkpoint and all that a run may have beside it."""
    path = tmp_path_factory.mktemp("trained") / "run"
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    done = run("train", "--data", hostile_dataset.path, "--out", path, *settings)
    assert done.exit_code == 0, done.stderr
    (path / "warnings.log").write_text("2026-01-01 00:00:00+0000 a warning\n")
    for name in ("report", "tensorboard", "state.working"):
        (path / name).mkdir()
    return RunDirectory(path)


@pytest.fixture
def sent(trained, tmp_path):
    """A copy for one test, beside files that are none of its business."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("precious\n" * 100)
    (outside / "folder" / "file").write_text("precious\n")
    return RunDirectory(shutil.copytree(trained.path, tmp_path / "run"))


def contents(folder):
    """Every name below, with what kind of thing it is, its length and when it was changed."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = status.st_mode, status.st_size, status.st_mtime_ns
    return found


def arguments_of(command, sent, dataset):
    """A command on the run, and whether it may change it."""
    new = sent.path.with_name("new")
    return {
        "status": (["status", sent.path], False),
        "status --json": (["status", sent.path, "--json"], False),
        "resume": (["train", "--out", sent.path, "--resume"], True),
        "rows": (["inspect", sent.path, "--export", new.with_suffix(".csv")], False),
        "inspect": (["inspect", sent.path], True),
        "log": (["state", "log", sent.path], False),
        "check": (["state", "check", sent.path], False),
        "export": (["export", sent.path, "--to", new, "--format", "safetensors"], False),
        "eval": (["eval", sent.path, "--train", dataset.path, "--test", dataset.path], False),
        "start from it": (["train", "--data", dataset.path, "--out", new, "--init-from", sent.path], False),
    }[command]


def outcome(command, sent, dataset):
    """Run a command; its exit code and its one line of error, or what it printed."""
    arguments, may_change = arguments_of(command, sent, dataset)
    outside = sent.path.with_name("outside")
    before = contents(outside), None if may_change else contents(sent.path)
    done = run(*arguments)
    assert (contents(outside), None if may_change else contents(sent.path)) == before
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == (done.exit_code != 0), done.output
    assert "should not happen" not in done.output
    return done.exit_code, errors[0] if errors else done.output


# What stands in a file's place: functions of the place and of the folder outside of the run


def link(place, outside):
    place.symlink_to(outside / "file")


def link_to_a_folder(place, outside):
    place.symlink_to(outside / "folder")


def dangling_link(place, outside):
    place.symlink_to(outside / "new")


def hard_link(place, outside):
    place.hardlink_to(outside / "file")


def pipe(place, outside):
    os.mkfifo(place)


def device(place, outside):
    place.symlink_to("/dev/zero")


def unix_socket(place, outside):
    # Bound elsewhere: the path of a socket must be short.
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{short}/s")
        os.rename(f"{short}/s", place)


def folder(place, outside):
    place.mkdir()


def huge(place, outside):
    with place.open("wb") as file:
        file.truncate(1 << 40)


def text(content):
    def write(place, outside):
        place.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


DEEP_LIST = "[" * 100_000
LATEST, INFO = "checkpoints/latest", "checkpoints/step-2/checkpoint.json"
WRITTEN = "nothing is written through one"

REFUSED = [
    # Where a run writes as it goes on.
    *((kind, name, "resume", WRITTEN) for kind in (link, dangling_link)
      for name in ("metrics.jsonl", "warnings.log", "state.lock")),
    *((link_to_a_folder, name, "resume", WRITTEN) for name in ("state", "state.working", "checkpoints", "tensorboard")),
    *((hard_link, name, "resume", "has a second name") for name in ("metrics.jsonl", "warnings.log", "state.lock")),
    *((pipe, name, "resume", "named pipe") for name in ("metrics.jsonl", "warnings.log", "state.lock")),
    (folder, "metrics.jsonl", "resume", "is a directory"),
    (unix_socket, "metrics.jsonl", "resume", "metrics.jsonl"),
    *((kind, "state.working", "resume", "state.working is not a directory") for kind in (pipe, text("a file"))),
    *((kind, "report", "inspect", words) for kind, words in (
        (link_to_a_folder, WRITTEN), (dangling_link, WRITTEN), (text("a file"), "name another directory"))),
    # Settings.
    *((kind, "config.toml", command, "config.toml") for kind in (pipe, device)
      for command in ("status", "resume", "rows", "export", "eval", "start from it")),
    *((kind, "config.toml", "status", "config.toml") for kind in (folder, unix_socket, dangling_link, huge)),
    *((text(content), "config.toml", command, "config.toml") for command in ("status", "resume") for content in (
        b"\xff\xfe", "a" + ".a" * 50_000 + " = 1", f"a = {DEEP_LIST}", f"objective.x = {'[' * 90}{']' * 90}",
        "seed = " + "9" * 5000, "seed = 'one'", "data = 3", "model = [1]")),
    # What names the checkpoint.
    *((kind, LATEST, command, "latest") for kind in (pipe, device) for command in ("resume", "export", "eval")),
    *((text(content), LATEST, "resume", "latest") for content in ("../../outside/folder", "step-" + "9" * 5000)),
]  # fmt: skip

AS_WELL_AS_EVER = [
    *((kind, name, "status --json", None) for name in ("metrics.jsonl", "warnings.log", "state.lock")
      for kind in (pipe, device, folder, unix_socket, huge)),
    *((text(content), "metrics.jsonl", "status --json", None) for content in (
        DEEP_LIST, '{"step": 1e999, "loss": 1}', '{"step": "2", "loss": []}', "[]\n3\nnull", '{"step": ' + "9" * 5000)),
    (text('{"step": 1, "evaluation": {"\\ud800": 1}}'), "metrics.jsonl", "status", "[U+D800]"),
    *((kind, name, "rows", None) for kind in (pipe, device, text(DEEP_LIST), text("{}")) for name in (LATEST, INFO)),
    *((link, name, command, None) for name in ("metrics.jsonl", "warnings.log", "state.lock")
      for command in ("status", "log", "check", "export")),
    (pipe, "state.lock", "check", None),
]  # fmt: skip


def put(kind, sent, name):
    place = sent.path / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    kind(place, sent.path.with_name("outside"))


def named(cases):
    return [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}-{case[2]}") for case in cases]


@pytest.mark.parametrize(("kind", "name", "command", "words"), named(REFUSED))
def test_what_is_no_file_of_the_runs_own_is_refused_in_a_line_that_names_it(
    sent, hostile_dataset, kind, name, command, words
):
    put(kind, sent, name)
    code, said = outcome(command, sent, hostile_dataset)
    assert code != 0
    assert words in said


@pytest.mark.parametrize(("kind", "name", "command", "words"), named(AS_WELL_AS_EVER))
def test_what_a_command_can_do_without_does_not_stop_it(sent, hostile_dataset, kind, name, command, words):
    put(kind, sent, name)
    code, said = outcome(command, sent, hostile_dataset)
    assert code == 0, said
    assert words is None or words in said
