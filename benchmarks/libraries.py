"""What is exported, read by the libraries that it is for, and their models as a run begins with them.

Small random encoders take a few steps under every objective that has a temperature, and are exported. The library's own
entry points then read the files and pictures: the features and probabilities of the same pixels and texts are compared
with the run's, and its scores with those of `thermopile eval`. Twelve models, saved by their libraries, are compared
with what a run takes from them. Everything is written to FOLDER, and a later call keeps the rows that are finished.

\b
Example:
  python -m benchmarks.libraries /tmp/libraries --page docs/exporting.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize, sigmoid, softmax

from thermopile.pipeline.opening import Dataset
from thermopile.pipeline.sources.glyphs import GlyphSource
from thermopile.trainer.checkpoints.checkpoint_files import LATEST, load_checkpoint
from thermopile.trainer.config import load_config
from thermopile.trainer.encoders import Encoders
from thermopile.trainer.errors import ConfigError
from thermopile.trainer.evaluation.evaluate import evaluate, tokenizer_of
from thermopile.trainer.evaluation.features import restore_encoders
from thermopile.trainer.evaluation.scoring import retrieval_ranks
from thermopile.trainer.export import export_encoders
from thermopile.trainer.loop import Trainer
from thermopile.trainer.objectives import OBJECTIVES, Progress, create_objective, objective_class
from thermopile.trainer.run.build import recipe_named, resolve
from thermopile.trainer.run_directory import RunDirectory, find_checkpoint

from .exported import ignored
from .glyph_runs import thermopile
from .library_models import CONTEXT, MADE, SIDE, Model, clip_tokenizer
from .library_readers import READERS, Read
from .markdown import table

PICTURES, STEPS, BATCH = 200, 20, 64
LONGER = {"clip": 500}
"""Objective -> steps of runs whose scores are to be above chance, on the pictures that they are trained on."""
TEMPLATE = "the character {}"
BEGIN, END = "<!-- made by benchmarks.libraries -->", "<!-- end -->"
_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_OPEN_CLIP = {"embed_dim": 16, "layers": 2, "width": 32}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIP": ("hf whole", {}),
    "SigLIP": ("hf whole", {}),
    "ViT, DistilBERT": ("hf", {
        "image": {"name": "hf:vit-s", "config": _TOWER | {"patch_size": 8}},
        "text": {"name": "hf:distilbert", "config": {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}}}),
    "ResNet, CLIP's text tower": ("hf", {
        "image": {"name": "hf:resnet-18", "config": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}},
        "text": {"name": "hf:clip-text", "config": _TOWER}}),
    "ViT": ("timm", {"image": {"name": "timm:vit_small_patch16_224", "config": {
        "depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}}}),
    "ConvNeXt": ("timm", {"image": {"name": "timm:convnext_atto", "config": {
        "depths": [1] * 4, "dims": [8, 8, 16, 16]}}}),
    "ResNet": ("timm", {"image": {"name": "timm:resnet18", "config": {
        "channels": [4, 4, 8, 8], "layers": [1] * 4, "stem_width": 4}}}),
    "ViT-B-32, smaller": ("open_clip", {
        "dim": 16, "head": "none",
        "image": {"name": "open_clip:ViT-B-32", "config": _OPEN_CLIP | {"head_width": 16, "patch_size": 8}},
        "text": {"name": "open_clip:ViT-B-32", "config": _OPEN_CLIP | {"heads": 2}}}),
}  # fmt: skip
"""Encoders -> format, and settings of `model`; the first two begin from a model's directory."""


class Data(NamedTuple):
    dataset: Dataset
    files: list[Path]
    """In the order of the dataset's ids."""
    captions: list[str]
    classes: list[str]
    """The class of each sample."""


class Row(NamedTuple):
    """Largest differences of one run's export, and its scores by `eval` and by the library."""

    features: float
    logits: float
    """Apart from a bias, which a CLIP of transformers has not."""
    probabilities: float
    zero_shot: tuple[float, float]
    retrieval: tuple[float, float]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--page", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Page that gets the tables.")
