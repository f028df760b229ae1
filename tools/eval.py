"""`thermopile eval`: score the features of a run's checkpoint with the papers' measures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..storage.place import AnyPlace, Place, Places, place_of
from .arguments import ALLOW, AT, DATASET, RUN, RUN_DATA, TARS, WEIGHTS
from .printing import print_facts, print_table
from .progress import task_bars

if TYPE_CHECKING:
    from ..pipeline.opening import Dataset
    from ..trainer.config import Weights
    from ..trainer.evaluation.evaluate import Evaluation, Network
    from ..trainer.run_directory import RunDirectory

LABELS = {
    "knn": "k-NN, k = {}",
    "probe": "linear probe, {}",
    "few_shot": "linear probe, {} a class",
    "image_to_text": "image to text, R@{}",
    "text_to_image": "text to image, R@{}",
    "zero_shot": "zero-shot, {}",
}
"""Scoring method → its label, with a placeholder for the variant."""
_VARIANTS = {
    "lbfgs": "L-BFGS",
    "sgd": "SGD",
    "sgd_90": "SGD of 90 epochs",
    "sgd_90_views": "SGD of 90 epochs, views",
    "mean_per_class": "mean of classes",
}
PROBES = ("shots", "draws", "augment")
"""Options of probes that take long, which only `eval` has."""
_CLIP_BENCHMARK = {
    "zero_shot": {"top1": "acc1", "top5": "acc5", "mean_per_class": "mean_per_class_recall"},
    "text_to_image": {k: f"image_retrieval_recall@{k}" for k in ("1", "5", "10")},
    "image_to_text": {k: f"text_retrieval_recall@{k}" for k in ("1", "5", "10")},
}
"""Method and variant → the metric of clip_benchmark, which names retrieval by what is retrieved."""


def _with_place(context: click.Context, option: click.Parameter, templates: tuple[str, ...]) -> tuple[str, ...]:
    from ..trainer.config import checked_template

    try:
        return tuple(map(checked_template, templates))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def evaluate(
    run: AnyPlace,
    test: AnyPlace,
    *,
    train: AnyPlace | None = None,
    at: str = "latest",
    network: Network = "online",
    weights: Weights | None = None,
    templates: Sequence[str] = (),
    template_file: str | None = None,
    classnames: str | None = None,
    data: Places | None = None,
    tars: AnyPlace | None = None,
    allow_code: bool = False,
    shots: Sequence[int] = (),
    draws: int = 3,
    augment: str | None = None,
) -> Evaluation:
    """Score a run's encoders on the dataset `test`, with progress. Arguments are those of `thermopile eval`.

    Raises RunError, DatasetError, ConfigError.

        >>> sorted(thermopile.evaluate("runs/mine", "data/mine-test").scores)
        ['image_to_text', 'text_to_image']
    """
    from ..pipeline.opening import opened
    from ..trainer.errors import ConfigError
    from ..trainer.run_directory import RunDirectory

    if train and data:
        raise ConfigError("--data is the new path of the run's own dataset, in whose place --train is; leave one out")
    trained = training_set(RunDirectory(place_of(run)), train, tars, data)  # refused before torch is imported
    from ..trainer.evaluation.evaluate import Probes
    from ..trainer.run.build import recipe_named

    asked: dict[str, Any] = {"at": at, "network": network, "weights": weights, "classnames": classnames}
    asked |= {"template_file": template_file, "templates": tuple(templates), "allow_code": allow_code}
    asked["probes"] = Probes(tuple(shots), draws, recipe_named(augment) if augment else None)
    return scored(place_of(run), trained, opened(test, tars), **asked)


@click.command(
    "eval",
    epilog="\b\nExamples:\n"
    "  thermopile eval runs/glyphs --test data/glyphs-test\n"
    "  thermopile eval runs/glyphs --test data/glyphs-test --at step-400 --json\n"
    '  thermopile eval runs/cc3m --train data/cifar --test data/cifar-test --template "a photo of a {}"\n'
    "  thermopile eval runs/moco --test data/cifar-test --augment crop_flip --shots 1 --shots 5\n"
    "  thermopile eval runs/cc3m --test data/imagenet-val --templates clip-80 --classnames names.txt",
)
@RUN
@click.option("--train", type=DATASET, help="For k-NN, probes and bands. Default: the run's own dataset.")
@click.option("--test", required=True, type=DATASET, help="The dataset to score.")
@AT
@click.option(
    "--network",
    type=click.Choice(["online", "momentum"]),
    default="online",
    show_default=True,
    help="The trained network, or its moving average where the run has one (model.momentum).",
)
@WEIGHTS
@click.option(
    "--template",
    "templates",
    multiple=True,
    show_default="a photo of a {}",
    callback=_with_place,
    help="Zero-shot prompt; {} is the class name, {lower} the name in lower case. Repeatable.",
)
@click.option("--templates", "template_file", metavar="FILE|clip-80", help="Prompts, one a line; clip-80: CLIP's own.")
@click.option("--classnames", metavar="FILE|COLUMN", help="Class names: a line each, in order, or class, tab, name.")
@click.option("--shots", type=click.IntRange(1), multiple=True, help="Linear probes on so few a class. Repeatable.")
@click.option("--draws", type=click.IntRange(1, 100), default=3, show_default=True, help="Draws for --shots, averaged.")
@click.option("--augment", metavar="RECIPE", help="Linear probe on views, of crop_flip for example: 90 encoder passes.")
@RUN_DATA
@TARS
@ALLOW
@click.option("--json", "as_json", is_flag=True, help="Print the scores as one JSON object, from 0 to 1.")
def eval_(run: Place, as_json: bool, **asked: Any) -> None:
    """Score the features of RUN's latest checkpoint: k-NN, linear probes, retrieval, zero-shot.

    Classes are the datasets' groups. Scores are given for all test samples and for head, medium and tail: the thirds of
    the classes by number of training samples. Works while the run trains and changes nothing.
    """
    evaluation = evaluate(run, **asked)
    if as_json:
        used = {"network": asked["network"], "weights": evaluation.weights}
        click.echo(json.dumps(used | _to_json(run, evaluation), allow_nan=False))
    else:
        _print_scores(run, asked["network"], evaluation)


def training_set(run: RunDirectory, train: AnyPlace | None, tars: AnyPlace | None, data: Places | None) -> Dataset:
    """Open `train`, or the dataset that a run was trained on. data: its present place; None: the recorded one."""
    from ..pipeline.opening import opened
    from ..trainer.run.own_dataset import open_own

    own = run.config().data
    if train:
        return opened(train, tars)
    return open_own(run, data or own.places, own.tars, same=True, cure="--data, or name another dataset with --train")


def scored(run: Place, train: Dataset, test: Dataset, template_file: str | None, **asked: Any) -> Evaluation:
    """Evaluate a run, with progress on stderr; asked: as for `evaluate`."""
    from ..trainer.evaluation.prompts import read_templates
    from ..trainer.run_directory import RunDirectory

    prompts = asked["templates"] + (read_templates(template_file) if template_file else ())
    from ..trainer.evaluation.evaluate import evaluate
    from ..trainer.evaluation.scoring import TEMPLATES

    with task_bars() as show:
        return evaluate(RunDirectory(run), train, test, on_progress=show, **asked | {"templates": prompts or TEMPLATES})


def label(method: str, variant: str) -> str:
    return LABELS[method].format(_VARIANTS.get(variant, variant.replace("_weighted", ", weighted")))


def _to_json(run: Place, evaluation: Evaluation) -> dict[str, Any]:
    sets = {"train": evaluation.train, "test": evaluation.test}
    return {
        "run": str(run),
        "checkpoint": evaluation.checkpoint,
        **{word: {"path": str(dataset.place), "samples": dataset.n} for word, dataset in sets.items()},
        "classes_of_band": evaluation.classes_of_band,
        "scores": evaluation.scores,
        "half_widths": evaluation.half_widths,
        "clip_benchmark": {
            name: evaluation.scores[method][variant]["all"]
            for method, names in _CLIP_BENCHMARK.items()
            for variant, name in names.items()
            if variant in evaluation.scores.get(method, {})
        },
        "notes": evaluation.notes,
    }


def _print_scores(run: Place, network: Network, evaluation: Evaluation) -> None:
    used = "momentum network" if network == "momentum" else f"{evaluation.weights} weights"
    facts = [("run", f"{run}, {evaluation.checkpoint}, {used}")]
    for word, dataset in (("train", evaluation.train), ("test", evaluation.test)):
        facts.append((word, f"{dataset.place}, {dataset.n:,} samples"))
    print_facts(facts, evaluation.notes)
    if evaluation.scores:
        bands = (f">{band} ({classes:,})" for band, classes in evaluation.classes_of_band.items())
        rows = [
            [label(method, variant), *(_cell(evaluation, method, variant, band) for band in scores)]
            for method, variants in evaluation.scores.items()
            for variant, scores in variants.items()
        ]
        print_table(["% right", ">all", *bands], rows)


def _cell(evaluation: Evaluation, method: str, variant: str, band: str) -> str:
    share = evaluation.scores[method][variant][band]
    half = evaluation.half_widths.get(method, {}).get(variant, {}).get(band)
    return "–" if share is None else f"{100 * share:.1f}" + (f" ± {100 * half:.1f}" if half is not None else "")
