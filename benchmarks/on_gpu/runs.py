"""Tests that need a GPU, and whole runs: how a checkpoint holds one up, and whether a resumed one goes on alike."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from thermopile.tools.bench.synthetic_dataset import synthetic_dataset
from thermopile.trainer.build import resolve
from thermopile.trainer.config import load_config
from thermopile.trainer.loop import Trainer
from thermopile.trainer.run_directory import RunDirectory

from harness import plain
from on_gpu.findings import Findings
from on_gpu.steps import settings
from step import Sizes
from step import measure as measure_checkpoints

TESTS = Path(__file__).parents[2] / "tests"
MARK = "pytest.mark.gpu"
MAX_DIFFERENCE = 0.01
"""Largest relative difference of losses after a resume: convolutions on a GPU are not deterministic."""


def tests(found: Findings, which: str) -> None:
    """Run the tests that are marked for a GPU. which: an expression about their names, as pytest's -k."""
    # Only files that have some: the others import for a minute.
    files = sorted(str(file) for file in TESTS.rglob("test_*.py") if MARK in file.read_text("utf-8"))
    report = found.folder / f"{which.replace(' ', '-')}.xml"
    words = ["-v", "-p", "no:cacheprovider", "--rootdir", str(TESTS), "-m", "gpu", "-k", which,
             "--continue-on-collection-errors", "--basetemp", str(found.folder / "pytest"),
             f"--junitxml={report}"]  # fmt: skip
    # -P: a package of the checkout would be taken for the folder of tests with its name.
    command, counts = [sys.executable, "-P", "-m", "pytest", *words, *files], Counter[str]()
    with subprocess.Popen(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True) as done:
        for line in done.stdout or ():
            print(line, end="")
            if outcome := re.search(r"::.* (PASSED|FAILED|ERROR|SKIPPED)\b", line):
                counts[outcome[1].lower()] += 1
                found.tally("Tests", {name: f"{counts[name]:,}" for name in ("passed", "failed", "error", "skipped")})
    if not report.exists():
        raise SystemExit(f"pytest ended with exit code {done.returncode} and no report")
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None]
    broken = [case for case in cases if case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(broken) - len(skipped)
    found.tally("Tests", {
        "passed": f"{passed:,}", "failed": f"{len(bad):,}",
        "not run": f"{len(broken):,}", "skipped": f"{len(skipped):,}",
    })  # fmt: skip
    for case in bad:
        found.note(f"Failed: `{_name(case)}`: {_reason(case, 'failure')}")
    for case in broken:
        found.note(f"Not run: `{_name(case)}`: {_reason(case, 'error')}")
    for reason in sorted({_reason(case, "skipped") for case in skipped}):
        found.note(f"Skipped: {reason}.")
    if passed or bad:
        found.check("tests that fail on the GPU", "0", f"{len(bad)} of {passed + len(bad)}", not bad)


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}.{case.get('name', '')}".strip(".")


def _reason(case: ElementTree.Element, kind: str) -> str:
    found = case.find(kind)
    text = "" if found is None else found.get("message", "") or (found.text or "")
    return " ".join(text.split())[:200]


def checkpoint(found: Findings) -> None:
    """How long checkpoints of a ResNet-50 with AdamW hold a run on random batches up."""
    few: dict[str, Any] = {"device": found.device, "batch": 32, "samples": 8192}
    large = Sizes("hf:resnet-50", checkpoints=5, quiet_steps=5, during_steps=10, **few)
    small = Sizes(checkpoints=1, quiet_steps=2, during_steps=2, warm_up_steps=1, **few)
    folder = found.folder / "checkpoints"
    folder.mkdir()
    measured = measure_checkpoints(small if found.small else large, folder)
    for figure in measured.figures:
        beside = "–" if figure.alternative is None else f"{plain(figure.alternative)} {figure.unit}"
        found.row(measured.title, {"": figure.label, "ours": f"{plain(figure.ours)} {figure.unit}",
                                   "torch.save in the training thread": beside})  # fmt: skip
        if figure.held is not None:
            found.check(f"checkpoint: {figure.label}", figure.asked, f"{plain(figure.ours)} {figure.unit}", figure.held)


def resume(found: Findings) -> None:
    """Train, and train again with a stop in the middle: the losses must agree."""
    worst = _resumed(found, "resume", settings(found.device, found.small), 12)
    found.check("largest relative difference of a resumed run's losses", f"≤ {MAX_DIFFERENCE}", f"{worst:.2g}",
                worst <= MAX_DIFFERENCE)  # fmt: skip


def exact(found: Findings) -> None:
    """The same with deterministic algorithms, bit for bit, for both kinds of image encoder."""
    for vit in (False, True):
        tree = settings(found.device, found.small, vit=vit) | {"deterministic": True}
        tree["precision"] = "bf16" if found.device == "cuda" else "float32"
        name = "ViT" if vit else "ResNet"
        worst = _resumed(found, f"exact-{name}", tree, 12 if found.small else 200)
        found.check(f"{name}: largest difference of a resumed run's losses, deterministic", "0", f"{worst:.2g}",
                    worst == 0)  # fmt: skip


def _resumed(found: Findings, name: str, tree: dict[str, Any], steps: int) -> float:
    """Return the largest relative difference between the losses of a run and of one stopped half way."""
    batch = 16 if found.small else 64
    dataset = synthetic_dataset(found.folder / name, steps * batch, "pairs")
    tree = tree | {"batch_size": batch, "epochs": 1, "log_every": 1}
    tree["data"] |= {"path": str(dataset.path)}
    config = resolve(load_config(tree), dataset)
    whole, stopped = (RunDirectory(found.folder / f"{name}-{which}") for which in ("whole", "stopped"))
    with Trainer.open(config, whole) as trainer:
        trainer.run()
    with Trainer.open(config, stopped) as trainer:
        trainer.run(should_stop=lambda: trainer.steps_done == steps // 2)
    with Trainer.open(config, stopped, resume=True) as trainer:
        trainer.run()
    first, second = (
        [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()] for run in (whole, stopped)
    )
    found.note(f"{steps} steps of {config.model.image.name} and {config.model.text.name}, {config.precision}, batch "
               f"{batch}, stopped and resumed after {steps // 2}.")  # fmt: skip
    return max(float(abs(one - other) / abs(one)) for one, other in zip(first, second, strict=True))