def main(folder: Path, page: Path | None) -> None:
    data, objectives = made_data(folder), with_temperature()
    exported = [[*_exported(name, data, folder, objectives)] for name in RUNS]
    exported.append(["safetensors", "built-in and all others", "none", *["–"] * 5, "no library has a class for it"])
    came_in = [_came_in(name, model, data, folder) for name, model in MADE.items()]
    text = "\n\n".join([
        table(["format", "encoders", "objectives", "features differ by", "logits by", "probabilities by",
               "zero-shot, `eval` and library", "R@1, `eval` and library", "not run"], exported),
        f"The objectives are {', '.join(objectives)}. Differences are the largest over all of them, scores those of "
        f"the run whose two differ most, of {len(data.files)} picture files.",
        table(["model", "saved by", "pixels differ by", "side", "scale", "bias", "first loss or features differ by"],
              came_in),
    ])  # fmt: skip
    if page is None:
        click.echo(text)
        return
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", "utf-8")


def with_temperature() -> list[str]:
    """Return the objectives on pairs whose models have a temperature that is theirs and no network's."""
    fields = {name: objective_class(name).settings_of_mode.get("bimodal") for name in OBJECTIVES}
    known = {"tau", "tau_init", "log_logit_scale"}
    return [name for name, settings in fields.items() if settings and known & settings.model_fields.keys()]


