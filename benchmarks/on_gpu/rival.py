"""The loop that a user would write, with transformers' CLIPModel, beside ours: speed, memory, time to a recall."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import CLIPConfig, CLIPModel, get_cosine_schedule_with_warmup

from thermopile.pipeline.conversion.conversion import ConvertSettings, convert
from thermopile.pipeline.cores import cores
from thermopile.pipeline.dataset.tokenizer import encode, load_tokenizer
from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.csv_source import CsvSource
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.pipeline.views.recipes import CLIP_MEAN, CLIP_STD, RECIPES
from thermopile.trainer.evaluation.features import some_features
from thermopile.trainer.loop import Trainer

from .findings import Findings
from .timing import begin_peak, gigabytes, synchronize

PAIRS = "THERMOPILE_PAIRS"
"""Environment variable: a folder with pairs.csv and small pictures; without it, glyphs are drawn."""
HELD_OUT, SEEDS, GOAL = 500, 3, 0.9
"""Pairs that recall is of; and the share of the loop's last recall that both are timed to reach."""
RATE, DECAY, WARM_UP = 1e-3, 0.1, 50


class Size(NamedTuple):
    """Sizes of the data and of both towers, which have the same width and number of layers."""

    side: int
    batch: int
    epochs: int
    pairs: int
    width: int
    layers: int
    patch: int


LARGE, SMALL = Size(128, 256, 20, 4096, 384, 6, 16), Size(32, 32, 2, 160, 32, 1, 8)


