"""DALI over a long time: damaged JPEGs in the middle of an epoch, and the memory after many batches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import chain, count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from thermopile.pipeline.dataset.row_records import write_row_records
from thermopile.pipeline.dataset.stored_sample import checksum
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.order.order import Order
from thermopile.tools.bench.loader import WARM_UP, Work, dali
from thermopile.tools.bench.step import open_trainer
from thermopile.trainer.run_directory import RunDirectory

from .feeding import photographs_of
from .findings import Findings

BATCHES = 2000
MAX_GROWTH_MB = 64
IMAGES, STEPS = 640, 10
"""Pictures and steps of the run that meets a damaged JPEG."""


def memory(found: Findings) -> None:
    """Memory of the process and of the GPU after each eighth of many batches of SimCLR's recipe, epoch after epoch."""
    size, batch, batches = (16, 16, 40) if found.small else (224, 64, BATCHES)
    dataset = photographs_of(found)
    order = Order.create(dataset.n, batch)
    work = Work(dataset, order, "simclr", 2, size, order.steps_per_epoch - WARM_UP, torch.device(found.device))
    grown, first = 0.0, None
    with dali(work) as epoch:
        for served, _ in enumerate(islice(chain.from_iterable(map(epoch, count())), batches), 1):
            if served % (batches // 8):
                continue
            now = _megabytes(found.device)
            first = first or now if served > batches // 8 else None  # pools fill during the first eighth
            grown = max(now[0] - first[0], now[1] - first[1]) if first else 0.0
            found.row(f"Two views of simclr, {size}×{size}, batches of {batch}", {
                "batches": f"{served:,}", "the process": f"{now[0]:,.0f} MB",
                "the GPU": f"{now[1]:,.0f} MB" if found.device == "cuda" else "–",
            })  # fmt: skip
    if not found.small:
        found.check(f"memory that grew in batches {batches // 4:,} to {batches:,}, of the process or the GPU",
                    f"≤ {MAX_GROWTH_MB} MB", f"{grown:,.0f} MB", grown <= MAX_GROWTH_MB)  # fmt: skip


def _megabytes(device: str) -> tuple[float, float]:
    """Return what this process has in memory, and what is in use on the GPU: DALI's memory is not torch's."""
    pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
    free, total = torch.cuda.mem_get_info() if device == "cuda" else (0, 0)
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, (total - free) / 1e6


def damage(found: Findings) -> None:
    """Train on pictures of which one, in the middle of the first epoch, is damaged in a way that only DALI can find."""
    from ..photographs import photographs

    images = IMAGES // 4 if found.small else IMAGES
    settings: dict[str, Any] = {"device": found.device, "batch_size": images // STEPS, "log_every": 1,
                                "data": {"loader": "dali", "image_size": 32 if found.small else 224}}  # fmt: skip
    with TemporaryDirectory(dir=found.folder) as temporary:
        folder = Path(temporary)
        sound = photographs(folder, images)
        with open_trainer(sound, settings, STEPS, folder) as trainer:
            victim = int(trainer.run.order.batch_ids(0, STEPS // 2)[0])
        for name, change in {"garbage": _garbage, "zeros in its second half": _cut_short}.items():
            broken = Dataset(shutil.copytree(sound.path, folder / name))
            _change(broken, victim, change)
            done, steps = _train(broken, settings, folder / f"run on {name}")
            lines = done.stderr.strip().splitlines()
            told = "Traceback" not in done.stderr and bool(lines) and f"sample {victim} " in lines[-1]
            found.row(f"An epoch of {STEPS} steps; sample {victim} of the sixth is damaged", {
                "damage": name, "exit code": f"{done.returncode}", "steps": f"{steps}",
                "last line": lines[-1].replace(str(folder), "…") if lines and done.returncode else "–",
            })  # fmt: skip
            # nvJPEG may fill up what is missing, as other decoders do.
            if name == "garbage" or done.returncode:
                found.check(f"a damaged JPEG, {name}: named by the last line, without a traceback", "exit code 1",
                            f"exit code {done.returncode}{'' if told else ', not named'}",
                            told and done.returncode == 1)  # fmt: skip


def _train(dataset: Dataset, settings: dict[str, Any], out: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    """Train as a user does; return how it ended, and after how many steps."""
    flat = {key: value for key, value in settings.items() if key != "data"}
    flat |= {f"data.{key}": value for key, value in settings["data"].items()}
    words = [word for key, value in flat.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "thermopile", "train", "--data", str(dataset.path), "--out", str(out),
               "--steps", f"{STEPS}", *words]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    metrics = RunDirectory(out).metrics_file
    lines = metrics.read_text("utf-8").splitlines() if metrics.exists() else []
    return done, max((json.loads(line).get("step", 0) for line in lines), default=0)


def _garbage(jpeg: bytes) -> bytes:
    """Leave the header that says how large the picture is."""
    end = jpeg.index(b"\xff\xc0") + 19
    return jpeg[:end] + np.random.default_rng(0).bytes(len(jpeg) - end)


def _cut_short(jpeg: bytes) -> bytes:
    return jpeg[: len(jpeg) // 2] + bytes(len(jpeg) - len(jpeg) // 2)


def _change(dataset: Dataset, sample_id: int, change: Any) -> None:
    """Change a stored JPEG, and its checksum with it."""
    (shard,), (row,) = dataset.locate(np.array([sample_id]))
    jpeg, records = dataset.jpeg(sample_id), dataset.records(shard)
    beton = dataset.path / "shards" / f"shard-{shard:05d}.beton"
    changed = change(jpeg)
    records["jpeg_checksum"][row] = checksum(np.frombuffer(changed, np.uint8).copy())
    with beton.open("r+b") as file:
        file.seek(int(records["jpeg_at"][row]))
        file.write(changed)
    rows = beton.with_suffix(".rows")
    rows.unlink()
    write_row_records(rows, records, beton.stat().st_size)
