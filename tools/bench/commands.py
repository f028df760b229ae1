"""`thermopile bench`: what this machine can do."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from ..dataset_path import DatasetPath

if TYPE_CHECKING:
    from .step import StepCost


@click.group(
    epilog="\b\nExamples:\n"
    "  thermopile bench loader --data data/pictures --recipe simclr\n"
    "  thermopile bench step --image conv --image hf:resnet-50"
)
def bench() -> None:
    """Measure what this machine can do: feed a model, and take a training step."""


_DIRECTORY = click.option(
    "--dir", "directory", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where temporary files go.",
)  # fmt: skip
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@bench.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench step\n"
    "  thermopile bench step --image conv --image hf:resnet-50 --device cpu --device cuda\n"
    "  thermopile bench step --preset isogclr/cc3m --set model.image.name=hf:resnet-18 --batch 64"
)
@click.option("--image", "images", multiple=True, metavar="NAME",
              help="An image encoder, as model.image.name; repeatable. Default: the preset's.")  # fmt: skip
@click.option("--device", "devices", multiple=True, metavar="NAME",
              help="cpu, cuda or cuda:1; repeatable. Default: auto.")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=16), help="Batch size. Default: the preset's.")
@click.option("--preset", default="glyphs", show_default=True, help="Where all other settings come from.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting; repeatable.")
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True, help="Steps that are timed.")
@_DIRECTORY
@_JSON
def step(
    images: tuple[str, ...], devices: tuple[str, ...], batch: int | None, preset: str, overrides: tuple[str, ...],
    steps: int, directory: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure what a training step costs with these encoders on these devices, and where its time goes.

    The trainer takes real steps, objective, optimizer and state store included, on batches that lie in memory. Let
    nothing else run meanwhile.
    """
    import torch

    from ...trainer.config import load_config
    from ...trainer.config_layers import apply_overrides, merge, read_preset
    from .machine import describe_machine, words_of
    from .step import glyphs, step_cost

    settings = read_preset(preset)
    asked: dict[str, Any] = {}
    apply_overrides(asked, [*overrides, *([f"batch_size={batch}"] if batch else [])])
    merge(settings, asked)
    costs, failed = [], {}
    with TemporaryDirectory(prefix="thermopile-bench-", dir=directory) as temporary:
        dataset = glyphs(Path(temporary), samples=4 * load_config(settings).batch_size)
        for image, device in product(images or (None,), devices or (None,)):
            own = deepcopy(settings)
            merge(own, {"model": {"image": {"name": image}}} if image else {})
            merge(own, {"device": device} if device else {})
            with TemporaryDirectory(dir=temporary) as run:
                try:
                    costs.append(step_cost(dataset, own, steps, Path(run)))
                except torch.OutOfMemoryError:
                    failed[f"{image or 'the image encoder'} on {device or 'the GPU'}"] = "out of memory; lower --batch"
    machine = describe_machine("torch")
    if as_json:
        click.echo(json.dumps({"machine": machine, "steps": [asdict(cost) for cost in costs], "failed": failed}))
    else:
        click.echo(words_of(machine))
        for cost in costs:
            _print_step(cost)
    if failed:
        raise click.ClickException("; ".join(f"{what}: {why}" for what, why in failed.items()))


def _print_step(cost: StepCost) -> None:
    memory = "" if cost.peak_gpu_bytes is None else f", {cost.peak_gpu_bytes / 1e9:.2f} GB of GPU memory"
    click.echo(f"\n{cost.image} on {cost.device}, {cost.parameters / 1e6:,.1f} million parameters, "
               f"batch {cost.batch_size:,}: {cost.step_ms:,.1f} ms a step, "
               f"{cost.samples_per_second:,.0f} samples a second{memory}")  # fmt: skip
    parts = {"forward_backward": "forward and backward", "optimizer": "optimizer", "store_wait": "store wait",
             "other": "other"}  # fmt: skip
    click.echo("  " + ", ".join(f"{words} {cost.shares.get(part, 0):.1%}" for part, words in parts.items()))


@bench.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench loader\n"
    "  thermopile bench loader --data data/pictures --recipe simclr --image-size 32\n"
    "  thermopile bench loader --recipe crop_flip --views 1 --json"
)
@click.option("--data", type=DatasetPath(), help="Your dataset. Default: photographs of 400×300, made for the purpose.")
@click.option("--recipe", default="simclr", show_default=True, help="How views are made, as data.recipe.")
@click.option("--views", type=click.IntRange(1, 2), default=2, show_default=True, help="Views of an image.")
@click.option("--image-size", type=click.IntRange(min=8), default=224, show_default=True, help="Pixels of a side.")
@click.option("--batch", type=click.IntRange(min=16), default=64, show_default=True, help="Batch size.")
@click.option("--images", type=click.IntRange(min=16), default=2048, show_default=True, help="Photographs to make.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each loader.")
@_DIRECTORY
@_JSON
def loader(
    data: Path | None, recipe: str, views: int, image_size: int, batch: int, images: int, rounds: int,
    directory: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure how many images a second the loaders can feed, and what bounds them.

    The loaders take turns, and so does libjpeg-turbo that only decodes, the limit on a CPU. Let nothing else run
    meanwhile.
    """
    from ...pipeline.dataset import Dataset
    from ...pipeline.order import Order
    from ...trainer.build import recipe_named
    from .loader import LOADERS, WARM_UP, Work, costs, photographs, rates
    from .machine import describe_machine, words_of

    recipe_named(recipe)
    with TemporaryDirectory(prefix="thermopile-bench-", dir=directory) as temporary:
        dataset = Dataset(data) if data else photographs(Path(temporary), images)
        try:
            order = Order.create(dataset.n, batch)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        batches = min(12, order.steps_per_epoch - WARM_UP)
        if batches < 1:
            raise click.UsageError(f"{dataset.n:,} images make {order.steps_per_epoch} batches of {batch}, but "
                                   f"{WARM_UP + 1} are needed; choose a smaller --batch")  # fmt: skip
        work = Work(dataset, order, recipe, views, image_size, batches)
        found = {name: median(of_rounds) for name, of_rounds in rates(LOADERS, work, rounds).items()}
        ms = costs(work, images=256, rounds=rounds)
    machine = describe_machine("ffcv", "nvidia-dali-cuda130", "torch")
    if as_json:
        click.echo(json.dumps({"machine": machine, "images_per_second": found, "ffcv_ms_per_image": ms}))
        return
    click.echo(words_of(machine))
    click.echo(f"\n{dataset.n:,} images as {views} view{'s'[: views - 1]} of {recipe}, {image_size}×{image_size}, "
               f"batches of {batch}; images a second, medians of {rounds} rounds")  # fmt: skip
    words = {"ffcv": "ffcv", "dali": f"dali on the {'GPU' if machine['gpu'] else 'CPU'}",
             "decode": "libjpeg-turbo, decoding alone"}  # fmt: skip
    for name, rate in found.items():
        click.echo(f"{words[name]:<30} {rate:>8,.0f}   {rate / found['decode']:.0%}")
    dearest = max(ms, key=lambda part: ms[part])
    click.echo(f"\nffcv spends {sum(ms.values()):.2f} ms of a core on an image, most of it on {dearest}: "
               + ", ".join(f"{part} {of_part:.2f}" for part, of_part in ms.items()))  # fmt: skip
