"""Making runs: each trained by `thermopile train` and scored in a process of its own, on one core, then a line."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from scipy.stats import kurtosis, skew, spearmanr

import thermopile
from thermopile import __version__
from thermopile.pipeline.dataset.tokenizer import load_tokenizer
from thermopile.tools.bench.machine import describe_machine
from thermopile.tools.cli import main as command_line
from thermopile.tools.inspection.opening import read_run
from thermopile.tools.inspection.temperatures.survey import survey
from thermopile.trainer.checkpoints.checkpoint_files import LATEST, load_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.config.layers import from_overrides, merge
from thermopile.trainer.encoders import Encoders, with_names
from thermopile.trainer.errors import TrainingError
from thermopile.trainer.evaluation.bands import BANDS
from thermopile.trainer.evaluation.evaluate import tokenizer_of
from thermopile.trainer.evaluation.features import restore_encoders
from thermopile.trainer.run.preemption import EXIT_CODE
from thermopile.trainer.run_directory import RunDirectory, find_checkpoint

from .division import Divided, train_with
from .forked import END, QUARTER, forgotten, origin_of, write_ids
from .plan import (
    CURATED,
    DIVIDED_AFTER,
    FORKED_AT,
    FORKED_WITHOUT,
    VARIED,
    Mode,
    Run,
    Settings,
    is_real,
    is_searched_on,
    untrained_settings,
)
from .results import LOOKED_AT, Result, Temperatures
from .scoring import GreyPixels, Right, Scorer
from .sets import Sets, make_sets, open_sets
from .varied import Varied

RUNS_PER_PROCESS = 20
NOT_SETTINGS = (DIVIDED_AFTER, VARIED, CURATED, FORKED_AT, FORKED_WITHOUT)
"""What `thermopile train` does not know of a run's settings."""


class StoppedError(Exception):
    """A signal stopped a run."""


def make_missing(missing: Callable[[], list[Run]], folder: Path, add: Callable[[Made], None], processes: int) -> None:
    """Make the first of the missing runs until none is, so many at once.

    missing: called again whenever a run is finished, since its scores may decide about others.
    add: called with each finished run. folder: for the datasets, and for run directories while they are needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes when they import torch
    context = multiprocessing.get_context("spawn")
    making: dict[Future[Made], str] = {}
    with (
        TemporaryDirectory(dir=folder) as scratch,
        ProcessPoolExecutor(
            processes, context, initializer=_end_with_parent, max_tasks_per_child=RUNS_PER_PROCESS
        ) as pool,
    ):
        try:
            while True:
                new = [run for run in missing() if run.key not in making.values()]
                for run in new[: processes - len(making)]:
                    make_sets(folder, run.data)
                    making[pool.submit(make, run, folder, Path(scratch))] = run.key
                if not making:
                    return
                finished, _ = wait(making, return_when=FIRST_COMPLETED)
                for future in finished:
                    del making[future]
                    add(future.result())
        except BaseException:
            for process in multiprocessing.active_children():
                # After a SIGTERM, one that stops its run waits for ever for the pool's lock, which an idle one held.
                process.kill()
            pool.shutdown(cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """End this process when its parent is gone: the pool's processes would wait for ever for one that was killed."""

    def end() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end, daemon=True).start()


class Made(NamedTuple):
    """A finished run, and of a compared one which test samples were right."""

    result: Result
    right: Right


def make(run: Run, folder: Path, scratch: Path) -> Made:
    """Train and score a run on the datasets in `folder`; its directory is in `scratch` meanwhile.

    Raises StoppedError if a signal stopped it, and what scoring raises.
    """
    sets, started = open_sets(folder, run.data), time.monotonic()
    right: Right = {}
    scores: dict[str, dict[str, float]] = {}
    temperatures, failed = {}, ""
    if "baseline" in run.settings:
        right, scores = _scored(_baseline(run, sets))
    else:
        with TemporaryDirectory(dir=scratch) as own:
            directory = RunDirectory(Path(own) / "run")
            if not (failed := _train(run, sets, directory)):
                scorer = _scorer(directory, sets)
                right, scores = _scored(scorer)
                if not (is_real(run.data) and is_searched_on(run.data)):
                    temperatures = _temperatures(directory, scorer)
    result = Result(
        run=run,
        scores=scores,
        temperatures=temperatures,
        seconds=round(time.monotonic() - started, 1),
        machine=describe_machine("torch", "numpy"),
        version=__version__,
        commit=commit(),
        failed=failed,
    )
    return Made(result, {} if is_searched_on(run.data) else right)


