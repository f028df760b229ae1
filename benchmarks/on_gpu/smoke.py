"""Ten steps by each loader there is, on small pictures and encoders, beside a CPU's of the same samples."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from thermopile.pipeline.conversion.convert import ConvertSettings, convert
from thermopile.pipeline.dataset import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.trainer.loop import Trainer

from on_gpu.findings import Findings
from on_gpu.running import missing

STEPS, BATCH = 10, 64
MAX_DIFFERENCE = {"ffcv": 0.01, "dali": 0.05}
"""Loader -> of a loss, relative: ffcv rounds pixels on a GPU, DALI decodes there."""


def measure(found: Findings) -> None:
    """A row for each loader; random batches of `synthetic` are others on another device."""
    dataset = found.folder / "smoke"
    convert(GlyphSource(0), dataset, ConvertSettings(), selection=np.arange(STEPS * BATCH))
    for loader in ("synthetic", "ffcv", "dali"):
        if lacking := missing({"ffcv": ["ffcv"], "dali": ["nvidia.dali"]}.get(loader, [])):
            found.note(f"{loader}: not run: {lacking[0]} is missing.")
            continue
        began = time.monotonic()
        losses, beside = (_losses(found.folder, dataset, loader, device) for device in (found.device, "cpu"))
        worst = max(abs(one - other) / abs(other) for one, other in zip(losses, beside, strict=True))
        compared = loader in MAX_DIFFERENCE
        found.row(f"{STEPS} steps of isogclr on pairs, float32, batch {BATCH}", {
            "loader": loader, "first loss": f"{losses[0]:.4f}", "last": f"{losses[-1]:.4f}",
            "the CPU's": f"{beside[0]:.4f}, {beside[-1]:.4f}" if compared else "–",
            "both runs": f"{time.monotonic() - began:.1f} s",
        })  # fmt: skip
        if compared:
            found.check(f"losses with {loader}, from the CPU's", f"≤ {MAX_DIFFERENCE[loader]:.0%}", f"{worst:.2%}",
                        worst <= MAX_DIFFERENCE[loader])  # fmt: skip


def _losses(folder: Path, dataset: Path, loader: str, device: str) -> list[float]:
    settings: dict[str, Any] = {
        "epochs": 1, "batch_size": BATCH, "device": device, "precision": "float32", "log_every": 1,
        "data": {"loader": loader, "image_size": 32}, "optimizer": {"warmup_steps": 0}, "model": {"dim": 32},
        "objective": {"name": "isogclr"},
    }  # fmt: skip
    path = folder / f"smoke-{loader}-{device}"
    with Trainer.from_settings(path, Dataset(dataset).path, settings) as trainer:
        trainer.run()
        file = trainer.run_directory.metrics_file
    assert isinstance(file, Path)
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()]
