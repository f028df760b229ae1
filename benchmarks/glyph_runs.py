"""Datasets and runs of the studies on glyphs. They stay in a folder, so a later call makes only what is missing."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.sources import Source
from thermopile.tools.cli import main
from thermopile.trainer.run.preemption import EXIT_CODE


def converted(source: Source, path: Path, seed: int = 0) -> Path:
    """Convert a source to `path`, unless that was done before; return the path."""
    if not path.exists():
        convert(source, path, ConvertSettings(seed=seed), workers=1)
    return path


def trained(data: Path, run: Path, settings: Mapping[str, object], *more: object, preset: str = "glyphs") -> Path:
    """Train `run` to its end with a preset, the demo's by default, and these settings; return it."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    thermopile("train", "--preset", preset, "--data", data, "--out", run, "--resume", *words, *more)
    return run


def recall(run: Path, data: Path) -> float:
    """R@1 in percent on the test set beside the data, mean of both ways."""
    scores = json.loads(thermopile("eval", run, "--test", data.with_name(f"{data.name}-test"), "--json"))["scores"]
    return 100 * fmean(scores[way]["1"]["all"] for way in ("image_to_text", "text_to_image"))


def thermopile(*words: object) -> str:
    """Run a command and return what it printed. Exits if a signal stopped it."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exit_code = main([str(word) for word in words], standalone_mode=False)
    if exit_code == EXIT_CODE:
        raise SystemExit(EXIT_CODE)
    return printed.getvalue()
