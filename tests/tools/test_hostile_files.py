"""Files that somebody else prepared: a line of CASES says what opens which file, what stands in its place, and the end.

Whatever it is, nothing outside changes, nothing hangs, and a command ends in one line of error or does what it should.
"""

import os
import re
import shutil
import socket
import tempfile
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thermopile.pipeline.conversion.conversion import convert
from thermopile.pipeline.conversion.marker import read_bad_samples
from thermopile.pipeline.conversion.partial import Partial, claimed
from thermopile.pipeline.conversion.plan import ConvertSettings, Plan
from thermopile.pipeline.errors import BadSampleError, DatasetError
from thermopile.pipeline.sources import Asked
from thermopile.pipeline.sources.folder import FolderSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.sources.listing import read_regular_file
from thermopile.storage.files import open_own, open_regular, own_directory, read_regular, write_atomically
from thermopile.storage.local import LocalPath
from thermopile.storage.sealed_json import seal_line
from thermopile.storage.selection import ABOUT, IDS, WEIGHTS
from thermopile.trainer.run_directory import RunDirectory

from support.cli import assert_one_line, cli, sets, succeed
from support.conversions import dataset_of
from support.pictures import as_bytes, draw

# What stands in a file's place; bytes are its content.


def unix_socket(at, outside):
    # Bound elsewhere: the path of a socket must be short.
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{short}/s")
        os.rename(f"{short}/s", at)


def huge(at, outside):
    at.touch()
    os.truncate(at, 1 << 40)


TRAPS = {
    "link": lambda at, outside: at.symlink_to(outside / "file"),
    "chain": lambda at, outside: at.symlink_to(outside / "link"),
    "circle": lambda at, outside: at.symlink_to(at.name),
    "dangling": lambda at, outside: at.symlink_to(outside / "new"),
    "folder link": lambda at, outside: at.symlink_to(outside / "folder"),
    "device": lambda at, outside: at.symlink_to("/dev/zero"),
    "hard link": lambda at, outside: at.hardlink_to(outside / "file"),
    "pipe": lambda at, outside: os.mkfifo(at),
    "folder": lambda at, outside: at.mkdir(),
    "nothing": lambda at, outside: None,
    "socket": unix_socket,
    "huge": huge,
}

# What opens it: commands on a run, a conversion that goes on, and the functions that all of these use.

COMMANDS = {
    "status": "status {run}", "status --json": "status {run} --json", "resume": "train --out {run} --resume",
    "rows": "inspect {run} --export {new}.csv", "inspect": "inspect {run}", "log": "state log {run}",
    "check": "state check {run}", "export": "export {run} --to {new} --format safetensors",
    "eval": "eval {run} --train {data} --test {data}",
}  # fmt: skip
SELECTION = np.arange(0, 320, 20)


def go_on(given, **options):
    out = LocalPath(given.parent / "out")
    return convert(GlyphSource(0), out, ConvertSettings(), workers=1, selection=SELECTION, **options)


def list_left_out(given):
    plan = Plan.of(GlyphSource(0), ConvertSettings(), Asked(selection=SELECTION))
    with claimed(LocalPath(given.parent / "out")) as partial:
        assert partial.bad_samples(plan.model_copy(update={"shards": 1})) == []


FUNCTIONS = {
    "open to read": lambda given: open_regular(given / "file").close(),
    "open to change": lambda given: os.close(open_own(given / "file", os.O_RDWR | os.O_CREAT)),
    "read a little": lambda given: read_regular(given / "file", max_bytes=9),
    "read": lambda given: read_regular(given / "file"),
    "replace": lambda given: write_atomically(given / "file", b"new"),
    "make a folder": lambda given: own_directory(given / "file"),
    "read a picture": lambda given: read_regular_file(os.fsencode(given / "file")),
    "read a\0b": lambda given: read_regular_file(b"a\0b"),
    "read a long name": lambda given: read_regular_file(b"a" * 300),
    "resume conversion": lambda given: go_on(given, resume=True),
    "restart conversion": lambda given: go_on(given, overwrite=True),
    "list left out": list_left_out,
}

