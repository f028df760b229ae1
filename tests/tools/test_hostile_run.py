"""Runs from an untrusted sender: links, pipes, devices and nonsense in place of every file, before every command.

A command ends in one line of error or does what it should. Nothing outside of the run changes, and nothing hangs.
"""

import os
import shutil
import socket
import sys
import tempfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.storage.sealed_json import seal_line
from thermopile.storage.selection import ABOUT, IDS, WEIGHTS
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed

SETTINGS = ("epochs=1", "batch_size=32", "order.canonical_shards=2", "data.image_size=16", "data.workers=1",
            "model.dim=8",
            "model.image.config.width=4", "log_every=1")  # fmt: skip


@pytest.fixture(scope="module")
def trained(hostile_dataset, tmp_path_factory):
    """A run of two steps, with one checkpoint and all that a run may have beside it."""
    path = tmp_path_factory.mktemp("trained") / "run"
    kept = path.with_name("kept.parquet")
    pq.write_table(pa.table({"sample_id": range(1, 65), "weight": [1, 3] * 32}), kept)
    settings = sets(*SETTINGS)
    succeed("train", "--data", hostile_dataset.path, "--out", path, "--select", kept, "--weights", kept, *settings)
    (path / "warnings.log").write_text("2026-01-01 00:00:00+0000 a warning\n")
    for name in ("report", "tensorboard", "state.working"):
        (path / name).mkdir()
    return RunDirectory(path)


@pytest.fixture
def sent(trained, tmp_path):
    """A copy for one test, beside files outside of the run."""
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
    done = cli(*arguments)
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
WRITTEN = "files are not written through links"

REFUSED = [
    # Where a run writes as it goes on.
    *((kind, name, "resume", WRITTEN) for kind in (link, dangling_link)
      for name in ("metrics.jsonl", "warnings.log", "state.lock")),
    *((link_to_a_folder, name, "resume", WRITTEN) for name in ("state", "state.working", "checkpoints", "tensorboard")),
    *((hard_link, name, "resume", "second hard link") for name in ("metrics.jsonl", "warnings.log", "state.lock")),
    *((pipe, name, "resume", "named pipe") for name in ("metrics.jsonl", "warnings.log", "state.lock")),
    (folder, "metrics.jsonl", "resume", "is a directory"),
    (unix_socket, "metrics.jsonl", "resume", "metrics.jsonl"),
    *((kind, "state.working", "resume", "state.working is not a directory") for kind in (pipe, text("a file"))),
    *((kind, "report", "inspect", words) for kind, words in (
        (link_to_a_folder, WRITTEN), (dangling_link, WRITTEN), (text("a file"), "choose another directory"))),
    # What it trains on.
    *((kind, f"selection/{name}", command, f"selection/{name}") for command in ("resume", "rows")
      for name in (IDS, WEIGHTS, ABOUT) for kind in (link, dangling_link, pipe, device, folder, huge)),
    (link_to_a_folder, "selection", "resume", WRITTEN),
    (link_to_a_folder, "selection", "rows", f"selection/{ABOUT}"),
    # Settings.
    *((kind, "config.toml", command, "config.toml") for kind in (pipe, device)
      for command in ("status", "resume", "rows", "export", "eval")),
    *((kind, "config.toml", "status", "config.toml") for kind in (folder, unix_socket, dangling_link, huge)),
    *((text(content), "config.toml", command, "config.toml") for command in ("status", "resume") for content in (
        b"\xff\xfe", "a" + ".a" * 50_000 + " = 1", f"a = {DEEP_LIST}", f"objective.x = {'[' * 90}{']' * 90}",
        "seed = " + "9" * 5000, "seed = 'one'", "data = 3", "model = [1]")),
]  # fmt: skip

