"""Flip single bits in the files of a dataset and of a run, and judge what every command makes of it.

One process imports all that the commands need. Each flip is tried in a fork of it, so that a crash ends only the fork,
and a command takes a second instead of ten. Prints one JSON object per flip.

    python tests/support/programs/flip_bits.py FOLDER --flips 20 --seed 0 --kinds manifest,chunk
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner
from PIL import Image
from safetensors import safe_open

import thermopile.pipeline.loading.ffcv_loader
import thermopile.tools.inspection.as_json
import thermopile.trainer.evaluation.evaluate
import thermopile.trainer.loop  # noqa: F401 (imported so that the forks need not)
from thermopile.state_store.reader import StateReader
from thermopile.tools.cli import main

SAMPLES = 160
"""Enough for a block of rows to be a file of its own: icechunk writes smaller ones into its manifests."""
SECONDS_OF_COMMANDS, SECONDS_OF_SETUP = 120, 1200
"""More than the commands on one file, and the set-up, take on a busy machine: what takes longer hangs."""

DATASET_KINDS = {
    "index": "dataset.json",
    "pixels": "shards/*.beton",
    "rows": "shards/*.rows",
    "table": "shards/*.parquet",
    "tokenizer": "tokenizer.json",
}
RUN_KINDS = {
    "settings": "config.toml",
    "metrics": "metrics.jsonl",
    "checkpoint": "checkpoints/step-*/checkpoint.json",
    "training": "checkpoints/step-*/training.json",
    "tensors": "checkpoints/step-*/tensors.safetensors",
    "latest": "checkpoints/latest",
    "state index": "state/thermopile.json",
    "state index's copy": "state/thermopile.copy.json",
    "snapshot": "state/snapshots/*",
    "manifest": "state/manifests/*",
    "reference": "state/refs/*/*",
    "chunk": "state/chunks/*",
}
SELECTION_KINDS = {
    "selected ids": "selection/ids.int64",
    "weights": "selection/weights.float32",
    "holes": "selection/without.int64",
    "selection": "selection/selection.json",
}
"""Kinds of files that only a run on selected samples has."""
KINDS = DATASET_KINDS | RUN_KINDS | SELECTION_KINDS

SETTINGS = ("batch_size=32", "order.canonical_shards=1", "data.image_size=32", "model.dim=8", "log_every=1", "epochs=2",
            "checkpoint.every_steps=5", "objective.name=isogclr", "data.loader=ffcv", "data.workers=1")  # fmt: skip


def make_material(folder):
    """A dataset of pairs with classes, and two runs of it with two checkpoints each: on all samples, and on most."""
    source, noise = folder / "source", np.random.default_rng(0)
    source.mkdir()
    lines = ["image,caption,group"]
    for i in range(SAMPLES):
        Image.fromarray(noise.integers(0, 255, (36, 40, 3), dtype=np.uint8)).save(source / f"{i}.jpg", quality=80)
        lines.append(f"{i}.jpg,a picture of thing {i % 4} number {i},class {i % 4}")
    (source / "list.csv").write_text("\n".join(lines))
    kept = np.flatnonzero(np.arange(SAMPLES) % 5)
    pq.write_table(pa.table({"sample_id": kept, "weight": 1 + kept % 3}), source / "kept.parquet")
    pq.write_table(pa.table({"uri": [f"{i}.jpg" for i in kept[::9]]}), source / "gone.parquet")
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    select = ["--select", source / "kept.parquet", "--weights", source / "kept.parquet"]
    select += ["--without", source / "gone.parquet"]
    for command in (
        ["convert", "csv", source / "list.csv", folder / "data", "--image", "image", "--caption", "caption",
         "--group", "group", "--workers", "1"],
        ["train", "--data", folder / "data", "--out", folder / "run", *settings],
        ["train", "--data", folder / "data", "--out", folder / "selected", *select, *settings],
    ):  # fmt: skip
        done = CliRunner().invoke(main, list(map(str, command)))
        assert done.exit_code == 0, done.output


def run_of(kind):
    return "selected" if kind in SELECTION_KINDS else "run"


def commands_on(kind, folder):
    """Return every command that reads a file of that kind."""
    data, run = folder / "data", folder / run_of(kind)
    settings = [part for setting in (*SETTINGS, "epochs=1") for part in ("--set", setting)]
    train = ["train", "--data", data, "--out", folder / "new", *settings]
    resume = ["train", "--out", run, "--resume", "--set", "epochs=3", "--allow-change", "epochs"]
    inspect, score = ["inspect", run, "--json"], ["eval", run, "--train", data, "--test", data, "--json"]
    export = ["export", run, "--to", folder / "exported", "--format", "safetensors"]
    if kind in DATASET_KINDS:
        return [["convert", "check", data], train, inspect, score, ["show", data, "--out", folder / "show.html"]]
    commands = [["status", run, "--json"], inspect]
    if kind in ("settings", "checkpoint", "training", "tensors", "latest"):
        commands += [score, export]
    if kind in ("state index", "state index's copy", "snapshot", "manifest", "reference", "chunk", *SELECTION_KINDS):
        commands += [["state", "log", run, "--json"], ["state", "check", run, "--all", "--json"]]
    return [*commands, resume]  # last: it changes the run


def outcome_of(command, folder):
    """Exit code, what was printed, and what was made of it; without places and times."""
    began = time.monotonic()
    done = CliRunner().invoke(main, list(map(str, command)))
    crashed = done.exception is not None and not isinstance(done.exception, SystemExit)
    out = re.sub(r'"[a-z_]*(seconds|written_at|age)[a-z_]*": [^,}\n]*', "", done.stdout)
    out = re.sub(r"[\d.,:]+ ?(ms|s|samples/s|min|%)", "", out)
    made = made_by(command, folder) if done.exit_code == 0 else ""
    return {
        "command": command[0] if command[0] not in ("state", "convert") else " ".join(command[:2]),
        "exit_code": done.exit_code,
        "result": hashlib.sha256(f"{out}{made}".encode()).hexdigest()[:12],
        "words": f"Traceback: {done.exception!r}" if crashed else done.stderr[-4000:] + done.stdout[-4000:],
        "seconds": round(time.monotonic() - began, 2),
    }


def made_by(command, folder):
    if command[0] == "train":
        return trained(command[command.index("--out") + 1])
    made = {"export": "exported", "show": "show.html"}.get(command[0])
    files = sorted((folder / made).rglob("*")) if made else []
    files = files or ([folder / made] if made else [])
    return "".join(digest_of(file) for file in files if file.is_file())


def digest_of(file):
    if file.suffix != ".safetensors":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    with safe_open(file, "numpy") as tensors:  # its header is in another order at every writing
        facts = [sorted((tensors.metadata() or {}).items())]
        facts += [(name, tensors.get_tensor(name).tobytes()) for name in sorted(tensors.keys())]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def trained(run):
    """The losses of the last steps, and the state and the weights after them."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[-2:]]
    state = StateReader.open(run / "state")
    digest = hashlib.sha256(repr([(line["step"], line["loss"]) for line in lines]).encode())
    for column in state.columns:
        digest.update(state.column(column).tobytes())
    (tensors,) = (run / "checkpoints" / (run / "checkpoints/latest").read_text().strip()).glob("*.safetensors")
    digest.update(digest_of(tensors).encode())
    return digest.hexdigest()