DEEP = b"[" * 100_000
LATEST, INFO, MARKER = "checkpoints/latest", "checkpoints/step-2/checkpoint.json", "parts/part-00000.done.json"
LOGS = ("metrics.jsonl", "warnings.log", "state.lock")
WRITTEN = "no file is written through links"


def cases(openers, names, traps, words):
    """Each opener with each file and each trap. words: pattern of the refusal; None: it does as well without."""
    columns = ((each,) if isinstance(each, str | bytes) else each for each in (openers, names, traps))
    return [*product(*columns, [words])]


CASES = [
    *cases(("open to read", "open to change"), "file", ("pipe", "device", "socket", "folder"), "file|No such device"),
    *cases("open to change", "file", ("link", "hard link"), "link"),
    *cases("open to change", "file", ("nothing", b""), None),
    *cases(("open to read", "read"), "file", ("link", "chain"), None),
    *cases("read a little", "file", ("link", b"1234567890"), "larger than the limit for such a file, 9 bytes"),
    *cases("replace", "file", ("pipe", "socket", "folder"), "which a file cannot replace"),
    *cases("replace", "file", ("link", "dangling", "device"), None),
    *cases("make a folder", "file", ("link", "folder link", "dangling", b""), "file is"),
    *cases("make a folder", "file", ("folder", "nothing"), None),
    *cases("read a picture", "file", ("pipe", "device", "socket", "folder"), "^not a regular file"),
    *cases("read a picture", "file", "circle", "symbolic links"),
    *cases("read a picture", "file", ("dangling", "nothing"), "No such file"),
    *cases("read a picture", "file", "huge", "1,099,511,627,776 bytes, too large for a picture"),
    *cases("read a picture", "file", ("link", "chain"), None),
    *cases("read a\0b", "file", "nothing", "not the name of a file"),
    *cases("read a long name", "file", "nothing", "too long"),
    # A conversion that was interrupted.
    *cases("resume conversion", ("", "parts", "dataset", "dataset/shards"), "folder link", WRITTEN),
    *cases("resume conversion", ("lock", "plan.json", "dataset/tokenizer.json"), "link", "is a link"),
    *cases("resume conversion", (MARKER, "dataset/shards/shard-00000.beton", "dataset/errors.jsonl"), "link", None),
    *cases("restart conversion", "parts", "folder link", None),
    *cases("list left out", "parts/part-00000.errors.jsonl", "link", None),
    *cases("resume conversion", "lock", "pipe", "lock"),
    *cases("resume conversion", MARKER, "pipe", "part-00000.done.json"),
    *cases("resume conversion", MARKER, DEEP, None),
    # Where a run writes as it goes on.
    *cases("resume", LOGS, ("link", "dangling"), WRITTEN),
    *cases("resume", ("state", "state.working", "checkpoints", "tensorboard"), "folder link", WRITTEN),
    *cases("resume", LOGS, "hard link", "second hard link"),
    *cases("resume", LOGS, "pipe", "named pipe"),
    *cases("resume", "metrics.jsonl", "folder", "is a directory"),
    *cases("resume", "metrics.jsonl", "socket", "metrics.jsonl"),
    *cases("resume", "state.working", ("pipe", b"a file"), "state.working is not a directory"),
    *cases("inspect", "report", ("folder link", "dangling"), WRITTEN),
    *cases("inspect", "report", b"a file", "choose another directory"),
    # What it trains on.
    *((command, f"selection/{name}", trap, f"selection/{name}") for command in ("resume", "rows")
      for name in (IDS, WEIGHTS, ABOUT) for trap in ("link", "dangling", "pipe", "device", "folder", "huge")),
    *cases("resume", "selection", "folder link", WRITTEN),
    *cases("rows", "selection", "folder link", f"selection/{ABOUT}"),
    # Settings.
    *cases(("status", "resume", "rows", "export", "eval"), "config.toml", ("pipe", "device"), "config.toml"),
    *cases("status", "config.toml", ("folder", "socket", "dangling", "huge"), "config.toml"),
    *cases(("status", "resume"), "config.toml",
           (b"\xff\xfe", b"a" + b".a" * 50_000 + b" = 1", b"a = " + DEEP, b"objective.x = " + b"[" * 90 + b"]" * 90,
            b"seed = " + b"9" * 5000, b"seed = 'one'", b"data = 3", b"model = [1]"), "config.toml"),
    # What a command can do without.
    *cases("status --json", LOGS, ("pipe", "device", "folder", "socket", "huge"), None),
    *cases("status --json", "metrics.jsonl",
           (DEEP, b'{"step": 1e999, "loss": 1}', b'{"step": "2", "loss": []}', b"[]\n3\nnull",
            b'{"step": ' + b"9" * 5000), None),
    *cases("rows", (LATEST, INFO), ("pipe", "device", DEEP, b"{}"), None),
    *cases(("resume", "export", "eval"), LATEST, ("pipe", "device"), None),  # the newest is known by its own name
    *cases("resume", LATEST, (b"../../outside/folder", b"step-" + b"9" * 5000), None),
    *cases(("status", "log", "check", "export"), LOGS, "link", None),
    *cases("check", "state.lock", "pipe", None),
]  # fmt: skip
WIDE = {("rows", f"selection/{name}") for name in (IDS, WEIGHTS)}
"""Openers and files of which `resume` has the same cases."""
SETTINGS = ("epochs=1", "batch_size=32", "order.canonical_shards=2", "data.image_size=16", "data.workers=1",
            "model.dim=8", "model.image.config.width=4", "log_every=1")  # fmt: skip


