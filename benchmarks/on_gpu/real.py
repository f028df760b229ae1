"""Real training for minutes: what three objectives learn of the same pairs, and what a kill in the middle changes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import thermopile
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.tools.bench.step import WARM_UP
from thermopile.trainer.loop import Trainer
from thermopile.trainer.metrics.step_report import TIME, split
from thermopile.trainer.run_directory import RunDirectory

from .copies import counted_waits
from .findings import Findings
from .steps import IMAGE, SMALL_IMAGE

PAIRS = "THERMOPILE_PAIRS"
"""Environment variable: a folder with pairs.csv and small pictures; without it, glyphs are drawn."""
ICONS = "THERMOPILE_ICONS"
"""Environment variable: a file that `python -m benchmarks.icons FOLDER --icons 50000` has made."""
STEPS, BATCH, LOG_EVERY = 800, 512, 50
SMALL_STEPS, SMALL_BATCH, SMALL_LOG_EVERY = 40, 32, 5
HELD_OUT = 1000
OBJECTIVES: dict[str, dict[str, Any]] = {
    "clip": {},
    "isogclr": {"gamma": 0.8, "beta_u": 0.9, "rho": 1.0, "tau_init": 0.05, "tau_min": 0.005, "eta": 0.005,
                "tau_step": 0.1},
    "fastclip_v3": {},
}  # fmt: skip
"""The settings of isogclr are those of the preset `small`."""
STOPPED = "isogclr"
"""The objective that is trained once more, killed and resumed, and whose report is written."""


def measure(found: Findings) -> None:
    """Train each objective; tell what it recalls of held-out pairs, and what it waited for."""
    began = time.monotonic()
    data, what = _data(found)
    found.note(f"{what[0].upper()}{what[1:]} were converted in {time.monotonic() - began:.0f} s.")
    for name in OBJECTIVES:
        began = time.monotonic()
        path = found.folder / f"real-{name}"
        waits = _train(path, data, _settings(found, name), found.device)
        _row(found, what, path, name, time.monotonic() - began)
        if found.device == "cuda":
            places = ", ".join(f"{place} × {times}" for place, times in waits.most_common(3))
            found.check(f"waits for the device in {LOG_EVERY - 2} steps of real training: {name}", "0",
                        f"{waits.total()} {places}".strip(), not waits)  # fmt: skip
    findings = thermopile.inspect(found.folder / f"real-{STOPPED}")
    assert findings.page is not None
    found.keep_folder("real-report", findings.page.parent)
    for sentence in findings.first_sentences:
        found.note(f"The report of {STOPPED}: {sentence}")
    _killed_and_resumed(found, data, what)


def _killed_and_resumed(found: Findings, data: Path, what: str) -> None:
    """Train again; the process is killed between two checkpoints, and another goes on."""
    began = time.monotonic()
    path, tree = found.folder / "real-killed", _settings(found, STOPPED)
    steps, batch = tree["steps"], tree["batch_size"]
    at = 3 * steps // 8
    process = get_context("spawn").Process(target=_train_until_killed, args=(path, data, tree, at))
    process.start()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise SystemExit(f"the process to be killed ended with exit code {process.exitcode}")
    _train(path, data, tree, found.device)
    _row(found, what, path, f"{STOPPED}, killed after step {at}, resumed", time.monotonic() - began)
    logged = [line["step"] for line in _lines(path)]
    found.check("killed and resumed: steps in its log, each once", f"{steps}", f"{len(set(logged))} in {len(logged)}",
                logged == [*range(1, steps + 1)])  # fmt: skip
    # Steps after the last checkpoint are made again, and must not count twice in a sample's row.
    visits = int(thermopile.open_run(path).temperatures().frame(columns=["visits"])["visits"].sum())
    found.check("killed and resumed: visits in its samples' rows", f"{steps * batch:,}", f"{visits:,}",
                visits == steps * batch)  # fmt: skip


def _train_until_killed(path: Path, data: Path, tree: dict[str, Any], at: int) -> None:
    with Trainer.from_settings(path, data, tree) as trainer:

        def kill_at() -> bool:
            if trainer.run.steps_done == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        trainer.train(should_stop=kill_at)


def _train(path: Path, data: Path, tree: dict[str, Any], device: str) -> Counter[str]:
    """Train, or go on; return the waits for the device between two lines of the log half way, if it is a GPU."""
    first = (tree["steps"] // 2 // tree["log_every"] + 1) * tree["log_every"] + 1  # half way is a checkpoint
    last, waits = first + tree["log_every"] - 2, list[Counter[str]]()
    with Trainer.from_settings(path, data, tree) as trainer, ExitStack() as counting:

        def after_step() -> bool:
            if trainer.run.steps_done == first:
                waits.append(counting.enter_context(counted_waits(device)))
            elif trainer.run.steps_done == last:
                counting.close()
            return False

        trainer.train(should_stop=after_step)
    return waits[0]


def _row(found: Findings, what: str, path: Path, name: str, seconds: float) -> None:
    scores = thermopile.evaluate(path, _test(found)).scores
    recall = fmean(scores[way]["1"]["all"] or 0 for way in ("image_to_text", "text_to_image"))
    lines = [line for line in _lines(path) if TIME in line][WARM_UP:]
    shares, config = split(lines), RunDirectory(path).config()
    rate = config.batch_size * len(lines) / sum(line[TIME] for line in lines)
    found.row(
        f"{config.model.image.name} and {config.model.text.name}, {config.data.image_size} pixels, {config.precision}, "
        f"batch {config.batch_size:,}, {config.steps:,} steps on {what}",
        {
            "objective": name, "R@1": f"{recall:.1%}", "samples a second": f"{rate:,.0f}",
            "wait for data": f"{shares.get('data_wait', 0):.1%}", "for rows": f"{shares.get('store_wait', 0):.1%}",
            "seconds in all": f"{seconds:.0f}",
        },
    )  # fmt: skip


def _data(found: Findings) -> tuple[Path, str]:
    """Convert the pairs, with a test set beside them; return the dataset and what it holds."""
    icons, pairs, out = os.environ.get(ICONS), os.environ.get(PAIRS), found.folder / "real"
    shared: dict[str, Any] = {"holdout": 100 if found.small else HELD_OUT, "limit": 700 if found.small else None}
    if icons:
        dataset = thermopile.convert(icons, out, group="set", **shared)
    elif pairs:
        dataset = thermopile.convert(Path(pairs, "pairs.csv"), out, caption="title", group="folder", **shared)
    else:
        dataset = thermopile.convert(GlyphSource(0), out, **shared)
    return out, f"{dataset.n:,} {'icons' if icons else 'drawings' if pairs else 'glyphs'}"


def _test(found: Findings) -> Path:
    return found.folder / "real-test"


def _settings(found: Findings, objective: str) -> dict[str, Any]:
    small = found.small
    steps, batch, log_every = (SMALL_STEPS, SMALL_BATCH, SMALL_LOG_EVERY) if small else (STEPS, BATCH, LOG_EVERY)
    return {
        "device": found.device, "precision": "bf16", "steps": steps, "batch_size": batch, "log_every": log_every,
        "checkpoint": {"every_minutes": 0, "every_steps": steps // 4},
        "data": {"image_size": 32 if small else 64, "recipe": "clip"},
        "model": {"dim": 128, "image": SMALL_IMAGE if small else IMAGE},
        "objective": {"name": objective, **OBJECTIVES[objective]},
        "optimizer": {"lr": 1e-3, "warmup": steps // 8, "weight_decay": 0.02},
    }  # fmt: skip


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunDirectory(path).metrics_file.read_text("utf-8").splitlines()]