def in_fork(work, seconds):
    """Return what `work` returns in a forked process, or how that ended; it is killed after `seconds`."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # a library's last words; what commands say is captured
        signal.alarm(seconds)
        try:
            answer = json.dumps(work()).encode()
        except BaseException as error:  # noqa: BLE001 (told)
            answer = json.dumps(f"failed: {error!r}").encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        hung = os.WTERMSIG(status) == signal.SIGALRM
        return "hung" if hung else f"crashed by {signal.Signals(os.WTERMSIG(status)).name}"
    return json.loads(answer)


def fresh_copy(material, folder):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(material, folder, symlinks=True)


def run_undamaged(material, folder):
    """Return the outcome of every command without a flip; compile and import what commands need, once for all forks."""
    fresh_copy(material, folder)
    # Here, not in a fork: it compiles the decoder. It begins no thread that outlives it.
    done = CliRunner().invoke(main, ["show", str(folder / "data"), "--out", str(folder / "show.html")])
    assert done.exit_code == 0, done.output
    expected, names = in_fork(lambda: outcomes_of_all_commands(material, folder), SECONDS_OF_SETUP)
    for name in names:
        with contextlib.suppress(ImportError):  # such as one that its own package has made
            importlib.import_module(name)
    failed = [outcome for outcome in expected.values() if outcome["exit_code"] != 0]
    assert not failed, failed
    return expected


def outcomes_of_all_commands(material, folder):
    outcomes = {}
    for kind in ("index", "settings", "chunk", "weights"):  # which together need every command
        fresh_copy(material, folder)
        for command in commands_on(kind, folder):
            if str(command) not in outcomes:
                outcomes[str(command)] = outcome_of(command, folder)
    return outcomes, list(sys.modules)


def chosen_bit(file, chance):
    """A bit of a byte that says something: FFCV pads its files with megabytes of zeros."""
    data = np.frombuffer(file.read_bytes(), np.uint8)
    says = np.flatnonzero(np.convolve(data != 0, np.ones(64), "same")[: len(data)])
    return 8 * int(says[chance.randrange(len(says))]) + chance.randrange(8)


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def judge(found, expected, name):
    """What a command's outcome says of a flip in the file of that name."""
    if "Traceback" in found["words"] or "should not happen" in found["words"]:
        return "traceback"
    if found["exit_code"] not in (0, 1, 2):
        return "odd exit code"
    told = name in found["words"]
    if found["exit_code"] == 0 and found["result"] == expected["result"]:
        return "told, same result" if told else "unused"
    if told:
        return "told"
    return "another result in silence" if found["exit_code"] == 0 else "error without the file's name"