@pytest.fixture(scope="module")
def trained(hostile_dataset, tmp_path_factory):
    """A run of two steps, with one checkpoint and all that a run may have beside it."""
    path = tmp_path_factory.mktemp("trained") / "run"
    kept = path.with_name("kept.parquet")
    pq.write_table(pa.table({"sample_id": range(1, 65), "weight": [1, 3] * 32}), kept)
    chosen = ("--select", kept, "--weights", kept, *sets(*SETTINGS))
    succeed("train", "--data", hostile_dataset.path, "--out", path, *chosen)
    (path / "warnings.log").write_text("2026-01-01 00:00:00+0000 a warning\n")
    for name in ("report", "tensorboard", "state.working"):
        (path / name).mkdir()
    return path


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A conversion whose one shard is done, killed before the dataset was put together."""

    def killed(*_):
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("interrupted") / ".out.partial"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Partial, "assemble", killed)
        with pytest.raises(KeyboardInterrupt):
            go_on(folder)
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


@pytest.fixture
def outside(tmp_path):
    """Files of nobody's business."""
    (tmp_path / "outside" / "folder").mkdir(parents=True)
    for name in ("file", "folder/file"):
        (tmp_path / "outside" / name).write_text("precious\n" * 100)
    (tmp_path / "outside" / "link").symlink_to("file")
    return tmp_path / "outside"


@pytest.fixture
def sent(trained, tmp_path):
    """A copy of the run for one test."""
    return RunDirectory(shutil.copytree(trained, tmp_path / "run"))


def contents(folder):
    """Every name below, with what kind of thing it is, its length and when it was changed."""
    found = ((path, path.lstat()) for path in (folder, *folder.rglob("*")))
    return {str(path): (status.st_mode, status.st_size, status.st_mtime_ns) for path, status in found}


def refusal(opener, given, dataset):
    """Open; return the one line that refuses, or None."""
    if opener in COMMANDS:
        names = {"run": given, "new": given.with_name("new"), "data": dataset.path}
        done = cli(*(word.format(**names) for word in COMMANDS[opener].split()))
        errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        assert len(errors) == (done.exit_code != 0), done.output
        assert "should not happen" not in done.output
        return errors[0] if errors else None
    try:
        FUNCTIONS[opener](given)
    except (OSError, DatasetError, BadSampleError) as error:
        assert not (given.parent / "out").exists()
        return str(error)
    return None


