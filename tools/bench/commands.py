"""`thermopile bench`: what this machine can do."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

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
_PARTS_OF_A_STEP = {
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "store_wait": "store wait",
    "other": "other",
}
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
    from copy import deepcopy

    import torch

    from ...trainer.config import apply_overrides, load_config, merge, read_preset
    from .machine import describe_machine, words_of
    from .step import glyphs, step_cost

    settings, asked = read_preset(preset), {}
    apply_overrides(asked, [*overrides, *([f"batch_size={batch}"] if batch else [])])
    merge(settings, asked)
    costs, failed = [], {}
    with TemporaryDirectory(prefix="thermopile-bench-", dir=directory) as temporary:
        dataset = glyphs(Path(temporary), samples=4 * load_config(settings).batch_size)
        for image, device in [(i, d) for i in images or (None,) for d in devices or (None,)]:
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
    click.echo("  " + ", ".join(f"{words} {cost.shares.get(part, 0):.1%}" for part, words in _PARTS_OF_A_STEP.items()))