def named_as(kind, file):
    """How messages name a file: icechunk's have random names, so the folder goes with it; checkpoints go by step."""
    return {
        "snapshot": f"snapshots/{file.name}", "manifest": f"manifests/{file.name}", "chunk": f"chunks/{file.name}",
        "pixels": "shard", "rows": "shard", "table": "shard",
    }.get(kind, file.name)  # fmt: skip


def main_program():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flips", type=int, default=5, help="of each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    folder, material = arguments.folder / "work", arguments.folder / "material"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if not material.exists():
        folder.mkdir()
        made = in_fork(lambda: make_material(folder), SECONDS_OF_SETUP)
        assert made is None, made
        folder.rename(material)
    expected = run_undamaged(material, folder)
    for kind in arguments.kinds.split(","):
        root, commands = Path("data" if kind in DATASET_KINDS else run_of(kind)), commands_on(kind, folder)
        files = sorted(path.relative_to(material) for path in (material / root).glob(KINDS[kind]) if path.is_file())
        assert files, f"no file of the kind {kind}"
        chance = random.Random(f"{kind}/{arguments.seed}")
        for _ in range(arguments.flips):
            file, began = chance.choice(files), time.monotonic()
            bit = chosen_bit(material / file, chance)
            fresh_copy(material, folder)
            flip(folder / file, bit)
            found = in_fork(
                lambda commands=commands: [outcome_of(each, folder) for each in commands], SECONDS_OF_COMMANDS
            )
            verdicts = found if isinstance(found, str) else [
                {**each, "verdict": judge(each, expected[str(command)], named_as(kind, file))}
                for each, command in zip(found, commands, strict=True)
            ]  # fmt: skip
            print(json.dumps({"kind": kind, "file": str(file), "bit": bit, "found": verdicts,
                              "seconds": round(time.monotonic() - began, 2)}), flush=True)  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main_program())