def made_data(folder: Path) -> Data:
    """Write glyphs as PNG files that are larger than the encoders' pictures and not square, and convert them."""
    source, root, out = GlyphSource(0, test=True), folder / "pictures", folder / "data"
    if not out.exists():
        root.mkdir(parents=True)
        clip_tokenizer(folder)
        lines = ["filepath\ttitle\tgroup"]
        for index in range(0, len(source), len(source) // PICTURES):
            sample = source[index]
            picture = sample.picture if isinstance(sample.picture, Image.Image) else Image.open(sample.picture)
            picture.convert("RGB").resize((72, 56)).save(root / f"{index}.png")
            lines.append(f"{index}.png\t{sample.caption}\t{sample.group}")
        (root / "pairs.tsv").write_text("\n".join(lines), "utf-8")
        thermopile("convert", "csv", root / "pairs.tsv", out, "--group", "group", "--tokenizer",
                   folder / "tokenizer.json", "--context-length", CONTEXT)  # fmt: skip
    dataset = Dataset(out)
    uris, captions, groups = (dataset.column(name).to_pylist() for name in ("uri", "caption", "group"))
    return Data(dataset, [root / uri for uri in uris], captions, groups)


def _exported(name: str, data: Data, folder: Path, objectives: list[str]) -> list[str]:
    format, model = RUNS[name]
    if format == "hf whole":
        kind = name.lower()
        side = {"name": f"hf:{MADE[f'{name} of transformers 5'].save(folder / kind)}"}
        model = {"image": side, "text": side}
    rows, not_run = dict[str, Row](), list[str]()
    for objective in objectives:
        try:
            place = folder / "runs" / f"{name}-{objective}"
            if not (kept := place.with_suffix(".json")).exists():
                kept.write_text(json.dumps(compared(format, model, objective, data, place)))
            rows[objective] = Row(*json.loads(kept.read_text()))
        except (ConfigError, ImportError) as error:
            not_run.append(f"{objective}: {error}")
    farthest = [max(rows.values(), key=lambda row: abs(getattr(row, score)[0] - getattr(row, score)[1]), default=None)
                for score in ("zero_shot", "retrieval")]  # fmt: skip
    scores = [getattr(row, score) for row, score in zip(farthest, ("zero_shot", "retrieval"), strict=True) if row]
    return [
        format.partition(" ")[0], name, f"{len(rows)} of {len(objectives)}",
        *(f"{max(getattr(row, part) for row in rows.values()):.0e}"
          for part in ("features", "logits", "probabilities") if rows),
        *(f"{100 * ours:.2f} and {100 * theirs:.2f} %" for ours, theirs in scores), "; ".join(not_run) or "–",
    ]  # fmt: skip


def compared(format: str, model: Mapping[str, Any], objective: str, data: Data, place: Path) -> Row:
    """Train and export a run, and compare it with what its library reads."""
    config = resolve(load_config({
        "steps": LONGER.get(objective, STEPS), "batch_size": BATCH,
        "data": {"path": str(data.dataset.path), "image_size": SIDE},
        "model": model, "objective": {"name": objective}, "optimizer": {"lr": 0.003, "warmup": 0},
    }), data.dataset)[0]  # fmt: skip
    run = RunDirectory(place)
    with Trainer.open(config, run) as trainer:
        trainer.train()
    exported = place.parent.parent / "exports" / place.name
    export_encoders(run, exported, format.partition(" ")[0])  # type: ignore[arg-type]
    config, checkpoint = run.config(), find_checkpoint(run, LATEST)
    _, training = load_checkpoint(checkpoint)
    encoders = restore_encoders(config, checkpoint, training, tokenizer_of(run)[1])
    tokens = torch.from_numpy(data.dataset.shard(0).tokens(np.arange(data.dataset.n)))
    prompts = [TEMPLATE.format(each.replace("_", " ")) for each in sorted({*data.classes})]
    with torch.inference_mode():
        read: Read = READERS[format](exported, encoders)
        pixels = read.pixels([Image.open(file) for file in data.files])
        image, text, logits = read.compared(pixels, data.captions)
        ours = [normalize(encoders.image(pixels)), normalize(encoders.text(tokens))] if encoders.text else []
        found = ours[0] @ ours[1].T * temperature(config.objective.settings, training.get("objective", {}))
        difference = float((logits - read.bias - found).abs().max())
        found += training.get("objective", {}).get("logit_bias", read.bias)
        as_probabilities = sigmoid if read.bias else lambda logits: softmax(logits, 1)
        zero_shot = (image @ read.compared(pixels[:1], prompts)[1].T).argmax(1)
        truth = torch.tensor([sorted({*data.classes}).index(each) for each in data.classes])
        number = torch.from_numpy(np.unique(data.captions, return_inverse=True)[1])
        ranks = retrieval_ranks(image, text, (number[:, None] == number).nonzero().T, ignored)
    scores = evaluate(run, data.dataset, data.dataset, templates=[TEMPLATE]).scores
    return Row(
        max(float((a - b).abs().max()) for a, b in zip((image, text), ours, strict=True)),
        difference,
        float((as_probabilities(logits) - as_probabilities(found)).abs().max()),
        (scores["zero_shot"]["top1"]["all"] or 0.0, float((zero_shot == truth).float().mean())),
        (scores["image_to_text"]["1"]["all"] or 0.0, float((ranks == 0).float().mean())),
    )


def temperature(settings: Mapping[str, Any], learned: Mapping[str, Tensor]) -> float:
    """Return the factor of the cosines: learned, or that of a temperature that is set or begins."""
    if "log_logit_scale" in learned:
        return float(learned["log_logit_scale"].exp())
    return 1 / float(learned.get("tau", settings.get("tau", settings.get("tau_init"))))


def _came_in(name: str, model: Model, data: Data, folder: Path) -> list[str]:
    """Compare what a run takes from a saved model with the model's own library."""
    place = model.save(folder / name)
    config = resolve(load_config({
        "batch_size": BATCH, "data": {"path": str(data.dataset.path), "image_size": SIDE},
        "model": model.settings(place, data.dataset), "objective": {"name": model.objective},
    }), data.dataset)[0]  # fmt: skip
    encoders = Encoders.create(config.model, "bimodal", SIDE, data.dataset.index.tokenizer).eval()
    recipe, settings = recipe_named(config.data.recipe), config.objective.settings
    pictures = [Image.open(file).resize((SIDE, SIDE)) for file in data.files[:BATCH]]
    raw = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2) / 255
    ours = (raw - torch.tensor(recipe.mean)[:, None, None]) / torch.tensor(recipe.std)[:, None, None]
    tokens = torch.from_numpy(data.dataset.shard(0).tokens(np.arange(BATCH))).long()
    with torch.inference_mode():
        theirs = model.read(place, pictures, tokens)
        image = encoders.image if theirs.loss is not None else encoders.image.backbone
        if theirs.loss is None:
            difference = float((image(theirs.pixels) - theirs.features).abs().max())
        else:
            assert encoders.text is not None
            objective = create_objective(model.objective, "bimodal", **settings)
            features = normalize(encoders.image(theirs.pixels)), normalize(encoders.text(tokens))
            state = {"visits": torch.zeros(BATCH, dtype=torch.int64)}
            outcome = objective(*features, state, Progress(step=0, steps_per_epoch=1))
            difference = abs(float(outcome.loss) - theirs.loss)
    taken = [_taken(settings.get("log_logit_scale"), theirs.scale), _taken(settings.get("logit_bias"), theirs.bias)]
    return [name, model.saved_by, f"{float((ours - theirs.pixels).abs().max()):.0e}",
            f"{theirs.pixels.shape[-1]}", *taken, f"{difference:.0e}"]  # fmt: skip


def _taken(ours: float | None, theirs: float | None) -> str:
    """Return the model's number, and the run's if it is another."""
    if theirs is None:
        return "–"
    return f"{theirs:.4f}" if ours is not None and abs(ours - theirs) < 1e-6 else f"{theirs:.4f}, but here {ours}"


if __name__ == "__main__":
    main()