AS_WELL_AS_EVER = [
    *((kind, name, "status --json", None) for name in ("metrics.jsonl", "warnings.log", "state.lock")
      for kind in (pipe, device, folder, unix_socket, huge)),
    *((text(content), "metrics.jsonl", "status --json", None) for content in (
        DEEP_LIST, '{"step": 1e999, "loss": 1}', '{"step": "2", "loss": []}', "[]\n3\nnull", '{"step": ' + "9" * 5000)),
    (text(seal_line({"step": 1, "evaluation": {"\ud800": {"all": 1}}}) + b"\n"), "metrics.jsonl", "status",
     "[U+D800] 1"),
    *((kind, name, "rows", None) for kind in (pipe, device, text(DEEP_LIST), text("{}")) for name in (LATEST, INFO)),
    # The newest checkpoint is known by its own name.
    *((kind, LATEST, command, None) for kind in (pipe, device) for command in ("resume", "export", "eval")),
    *((text(content), LATEST, "resume", None) for content in ("../../outside/folder", "step-" + "9" * 5000)),
    *((link, name, command, None) for name in ("metrics.jsonl", "warnings.log", "state.lock")
      for command in ("status", "log", "check", "export")),
    (pipe, "state.lock", "check", None),
]  # fmt: skip


NONSENSE = [
    ("data", "recipe", "nonsense", "export", "data.recipe = 'nonsense' is unknown"),
    ("data", "recipe", "nonsense", "eval", "data.recipe = 'nonsense' is unknown"),
    ("data", "ahead", 1 << 70, "resume", "data.ahead"),
    ("model", "dim", 1 << 70, "export", "model.dim"),
    ("model", "image", {"name": "conv", "config": {"width": 1 << 40}}, "export", "the encoders cannot be created"),
    ("model", "image", {"name": "conv", "config": {"width": -1}}, "export", "the encoders cannot be created"),
    ("model", "image", {"name": "hf:/nowhere", "config": {}}, "export", "holds a model of type"),
    ("model", "image", {"name": "hf:vit-s", "config": {"_attn_implementation": "someone/kernel"}}, "export",
     "no such setting"),
]  # fmt: skip


def put(kind, sent, name):
    place = sent.path / name
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    kind(place, sent.path.with_name("outside"))


WIDE = {(name, "rows") for name in (f"selection/{IDS}", f"selection/{WEIGHTS}")}
"""Cases of a command and files of which `resume` has the same ones."""


def named(cases):
    return [
        pytest.param(
            *case,
            id=f"{case[0].__name__}-{case[1]}-{case[2]}",
            marks=[pytest.mark.wide] if case[1:3] in WIDE else [],
        )
        for case in cases
    ]


@pytest.mark.parametrize(("kind", "name", "command", "words"), named(REFUSED))
def test_a_replaced_file_is_refused_in_one_line_that_names_it(sent, hostile_dataset, kind, name, command, words):
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


@pytest.mark.parametrize(("table", "key", "value", "command", "words"), NONSENSE)
def test_settings_that_make_no_sense_are_refused_by_name(sent, hostile_dataset, table, key, value, command, words):
    # As a run would have recorded them, whose digest is right.
    config = sent.config()
    of_table = getattr(config, table)
    value = type(getattr(of_table, key)).model_construct(**value) if isinstance(value, dict) else value
    sent.record(config.model_copy(update={table: of_table.model_copy(update={key: value})}))
    code, said = outcome(command, sent, hostile_dataset)
    assert code != 0
    assert words in said


def test_a_run_may_itself_be_reached_by_a_link(sent, hostile_dataset, tmp_path):
    (tmp_path / "by").symlink_to(sent.path)
    reached = RunDirectory(tmp_path / "by")
    assert cli("train", "--out", reached.path, "--resume").exit_code == 0
    assert outcome("rows", reached, hostile_dataset)[0] == 0


# Names that are no text


def test_a_path_that_is_not_utf_8_is_shown_escaped(sent, tmp_path):
    odd = RunDirectory(sent.path.rename(tmp_path / "caf\udce9"))
    resumed = cli("train", "--out", odd.path, "--resume")
    assert resumed.exit_code == 2
    assert resumed.stderr.startswith(
        f"Error: {tmp_path}/caf[U+DCE9] is not valid UTF-8, so no checkpoint can be written"
    )
    assert "caf[U+DCE9]" in cli("status", odd.path).stdout


def test_a_dataset_whose_path_is_no_utf_8_cannot_be_recorded_and_is_refused_by_name(hostile_dataset, tmp_path):
    odd = shutil.copytree(hostile_dataset.path, tmp_path / "caf\udce9")
    settings = sets(*SETTINGS)
    refused = cli("train", "--data", odd, "--out", tmp_path / "run", *settings)
    said = rf"""Error: 'path = "{tmp_path}/caf\udce9"' is not valid UTF-8; rename the file, directory or class"""
    assert (refused.exit_code, refused.stderr) == (2, f"{said}\n")


