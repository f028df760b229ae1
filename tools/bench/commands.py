"""`thermopile bench`: what this machine can do."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from ...storage.place import Place
from ..arguments import DATASET

if TYPE_CHECKING:
    from .step import StepCost


@click.group(
    epilog="\b\nExamples:\n"
    "  thermopile bench loader --data data/pictures\n"
    "  thermopile bench step --image conv --image hf:resnet-18"
)
def bench() -> None:
    """Measure what this machine can do: feed a model, and take a training step."""


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@bench.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench step\n"
    "  thermopile bench step --image conv --image hf:resnet-18 --device cpu --device cuda\n"
    "  thermopile bench step --device cuda --image hf:resnet-50 --text hf:distilbert --batch 256 \\\n"
    "      --set data.image_size=224 --data data/pairs\n"
    "  thermopile bench step --device cuda --image hf:vit-b --text hf:distilbert --batch 1024 \\\n"
    "      --set data.image_size=224 --set model.image.config.patch_size=32"
)
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="NAME",
    help="An image encoder, as model.image.name; repeatable. Default: the preset's.",
)
@click.option("--text", metavar="NAME", help="The text encoder, as model.text.name. Default: the preset's.")
@click.option(
    "--device", "devices", multiple=True, type=click.Choice(["cpu", "cuda"]), help="Repeatable. Default: auto."
)
@click.option("--data", type=DATASET, help="Also train on this dataset, and compare.")
@click.option("--batch", type=click.IntRange(min=16), help="Batch size. Default: the preset's.")
@click.option("--preset", default="glyphs", show_default=True, help="Where all other settings come from.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting; repeatable.")
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True, help="Steps that are timed.")
@_JSON
def step(
    images: tuple[str, ...],
    text: str | None,
    devices: tuple[str, ...],
    data: Place | None,
    batch: int | None,
    preset: str,
    overrides: tuple[str, ...],
    steps: int,
    as_json: bool,
) -> None:
    """Measure what a training step costs with these encoders on these devices, and where its time goes.

    The trainer takes real steps, objective, optimizer and state store included, on random batches that lie on the
    device. With --data it takes them on that dataset's batches as well. Let nothing else run meanwhile.
    """
    from ...pipeline.opening import Dataset
    from ...trainer.config import load_config
    from ...trainer.config.layers import from_overrides, merge, read_preset
    from ...trainer.run.build import device_named
    from ...trainer.run.chosen_settings import USUAL_BATCH_SIZE
    from .machine import describe_machine, words_of
    from .step import costs_of, synthetic_dataset

    def settings(image: str | None, device: str | None) -> dict[str, Any]:
        tree = read_preset(preset)
        names = {"image": {"name": image} if image else {}, "text": {"name": text} if text else {}}
        merge(tree, {"model": names} | ({"device": device} if device else {}))
        merge(tree, from_overrides([*overrides, *([f"batch_size={batch}"] if batch else [])]))
        return tree

    for name in devices:
        device_named(name)
    costs, failed = [], {}
    with TemporaryDirectory(prefix="thermopile-bench-") as temporary:
        config = load_config(settings(None, None))
        made = Path(temporary, "dataset")
        samples = 4 * (config.batch_size or USUAL_BATCH_SIZE)
        dataset = Dataset(data) if data else synthetic_dataset(made, samples)
        loaders = [config.data.loader] if data else []
        for image, device in product(images or (None,), devices or (None,)):
            found, failure = costs_of(dataset, settings(image, device), loaders, steps, Path(temporary))
            costs.append(found)
            if failure:
                failed[f"{image or 'the image encoder'} on {device or 'this device'}"] = failure
    machine = describe_machine("torch")
    if as_json:
        every = [asdict(cost) for of_one in costs for cost in of_one]
        click.echo(json.dumps({"machine": machine, "steps": every, "failed": failed}))
    else:
        click.echo(words_of(machine))
        for of_one in costs:
            _print_steps(of_one)
    if failed:
        raise click.ClickException("; ".join(f"{what}: {why}" for what, why in failed.items()))


def _print_steps(costs: list[StepCost]) -> None:
    """costs: with synthetic data, then with real data if that was measured."""
    for cost in costs:
        memory = "" if cost.peak_gpu_bytes is None else f", {cost.peak_gpu_bytes / 1e9:.2f} GB of GPU memory"
        encoders = cost.image + (f" and {cost.text}" if cost.text else "")
        what = f"{encoders} on {cost.device}, {cost.parameters / 1e6:,.1f} million parameters"
        speed = f"{cost.step_ms:,.1f} ms a step, {cost.samples_per_second:,.0f} samples a second"
        click.echo(f"\n{what}, batch {cost.batch_size:,}, {cost.loader} data: {speed}{memory}")
        click.echo("  " + ", ".join(f"{part.replace('_', ' ')} {share:.1%}" for part, share in cost.shares.items()))
    for real in costs[1:]:
        click.echo(f"  real data {real.samples_per_second / costs[0].samples_per_second:.0%} of synthetic")


@bench.command(
    epilog="\b\nExamples:\n"
    "  thermopile bench loader --data data/pictures\n"
    "  thermopile bench loader --data data/pictures --recipe crop_flip --views 1 --device cuda --batch 256"
)
@click.option("--data", type=DATASET, required=True, help="The dataset to load.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the batches are wanted; dali decodes there.",
)
@click.option("--recipe", default="simclr", show_default=True, help="How views are made, as data.recipe.")
@click.option("--views", type=click.IntRange(1, 2), default=2, show_default=True, help="Views of an image.")
@click.option("--image-size", type=click.IntRange(min=8), default=224, show_default=True, help="Pixels of a side.")
@click.option("--batch", type=click.IntRange(min=16), default=64, show_default=True, help="Batch size.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each loader.")
@_JSON
def loader(
    data: Place, device: str, recipe: str, views: int, image_size: int, batch: int, rounds: int, as_json: bool
) -> None:
    """Measure how many images a second each loader can feed.

    The loaders take turns. Let nothing else run meanwhile.
    """
    from ...pipeline.opening import Dataset
    from ...pipeline.views.recipes import RECIPES
    from ...trainer.run.build import device_named
    from .loader import LOADERS, NEEDS, missing, rates, work_of
    from .machine import describe_machine, words_of

    if recipe not in RECIPES:
        raise click.UsageError(f"data.recipe = {recipe!r} is unknown; available: {', '.join(RECIPES)}")
    work = work_of(Dataset(data), batch, recipe, views, image_size, device_named(device))
    lacking = {name: why for name, module in NEEDS.items() if (why := missing(module))}
    contenders = {name: contender for name, contender in LOADERS.items() if name not in lacking}
    found = {name: median(of_rounds) for name, of_rounds in rates(contenders, work, rounds).items()}
    machine = describe_machine("ffcv", "nvidia-dali-cuda130", "torch")
    if as_json:
        figures = {"images_per_second": found, "missing": lacking}
        click.echo(json.dumps({"machine": machine, "samples": work.dataset.n, "device": work.device.type, **figures}))
        return
    images = f"{work.dataset.n:,} images as {views} view{'s'[: views - 1]} of {recipe}, {image_size}×{image_size}"
    click.echo(f"{words_of(machine)}\n\n{images}, batches of {batch}; images a second, medians of {rounds} rounds")
    words = {"ffcv": "ffcv", "dali": f"dali on the {'GPU' if work.device.type == 'cuda' else 'CPU'}"}
    for name, rate in found.items():
        click.echo(f"{words[name]:<16} {rate:>8,.0f}")
    for name, why in lacking.items():
        click.echo(f"{words[name]:<16} not measured: {why}")