def shown(trap):
    return trap if isinstance(trap, str) else repr(trap[:20])


@pytest.mark.parametrize(
    ("opener", "name", "trap", "words"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{shown(case[2])}", marks=[pytest.mark.wide] * (case[:2] in WIDE))
        for case in CASES
    ],
)
def test_a_trap_in_the_place_of_a_file(opener, name, trap, words, outside, request, hostile_dataset):
    made = "trained" if opener in COMMANDS else "interrupted" if "convers" in opener or "list" in opener else "empty"
    origin = request.getfixturevalue(made)
    given = shutil.copytree(origin, outside.with_name(origin.name))
    if (place := given / name).is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    TRAPS[trap](place, outside) if isinstance(trap, str) else place.write_bytes(trap)
    reads = opener in COMMANDS and opener not in ("resume", "inspect")
    before = contents(outside), reads and contents(given)
    said = refusal(opener, given, hostile_dataset)
    assert (contents(outside), reads and contents(given)) == before
    assert said is None if words is None else re.search(words, said or "")


def test_a_marker_that_was_changed_has_its_shard_written_again(interrupted, tmp_path):
    given = shutil.copytree(interrupted, tmp_path / ".out.partial")
    (given / MARKER).write_text((given / MARKER).read_text().replace('"rows": 16', '"rows": 17'))
    summary = go_on(given, resume=True)
    assert (summary.seen, summary.index.n) == (16, 16)


def test_half_a_surrogate_pair_in_the_metrics_is_shown_escaped(sent):
    line = seal_line({"step": 1, "evaluation": {"\ud800": {"all": 1}}})
    sent.metrics_file.write_bytes(line + b"\n")
    assert "[U+D800] 1" in succeed("status", sent.path).stdout


def test_of_a_folder_each_picture_is_stored_and_each_trap_left_out_with_a_reason_that_quotes_no_file(tmp_path, outside):
    root, jpeg = tmp_path / "in", as_bytes(draw(1), "JPEG")
    (root / "album.jpg").mkdir(parents=True)
    secrets = {"shadow": b"root:$6$secret", "token.ppm": b"P6 secret-secret 1 255\n", "bits.bmp": b"BMsecret" * 20,
               "chunk.png": b"\x89PNG\r\n\x1a\n\0\0\0\x04secretsecret"}  # fmt: skip
    for name, data in secrets.items():
        (outside / name).write_bytes(data)
        (root / f"{name}.jpg").symlink_to(outside / name)
    sound = {
        "really-jpeg.png",
        "album.jpg/inside.jpg",
        "new\nline.jpg",
        "\u202egpj.exe.jpg",
        "-rf.jpg",
        "caf\udce9.jpg",
    }
    for name in sound:
        (root / name).write_bytes(jpeg)
    (outside / "folder" / "1.jpg").write_bytes(jpeg)
    (root / "linked.jpg").symlink_to(outside / "folder" / "1.jpg")
    (root / "folder.jpg").symlink_to(outside / "folder")
    reasons = dict.fromkeys(("device", "pipe", "socket"), "not a regular file")
    reasons |= {"circle": "Too many levels", "dangling": "No such file", "huge": "too large for a picture"}
    for trap in reasons:
        TRAPS[trap](root / f"{trap}.jpg", outside)
    dataset = dataset_of(FolderSource(root), tmp_path / "out", max_error_rate=1.0)
    readable = {name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for name in sound}
    assert {row["uri"] for row in dataset.rows(range(dataset.n))} == readable | {"linked.jpg", "folder.jpg/1.jpg"}
    found = {bad.uri.removesuffix(".jpg"): bad.reason for bad in read_bad_samples(dataset.place / "errors.jsonl")}
    assert {name: reason for name, reason in reasons.items() if reason not in found[name]} == {}
    assert found.keys() == reasons.keys() | secrets.keys()
    assert [name for name in secrets if re.search(r"secr|root|\d", found[name])] == []


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