def commit() -> str:
    """The commit of thermopile's own code, with + if it was changed since; its version where it is not a checkout."""
    git = ["git", "-C", str(Path(thermopile.__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
    found = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or __version__


def by_seed(lines: Path, seeds: int, make: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what `make` finds for each seed from 0, a line of JSON each; what has a line is not made again."""
    found = [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.exists() else []
    for seed in range(len(found), seeds):
        found.append({"seed": seed, "commit": commit(), **make(seed)})
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found[-1]) + "\n")
    return found


def _scored(scorer: Scorer) -> tuple[Right, dict[str, dict[str, float]]]:
    """Return which samples are right, and their shares of all and of each band."""
    right = scorer.right()
    bands: dict[str, Any] = {"all": slice(None)}
    if scorer.sets.classes:
        bands |= {name: scorer.bands() == code for code, name in enumerate(BANDS)}
    return right, {part: {name: round(float(samples[band].mean()), 5) for name, band in bands.items()}
                   for part, samples in right.items()}  # fmt: skip


def train_words(run: Run, sets: Sets, directory: RunDirectory) -> list[str]:
    """Return the arguments of `thermopile` that make the run."""
    settings = [word for pair in _overrides(run.settings) for word in ("--set", pair)]
    return ["train", "--data", str(sets.train.path), "--out", str(directory.path), *settings]


def _overrides(settings: Settings) -> list[str]:
    """The settings of `thermopile train` among these, as `--set` takes them."""
    return [f"{key}={_exact(value)}" for key, value in settings.items() if key not in NOT_SETTINGS]


def _exact(value: Any) -> str:
    """A setting's value as `--set` reads it. Results name our objectives from `reproduction` on."""
    words = str(value).lower() if isinstance(value, bool) else str(value)
    return __name__.removesuffix("reproduction.running") + words if words.startswith("reproduction.") else words


def _train(run: Run, sets: Sets, directory: RunDirectory) -> str:
    """Return why training failed, such as a loss that is not finite; empty where it did not."""
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            for key, taking in ((DIVIDED_AFTER, Divided), (VARIED, Varied)):
                if key in run.settings:
                    tree: dict[str, Any] = {}
                    merge(tree, from_overrides(_overrides(run.settings)))
                    train_with(taking, directory.path, sets.train.path, tree, run.settings[key])
                    return ""
            if FORKED_AT in run.settings:
                _fork(run, sets, directory)
            words = train_words(run, sets, directory)
            if FORKED_AT in run.settings:
                words = ["train", "--out", str(directory.path), "--resume"]
            if run.settings.get(CURATED):
                words += ["--select", _kept_of_first(run, sets, directory)]
            _train_by(words, run)
    except TrainingError as error:
        return str(error).replace(str(directory.path), "RUN")
    except click.ClickException as error:
        if isinstance(error.__cause__, TrainingError):
            return error.format_message().replace(str(directory.path), "RUN")
        raise
    return ""


def _train_by(words: list[str], run: Run) -> None:
    """Let `thermopile` train. Raises StoppedError if a signal stopped it, and what that raises."""
    if command_line(words, standalone_mode=False) == EXIT_CODE:
        raise StoppedError(run.key)


def _fork(run: Run, sets: Sets, directory: RunDirectory) -> None:
    """Fork the run that it goes on with, which is made once and kept beside the datasets."""
    origin = origin_of(run)
    kept = Path(str(sets.train.path)).parent / "origins" / f"seed-{run.settings['seed']}"
    _train_by([*train_words(origin, sets, RunDirectory(kept)), "--resume"], run)
    step = QUARTER * 4 * run.settings[FORKED_AT] // END
    words = ["fork", f"{kept}@step-{step}", "--out", str(directory.path)]
    if run.settings[FORKED_WITHOUT]:
        words += write_ids(forgotten(run, sets.train), Path(str(directory.path)).with_name("without.parquet"))
    command_line(words, standalone_mode=False)


def _kept_of_first(run: Run, sets: Sets, directory: RunDirectory) -> str:
    """Make a run like this one on all samples; return the file of those that `curate` keeps by it."""
    first, kept = directory.path.with_name("first"), directory.path.with_name("kept.parquet")
    _train_by(train_words(run, sets, RunDirectory(first)), run)
    found = survey(read_run(RunDirectory(first)))
    misfits = found.kinds.counts["misfit"] if found and found.kinds else 0
    words = ["--drop-misfits", str(max(1, misfits))]
    command_line(["curate", str(first), "--keep", str(kept), *words], standalone_mode=False)
    return str(kept)


def _scorer(directory: RunDirectory, sets: Sets) -> Scorer:
    """Return the scorer of a finished run's encoders."""
    config = directory.config()
    checkpoint = find_checkpoint(directory, LATEST)
    _, training = load_checkpoint(checkpoint)
    has_texts = config.objective.mode == "bimodal"
    tokenizer, sizes, _ = tokenizer_of(directory) if has_texts else (None, None, None)
    encoders = restore_encoders(config, checkpoint, training, sizes, allow_code=True)
    return Scorer(encoders, sets, config.data, tokenizer)


def _baseline(run: Run, sets: Sets) -> Scorer:
    """Return the scorer of what nothing has trained: an encoder's first weights, or the pixels themselves."""
    raw = run.settings["baseline"] == "raw_pixels"
    mode: Mode = "unimodal" if raw else run.mode
    tree: dict[str, Any] = {}
    merge(tree, from_overrides(_overrides(untrained_settings(mode))))
    config, index, tokenizer = load_config(tree), sets.train.index, None
    torch.manual_seed(config.seed)
    encoders = Encoders.create(with_names(config.model), mode, config.data.image_size, index.tokenizer)
    if raw:
        encoders.image.backbone = GreyPixels(config.data.image_size**2)
    if mode == "bimodal" and index.tokenizer is not None:
        tokenizer = load_tokenizer(sets.train.tokenizer_path, context_length=index.tokenizer.context_length)
    return Scorer(encoders.eval(), sets, config.data, tokenizer)


def _temperatures(directory: RunDirectory, scorer: Scorer) -> dict[str, Temperatures]:
    measured = survey(read_run(directory))
    if measured is None or not measured.sides or not measured.groups:  # emoji have no classes
        return {}
    (classes,) = measured.groups
    ids = measured.pool.sample_ids
    looked_at = np.sort(np.random.default_rng(0).permutation(len(ids))[:LOOKED_AT])
    copies = None if scorer.sets.classes else scorer.near_copies(ids[looked_at])
    words = None if copies is None else scorer.word_counts()[ids]
    found = {}
    for side in measured.sides:
        tau, correlation = measured.pool.tau[side.name].astype("float64"), classes.correlation[side.name]
        means = classes.tau[side.name].mean
        is_seen = np.isfinite(means)  # a class of few may not have been drawn yet
        found[side.name] = Temperatures(
            mean=round(float(tau.mean()), 5),
            skewness=_rounded(float(skew(tau))) or 0.0,
            kurtosis=_rounded(float(kurtosis(tau))) or 0.0,
            deciles=np.quantile(tau, np.linspace(0, 1, 11)).round(5).tolist(),
            spearman=_rounded(correlation and correlation.spearman),
            permuted=_rounded(correlation and correlation.permuted),
            sizes=classes.sizes[is_seen].tolist(),
            class_means=means[is_seen].round(5).tolist(),
            alignment=_rounded(scorer.alignment(ids, tau)),
            copies=None if copies is None else _rounded(float(spearmanr(tau[looked_at], copies).statistic)),
            words=None if words is None else _rounded(float(spearmanr(tau, words).statistic)),
        )
    return found


def _rounded(value: float | None) -> float | None:
    """Round a figure; there is none where all ranks are equal."""
    return None if value is None or isnan(value) else round(value, 4)
