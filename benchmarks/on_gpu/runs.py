"""Runs: whether those on the device, with one rank, and resumed go alike, and how a checkpoint holds one up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.views.recipes import RECIPES
from thermopile.state_store.ranks import TorchRanks
from thermopile.tools.bench.step import open_trainer, synthetic_dataset
from thermopile.trainer.config import TrainConfig, load_config
from thermopile.trainer.heartbeats import Heartbeats
from thermopile.trainer.loop import Trainer
from thermopile.trainer.meeting import RankProcess
from thermopile.trainer.run.build import resolve
from thermopile.trainer.run.run import Run
from thermopile.trainer.run_directory import RunDirectory
from thermopile.trainer.world import World

from ..harness import plain
from ..step import Sizes
from ..step import measure as measure_checkpoints
from .findings import Findings
from .running import missing
from .steps import settings
from .timing import synchronize

STEPS, BATCH = 10, 64
MAX_DIFFERENCE = 0.01
"""Largest relative difference of a loss: convolutions on a GPU are not deterministic, and sum in another order."""
MAX_LEVELS = 0.5
MAX_MEAN_LEVELS = 1.5
"""What DALI's decoder and crops on a CPU differ by from ffcv's (docs/figures_data.md)."""


def smoke(found: Findings) -> None:
    """Train small encoders with each loader beside the CPU, first on random batches: they need the fewest packages."""
    _beside_the_cpu(found, synthetic_dataset(found.folder / "random", STEPS * BATCH), "synthetic")
    if lacking := missing(["ffcv", "PIL"]):
        found.note(f"Not run with other loaders: {', '.join(lacking)} is missing.")
        return
    from ..made import make_pairs

    pairs = make_pairs(found.folder / "pairs", STEPS * BATCH, 1)
    of_ffcv = _beside_the_cpu(found, pairs, "ffcv")
    if not missing(["nvidia.dali"]):
        _check_losses(found, "dali: a loss beside ffcv's", _beside_the_cpu(found, pairs, "dali"), of_ffcv)


def _beside_the_cpu(found: Findings, dataset: Dataset, loader: str) -> list[float]:
    """Give two trainers the same batches; compare their losses, and the pixels with those of ffcv on the CPU.

    The default encoders have no dropout, whose random numbers are the device's own. Returns the device's losses.
    """
    tree: dict[str, Any] = {"precision": "float32", "batch_size": BATCH, "log_every": 1_000_000}
    began, levels, mean, matched, first, opened = time.monotonic(), 0.0, 0.0, 0, 0.0, []
    of_level = 255 * torch.tensor(RECIPES["clip"].std)[:, None, None]
    with ExitStack() as stack:
        for device, served in ((found.device, loader), ("cpu", "synthetic" if loader == "synthetic" else "ffcv")):
            own = tree | {"device": device, "data": {"loader": served, "image_size": 32}}
            opened.append(stack.enter_context(open_trainer(dataset, own, STEPS, Path(mkdtemp(dir=found.folder)))))
        trainer, on_cpu = opened
        for batch, beside in zip(trainer.run.loader.epoch(0), on_cpu.run.loader.epoch(0), strict=True):
            same = batch.to(torch.device("cpu"))
            synchronize(found.device)  # the copy may still be on its way
            apart = ((same.views[0] - beside.views[0]) * of_level).abs()
            levels, mean = max(levels, float(apart.max())), max(mean, float(apart.mean()))
            pictures, sources = ((each.views[0] * of_level).flatten(1) for each in (same, beside))
            nearest = torch.cdist(pictures, sources, p=1).argmin(1)
            if same.sample_ids.equal(beside.sample_ids):
                matched += int((nearest == torch.arange(BATCH)).sum())
            trainer.step([batch])
            synchronize(found.device)
            first = first or time.monotonic() - began
            on_cpu.step([same])
        losses, right = ([line["loss"] for line in each.run.log.flush()] for each in (trainer, on_cpu))
    found.row(f"{STEPS} steps with batches of {BATCH}, in float32", {
        "loader": loader, f"losses on {found.device}": " ".join(f"{loss:.4f}" for loss in losses),
        "the same batches on the CPU": " ".join(f"{loss:.4f}" for loss in right), "first step after": f"{first:.1f} s",
        "pixels beside ffcv's on the CPU":
        "–" if loader == "synthetic" else f"within {levels:.2g} levels, {mean:.2g} in the mean",
    })  # fmt: skip
    _check_losses(found, f"{loader}: a loss beside the CPU's", losses, right)
    if loader == "ffcv":
        found.check("ffcv: a pixel beside the CPU's, in grey levels", f"≤ {MAX_LEVELS}", f"{levels:.2g}",
                    round(levels, 3) <= MAX_LEVELS)  # fmt: skip
    if loader == "dali":
        found.check("dali: the mean pixel of a batch beside ffcv's, in grey levels", f"≤ {MAX_MEAN_LEVELS}",
                    f"{mean:.2g}", mean <= MAX_MEAN_LEVELS)  # fmt: skip
        found.check("dali: pictures that are nearest to those of their ids by ffcv", f"{STEPS * BATCH}", f"{matched}",
                    matched == STEPS * BATCH)  # fmt: skip
    return losses


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
        if figure.held is not None and not found.small:
            found.check(f"checkpoint: {figure.label}", figure.asked, f"{plain(figure.ours)} {figure.unit}", figure.held)
    if found.device == "cuda" and hasattr(torch.cuda, "host_memory_stats"):
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        found.note(f"Once all are written, torch holds {pinned / 1e9:.2f} GB of pinned memory.")


def resume(found: Findings) -> None:
    """Train, and train again with a stop in the middle: the losses must agree."""
    config = _config(found)
    found.note(f"In {config.precision}, stopped and resumed after {STEPS // 2} of {STEPS} steps.")
    _check_losses(found, "a loss of a resumed run beside one never stopped", *_resumed(found, config, STEPS))


def exact(found: Findings, encoder: str, name: str) -> None:
    """The same with deterministic algorithms: bit for bit. name: one of the configurations of steps.py."""
    steps = STEPS if found.small else 200
    losses, right = _resumed(found, _config(found, name, steps, deterministic=True), steps)
    alike = sum(one == other for one, other in zip(losses, right, strict=True))
    found.check(f"{encoder}, deterministic: losses of a resumed run that are those of one never stopped",
                f"{steps}", f"{alike}", alike == steps)  # fmt: skip


def _resumed(found: Findings, config: TrainConfig, steps: int) -> tuple[list[float], list[float]]:
    """Return the losses of a run that was stopped half way, and of one that was not."""
    middle = steps // 2
    whole, stopped = (RunDirectory(Path(mkdtemp(dir=found.folder), name)) for name in ("whole", "stopped"))
    with Trainer.open(config, whole) as trainer:
        trainer.train()
    with Trainer.open(config, stopped) as trainer:
        trainer.train(should_stop=lambda: trainer.run.steps_done == middle)
    with Trainer.open(config, stopped, resume=True) as trainer:
        trainer.train()
    return _losses(stopped), _losses(whole)


def one_rank(found: Findings) -> None:
    """Train as one of several ranks does, in a group of one: averaged gradients, synchronised norms, heartbeats."""
    config = _config(found, precision="float32")
    alone, ranked = (RunDirectory(found.folder / name) for name in ("alone", "ranked"))
    with Trainer.open(config, alone) as trainer:
        trainer.train()
    with _world_of_one(found.device) as (world, heartbeats):
        run = Run(config, ranked, world=world)
        run.world = replace(world, size=2)  # its encoders are wrapped as if there were other ranks
        with Trainer(run) as trainer:
            run.world = world
            run.begin()
            trainer.train()
        # Objectives gather bytes like this, but not in a group of one.
        sent = torch.arange(8, dtype=torch.uint8, device=found.device)
        received = torch.zeros_like(sent)
        dist.all_gather([received], sent)
        found.check("bytes that one rank gathers", f"{sent.tolist()}", f"{received.tolist()}", received.equal(sent))
        lost = heartbeats.lost()
        found.check("ranks without a heartbeat", "0", f"{len(lost)}", not lost)
    found.note(f"{STEPS} steps in {config.precision}, alone and with {'NCCL' if found.device == 'cuda' else 'gloo'}.")
    _check_losses(found, "a loss of one rank in a group beside one alone", _losses(ranked), _losses(alone))


@contextmanager
def _world_of_one(device: str) -> Iterator[tuple[World, Heartbeats]]:
    """Yield what `joined_world` would for a single rank if it made a group for one."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    store = HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    control = TorchRanks(dist.new_group(backend="gloo"))
    with Heartbeats(0, [RankProcess("this machine", os.getpid(), [], "127.0.0.1", "")], {}).beating() as heartbeats:
        yield World(control=control, heartbeats=heartbeats), heartbeats
    dist.destroy_process_group()


def _config(found: Findings, name: str = "", steps: int = STEPS, **more: Any) -> TrainConfig:
    batch = 16 if found.small else 64
    dataset = synthetic_dataset(Path(mkdtemp(dir=found.folder), "dataset"), steps * batch)
    tree = settings(found.device, found.small, name) | {"batch_size": batch, "epochs": 1, "log_every": 1} | more
    tree["data"] |= {"path": str(dataset.path)}
    return resolve(load_config(tree), dataset)[0]


def _losses(run: RunDirectory) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]


def _check_losses(found: Findings, what: str, losses: list[float], right: list[float]) -> None:
    worst = max(abs(one - other) / abs(other) for one, other in zip(losses, right, strict=True))
    found.check(f"{what}: largest relative difference", f"≤ {MAX_DIFFERENCE}", f"{worst:.2g}", worst <= MAX_DIFFERENCE)