@pytest.mark.parametrize(("table", "key", "value", "command", "words"), NONSENSE)
def test_settings_that_make_no_sense_are_refused_by_name(sent, hostile_dataset, table, key, value, command, words):
    # As a run would have recorded them, whose digest is right.
    config = sent.config()
    of_table = getattr(config, table)
    value = type(getattr(of_table, key)).model_construct(**value) if isinstance(value, dict) else value
    sent.record(config.model_copy(update={table: of_table.model_copy(update={key: value})}))
    assert words in refusal(command, sent.path, hostile_dataset)


def test_a_run_may_itself_be_reached_by_a_link(sent, hostile_dataset, tmp_path):
    (tmp_path / "by").symlink_to(sent.path)
    for command in ("resume", "rows"):
        assert refusal(command, tmp_path / "by", hostile_dataset) is None


def test_a_path_that_is_not_utf_8_is_shown_escaped(sent, tmp_path, hostile_dataset):
    odd = sent.path.rename(tmp_path / "caf\udce9")
    said = refusal("resume", odd, hostile_dataset)
    assert said.startswith(f"Error: {tmp_path}/caf[U+DCE9] is not valid UTF-8, so no checkpoint can be written")
    assert "caf[U+DCE9]" in cli("status", odd).stdout
    data = shutil.copytree(hostile_dataset.path, tmp_path / "data\udce9")
    refused = cli("train", "--data", data, "--out", tmp_path / "new", *sets(*SETTINGS))
    said = rf"""'path = "{tmp_path}/data\udce9"' is not valid UTF-8; rename the file, directory or class"""
    assert_one_line(refused, 2, said)


# Where commands write.


@pytest.mark.parametrize(
    "command",
    [
        "fork {run} --out {run}/new", "export {run} --format safetensors --to {run}/checkpoints/step-2/new",
        "train --data {data} --out {run}/report/new", "convert glyphs {link}/new", "fork {run} --out {link}/new",
        "train --data {data} --out {run}/new", "convert glyphs {run}/report/new",
        "inspect {run} --export {run}/state/new.parquet", "inspect {run} --to {run}/selection",
        "curate {run} --drop-misfits --keep {run}/checkpoints/new.parquet",
        "embed {run} {data} {run}/checkpoints/step-2/new.parquet", "show {data} --out {run}/state/new.html",
        "effect {run} {run} --test {data} --out {run}/state.working/new.html",
    ],
)  # fmt: skip
def test_no_command_makes_a_folder_in_a_run_or_a_file_where_a_run_checks_or_clears(
    sent, hostile_dataset, tmp_path, command
):
    (tmp_path / "link").symlink_to(sent.checkpoints)
    words = command.format(run=sent.path, data=hostile_dataset.path, link=tmp_path / "link").split()
    before = contents(sent.path)
    assert_one_line(cli(*words), 2, words[-1], f"in the run {sent.path}, which")
    assert contents(sent.path) == before


def test_a_report_and_rows_are_written_beside_a_runs_own_files(sent):
    for folder in (sent.path, sent.report):
        succeed("inspect", sent.path, "--export", folder / "rows.parquet")


def test_code_that_a_run_names_does_not_run_unasked(sent, hostile_dataset, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    (tmp_path / "sent_module.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\nviews = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = sent.config()
    data = config.data.model_copy(update={"augmentation": "sent_module:views"})
    sent.record(config.model_copy(update={"data": data}))
    for command in ("status", "rows", "export", "eval"):
        assert refusal(command, sent.path, hostile_dataset) is None
    # Also where its name looks like another origin of settings.
    for name in ("run", "preset x", "--set"):
        sent = RunDirectory(sent.path.rename(sent.path.with_name(name)))
        said = f"{sent.config_file} sets data.augmentation = 'sent_module:views'"
        assert_one_line(cli("train", "--out", sent.path, "--resume"), 2, said)
        assert not trace.exists()
