"""`thermopile score`: judge a dataset's pairs by a model that is not trained on them, as a run."""

from copy import copy
from shlex import quote
from typing import Any

import click

from ..storage.files import sha256_of
from ..storage.place import Place, place_of
from ..trainer.config import FROZEN
from ..trainer.config.layers import Layers
from ..trainer.errors import ConfigError
from ..trainer.plugins import OPEN_CLIP
from ..trainer.run_directory import RunDirectory
from .arguments import DATASET, defaulting
from .train_options import COMMAND_LINE, OPTIONS, TrainCommand, TrainOptions

PIECE = 256
"""Pairs of a batch."""
_WHOLE_SQUARE = {"name": "clip", "scale": [1, 1], "ratio": [1, 1], "flip": 0}
_POSITIVE = click.FloatRange(0, min_open=True)
_HELP = {
    "tars": "",
    "shares": "Of several DATA, the share of a batch of each, such as --share 2 --share 1.",
    "out": "The run directory, or s3://BUCKET/PATH.",
    "overrides": "",
    "select": "Score only the samples in this Parquet file's column sample_id.",
    "resume": "",
    "allow_code": "Allow the settings of OUT, or of the run that is the model, to import code: `module:name`.",
}
"""Options of `train` that `score` has, too, with a help of its own where training's would be wrong."""


def _explained(option: click.Option) -> click.Option:
    own = copy(option)
    own.help = _HELP[str(option.name)] or option.help
    return own


@click.command(
    cls=TrainCommand,
    epilog="\b\nExamples:\n"
    "  thermopile score data/cc3m --model hf:laion/CLIP-ViT-B-32-laion2B-s34B-b79K --out runs/scored\n"
    "  thermopile score data/new --model runs/cc3m --tau 0.02 --rho 3 --out runs/new-scored\n"
    "  thermopile inspect runs/scored\n"
    "  thermopile curate runs/scored --keep keep.parquet --precision 0.8",
    params=[
        click.Argument(["data"], type=DATASET, nargs=-1, required=True, metavar="DATA..."),
        click.Option(
            ["--model"],
            required=True,
            metavar="hf:…|open_clip:…|RUN",
            help="A whole CLIP or SigLIP: `hf:` and a directory or name of the hub, or `open_clip:ARCH:TAG`; or a run.",
        ),
        click.Option(["--tau"], type=_POSITIVE, help="Temperature of log s. Default: the model's own, or 0.05."),
        defaulting("rho", _POSITIVE, 1.0, "The temperatures' rho, as in training."),
        defaulting("batches", click.IntRange(1, 256), 8, f"Batches of {PIECE} pairs that each is compared with."),
        *(_explained(of) for of in OPTIONS if isinstance(of, click.Option) and of.name in _HELP),
    ],
)
def score(data: tuple[Place, ...], model: str, tau: float | None, rho: float, batches: int, **options: Any) -> None:
    """Compare every pair of DATA with random others by a model as it is, and write what it says as a run.

    The run has log s, margin and similarity of every pair, and temperatures at which rho binds. `inspect` and `curate`
    use it as they use a run that was trained; random pairs tell how many captions are wrong.
    """
    from .train import run

    typed = [f"objective.rho={rho}", *([] if tau is None else [f"objective.tau={tau}"])]
    options["overrides"] = (*typed, *options["overrides"])
    asked = TrainOptions(data, **options)
    if not run(asked, below=_settings(asked, model, batches)):
        click.get_current_context().exit(75)


def _settings(asked: TrainOptions, model: str, batches: int) -> Layers:
    """Return the settings of the pass. Raises ConfigError, DatasetError, RunError, OSError."""
    from ..pipeline.opening import open_dataset

    dataset, layers = open_dataset(asked.data, asked.tars, pictures=False), Layers()
    samples = dataset.n
    if asked.select is not None:
        import pyarrow.parquet as pq

        samples = pq.read_metadata(asked.select).num_rows
    unit = sum(asked.shares or [1] * len(asked.data)) * (8 * batches if samples >= 64 * batches else 16)
    steps = max(2, -(-samples // (batches * PIECE)))  # as few samples as possible are encoded again for a last batch
    batch_size = min(-(-samples // (steps * unit)), samples // unit) * unit
    micro_batch = 0 if batch_size % batches else batch_size // batches
    layers.add({"epochs": 1, "batch_size": batch_size, "micro_batch": micro_batch}, COMMAND_LINE)
    data = {"recipe": _WHOLE_SQUARE, "captions": "first"}
    layers.add({"objective": {"name": FROZEN}, "data": data}, COMMAND_LINE)
    if (own := RunDirectory(place_of(model))).exists():
        from ..trainer.run.build import recipe_named
        from ..trainer.run.own_dataset import kept_facts

        config, known = own.config(), kept_facts(own)
        if dataset.index.tokenizer and config.objective.mode != "bimodal":
            raise ConfigError(f"{model} was trained on pictures alone and cannot judge captions; name a run on pairs")
        if dataset.index.tokenizer and known and known.tokenizer_digest != sha256_of(dataset.tokenizer_path):
            cure = f"convert it with --tokenizer {quote(str(own.tokenizer))}"
            raise ConfigError(f"{dataset.place} has other tokens than {model} was trained on; {cure}")
        recipe = {name: list(getattr(recipe_named(config.data.recipe), name)) for name in ("mean", "std")}
        views = {"image_size": config.data.image_size, "recipe": _WHOLE_SQUARE | recipe}
        towers = config.model.model_dump(include={"dim", "head", "head_width", "image", "text"})
        layers.add({"model": towers, "data": views}, str(own.config_file))
        layers.add({"init": {"run": model}}, COMMAND_LINE)
    elif ":" not in model:
        raise ConfigError(f"--model {model}: there is no run there; name a run, hf:… or open_clip:ARCH:TAG")
    else:
        heads = {"head": "none"} if model.startswith(OPEN_CLIP) else {}
        layers.add({"model": {"image": {"name": model}, "text": {"name": model}, **heads}}, COMMAND_LINE)
    return layers