# Code that settings name


@pytest.fixture
def code(tmp_path, monkeypatch):
    """Settings that name a module which leaves a trace where it is imported, and the trace."""
    trace = tmp_path / "trace"
    (tmp_path / "sent_module.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nviews = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sent_module", raising=False)
    file = tmp_path / "sent.toml"
    file.write_text('data.augmentation = "sent_module:views"\n')
    return file, trace


def test_code_that_a_file_of_settings_names_runs_only_where_it_is_allowed(code, hostile_dataset, tmp_path):
    file, trace = code
    settings = sets(*SETTINGS)
    line = ("--data", hostile_dataset.path, "--out", tmp_path / "run", "--config", file, *settings)
    refused = cli("train", *line)
    assert refused.exit_code == 2
    for words in (f"--config {file} sets data.augmentation = 'sent_module:views'", "add --allow-code"):
        assert words in refused.stderr.splitlines()[-1]
    assert cli("train", *line, "--print-config").exit_code == 2
    assert not trace.exists()
    for allowed in (["--allow-code"], ["--set", "data.augmentation=sent_module:views"]):
        assert "'sent_module:views' is not compiled" in cli("train", *line, *allowed).stderr
        assert trace.exists()


def test_code_that_a_run_names_does_not_run_unasked(code, sent, hostile_dataset):
    _, trace = code
    config = sent.config()
    data = config.data.model_copy(update={"augmentation": "sent_module:views"})
    sent.record(config.model_copy(update={"data": data}))
    for command in ("status", "rows", "export", "eval"):
        assert outcome(command, sent, hostile_dataset)[0] == 0
    # Also where its name looks like another origin of settings.
    for name in ("run", "preset x", "--set"):
        sent = RunDirectory(sent.path.rename(sent.path.with_name(name)))
        exit_code, said = outcome("resume", sent, hostile_dataset)
        assert exit_code == 2
        assert f"{sent.config_file} sets data.augmentation = 'sent_module:views'" in said
        assert not trace.exists()


@pytest.mark.parametrize("place", ["{run}/new", "{run}/checkpoints/step-2/new", "{run}/report/new", "{link}/new"])
@pytest.mark.parametrize(
    "command",
    [
        ("fork", "{run}", "--out"), ("export", "{run}", "--format", "safetensors", "--to"),
        ("train", "--data", "{data}", "--out"), ("convert", "glyphs"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_no_command_makes_a_folder_in_a_run(sent, hostile_dataset, tmp_path, command, place):
    (tmp_path / "link").symlink_to(sent.checkpoints)
    names = {"run": sent.path, "data": hostile_dataset.path, "link": tmp_path / "link"}
    before, place = contents(sent.path), place.format(**names)
    assert_one_line(cli(*(word.format(**names) for word in command), place), 2, place, f"in the run {sent.path}, which")
    assert contents(sent.path) == before


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("inspect", "{run}", "--export"), "state/new.parquet"),
        (("inspect", "{run}", "--to"), "selection"),
        (("curate", "{run}", "--drop-misfits", "--keep"), "checkpoints/new.parquet"),
        (("embed", "{run}", "{data}"), "checkpoints/step-2/new.parquet"),
        (("show", "{data}", "--out"), "state/new.html"),
        (("effect", "{run}", "{run}", "--test", "{data}", "--out"), "state.working/new.html"),
    ],
    ids=["export", "page", "keep", "embed", "show", "effect"],
)
def test_no_command_writes_a_file_into_a_folder_that_a_run_checks_or_clears(sent, hostile_dataset, command, file):
    names, place = {"run": sent.path, "data": hostile_dataset.path}, sent.path / file
    before = contents(sent.path)
    assert_one_line(cli(*(word.format(**names) for word in command), place), 2, place, f"in the run {sent.path}, which")
    assert contents(sent.path) == before


def test_a_report_and_rows_are_written_beside_a_runs_own_files(sent, tmp_path):
    succeed("inspect", sent.path, "--export", sent.path / "rows.parquet")
    succeed("inspect", sent.path, "--export", sent.report / "rows.parquet")