class Curve:
    """One training: R@1, mean of both ways, and the seconds of training at the end of each epoch."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.seconds, self.recalls = list[float](), list[float]()
        begin_peak(device)
        self._began = time.perf_counter()

    def end_epoch(self, sides: Callable[[], Sequence[Tensor]]) -> None:
        """Score what was learnt; that is no time of training.

        sides: encodes the pairs to test with, pictures and captions, float32 [m, d] each, of norm 1.
        """
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._began)
        pictures, captions = sides()
        similarities, own = pictures @ captions.T, torch.arange(len(pictures), device=pictures.device)
        self.recalls.append(fmean((similarities.argmax(dim) == own).float().mean().item() for dim in (0, 1)))
        self.memory = gigabytes(self._device)
        self._began = time.perf_counter() - self.seconds[-1]


def measure(found: Findings) -> None:
    """Train each with the same pairs, batches and towers, some seeds; say how long each takes to a recall."""
    size, seeds = (SMALL, 1) if found.small else (LARGE, SEEDS)
    data, tested, what = _data(found, size)
    goal = None
    for name in ("transformers' CLIPModel in a torch loop", "clip", "isogclr"):
        train = _loop if goal is None else partial(_ours, objective=name)
        of_seeds = [train(found, data, tested, size, seed) for seed in range(seeds)]
        if goal is None:
            goal = GOAL * fmean(curve.recalls[-1] for curve in of_seeds)
        seconds = fmean(curve.seconds[-1] for curve in of_seeds)
        reached = [next((at for at, recall in zip(curve.seconds, curve.recalls, strict=True) if recall >= goal), None)
                   for curve in of_seeds]  # fmt: skip
        found.row(f"{what}, {size.side} pixels, batch {size.batch}, {size.epochs} epochs, {seeds} seeds", {
            "": name, "samples a second": f"{size.epochs * (data.n // size.batch * size.batch) / seconds:,.0f}",
            "peak memory": of_seeds[0].memory, "R@1": " ".join(f"{curve.recalls[-1]:.1%}" for curve in of_seeds),
            f"seconds to {goal:.1%}": " ".join("–" if at is None else f"{at:.1f}" for at in reached),
        })  # fmt: skip


def _data(found: Findings, size: Size) -> tuple[Dataset, Dataset, str]:
    """Return the pairs to train on, those to test with, and what they are."""
    folder = os.environ.get(PAIRS)
    source: Any = CsvSource(Path(folder) / "pairs.csv") if folder else GlyphSource(0)
    chosen = np.random.default_rng(0).permutation(len(source))[: size.pairs + HELD_OUT]
    parts = np.sort(chosen[HELD_OUT:]), np.sort(chosen[: HELD_OUT if len(chosen) > 2 * HELD_OUT else size.batch])
    tokenizer, made = None, []
    for name, part in zip(("rival-train", "rival-test"), parts, strict=True):
        convert(source, found.folder / name, ConvertSettings(), selection=part, tokenizer_from=tokenizer)
        made.append(Dataset(found.folder / name))
        tokenizer = made[0].tokenizer_path
    return made[0], made[1], f"{made[0].n:,} {'drawings' if folder else 'glyphs'}"


def _tower(size: Size) -> dict[str, int]:
    return {"hidden_size": size.width, "num_hidden_layers": size.layers, "intermediate_size": 4 * size.width,
            "num_attention_heads": max(2, size.width // 64)}  # fmt: skip


def _ours(found: Findings, data: Dataset, tested: Dataset, size: Size, seed: int, objective: str) -> Curve:
    tower = _tower(size)
    tree = {
        "seed": seed, "epochs": size.epochs, "batch_size": size.batch, "device": found.device, "log_every": 1_000_000,
        "checkpoint": {"every_minutes": 0}, "data": {"image_size": size.side, "recipe": "clip"},
        "objective": {"name": objective}, "optimizer": {"lr": RATE, "weight_decay": DECAY, "warmup": WARM_UP},
        "model": {"dim": size.width, "image": {"name": "hf:vit-s", "config": tower | {"patch_size": size.patch}},
                  "text": {"name": "hf:clip-text", "config": tower}},
    }  # fmt: skip
    with Trainer.from_settings(found.folder / f"rival-{objective}-{seed}", data.path, tree) as trainer:

        def sides() -> Sequence[Tensor]:
            trainer.run.encoders.eval()
            batches = [*some_features(trainer.run.encoders, tested, np.arange(tested.n), RECIPES["clip"], size.side,
                                      trainer.run.device)]  # fmt: skip
            trainer.run.encoders.train()
            return [torch.cat(side) for side in zip(*batches, strict=True)]

        curve = Curve(found.device)

        def after_step() -> bool:
            if trainer.run.steps_done % trainer.run.order.steps_per_epoch == 0:
                curve.end_epoch(sides)
            return False

        trainer.train(should_stop=after_step)
    return curve


class Views(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Decodes a picture and crops it at random, as the recipe `clip` does, in a worker of DataLoader."""

    def __init__(self, data: Dataset, side: int, crops: bool = True) -> None:
        self._jpegs, captions = [data.jpeg(number) for number in range(data.n)], data.column("caption").to_pylist()
        length = data.index.tokenizer.context_length  # type: ignore[union-attr]
        self.tokens = encode(load_tokenizer(data.tokenizer_path, context_length=length), captions).tokens
        self._side, self._crops = side, crops

    def __len__(self) -> int:
        return len(self._jpegs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        picture = Image.open(io.BytesIO(self._jpegs[number])).convert("RGB")
        width, height = picture.size
        area = torch.empty(1).uniform_(0.9, 1).item() if self._crops else 1.0
        edge = round(min(width, height) * area**0.5)
        left, top = (int(torch.randint(0, room + 1, (1,))) if self._crops else room // 2
                     for room in (width - edge, height - edge))  # fmt: skip
        crop = picture.resize((self._side, self._side), Image.Resampling.BILINEAR, (left, top, left + edge, top + edge))
        pixels = torch.from_numpy(np.asarray(crop, np.float32).transpose(2, 0, 1).copy())
        mean, std = (torch.tensor(of)[:, None, None] for of in (CLIP_MEAN, CLIP_STD))
        # CLIPModel takes 2 for an old model's end, so every token is one higher.
        return (pixels / 255 - mean) / std, torch.from_numpy(self.tokens[number].astype(np.int64) + 1)


def _loop(found: Findings, data: Dataset, tested: Dataset, size: Size, seed: int) -> Curve:
    torch.manual_seed(seed)
    on_gpu = found.device == "cuda"
    workers = 0 if found.small else cores()
    loader = DataLoader(Views(data, size.side), size.batch, shuffle=True, num_workers=workers, pin_memory=on_gpu,
                        drop_last=True, persistent_workers=workers > 0)  # fmt: skip
    of_test = Views(tested, size.side, crops=False)
    test = [torch.stack(side).to(found.device) for side in zip(*map(of_test.__getitem__, range(tested.n)), strict=True)]
    model = _clip(data, size).to(found.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=on_gpu)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARM_UP, size.epochs * len(loader))

    def autocast() -> torch.autocast:
        return torch.autocast(found.device, torch.bfloat16, enabled=on_gpu)

    @torch.no_grad()
    def sides() -> Sequence[Tensor]:
        model.eval()
        with autocast():
            out = model(pixel_values=test[0], input_ids=test[1])
        model.train()
        return out.image_embeds.float(), out.text_embeds.float()

    curve = Curve(found.device)
    for _ in range(size.epochs):
        for pixels, tokens in loader:
            with autocast():
                loss = model(pixel_values=pixels.to(found.device, non_blocking=True),
                             input_ids=tokens.to(found.device, non_blocking=True), return_loss=True).loss  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        curve.end_epoch(sides)
    return curve


def _clip(data: Dataset, size: Size) -> nn.Module:
    tokenizer = data.index.tokenizer
    assert tokenizer is not None
    tower = _tower(size) | {"projection_dim": size.width}
    text = tower | {"vocab_size": tokenizer.vocab_size + 1, "max_position_embeddings": tokenizer.context_length,
                    "eos_token_id": tokenizer.end_id + 1, "pad_token_id": None, "bos_token_id": None}  # fmt: skip
    image = tower | {"image_size": size.side, "patch_size": size.patch}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=image, projection_dim=size.width))
