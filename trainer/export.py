"""Export a run's encoders: directories for transformers, or plain safetensors with metadata.

Neither needs thermopile to be read. The section Exporting of docs/operations.md describes the files.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from torch import nn

from .._version import __version__
from ..pipeline.mixture import open_dataset
from ..storage.files import sync, writer_name
from ..storage.place import Place
from .checkpoints.checkpoint_files import LATEST
from .checkpoints.tensors import save_tensors
from .config import EncoderConfig, TrainConfig
from .encoders import Encoder
from .encoders.averaging import Weights, chosen_weights
from .errors import ConfigError, RunError
from .evaluation.evaluate import tokenizer_of
from .evaluation.features import restore_encoders
from .plugins import HF, is_directory
from .run.build import recipe_named
from .run_directory import RunDirectory, find_checkpoint, load_found

Format = Literal["hf", "safetensors"]


@dataclass(frozen=True)
class _Side:
    """One encoder of a checkpoint, and the metadata that a reader of its weights needs, as JSON values."""

    name: str
    """image, text, or momentum: the moving average of the image encoder."""
    encoder: Encoder
    facts: dict[str, Any]
    tokenizer: Path | None = None
    """For texts, the file with the run's tokenizer."""
    pad_token: str = ""


def export_encoders(
    run: RunDirectory,
    to: Path,
    format: Format,
    *,
    at: str = LATEST,
    data: Place | None = None,
    weights: Weights | None = None,
    allow_code: bool = False,
) -> list[Path]:
    """Write the encoders of a run's checkpoint, `latest` or step-N, to the new directory `to`; returns its files.

    data: the present place of the run's dataset; None: the recorded path. Texts need its tokenizer. weights: of image
    and text encoder, by default averaged if the run has averages; a momentum network has only its own. allow_code: as
    restore_encoders. A kill leaves no `to`, only a hidden directory next to it. Raises ConfigError if `to` exists,
    transformers has no such encoder or the run has no averaged weights, RunError if the run or checkpoint does not
    exist or a weight is not finite, DatasetError if the tokenizer is not found, OSError if writing fails.
    """
    if os.path.lexists(to):
        raise ConfigError(f"{to} already exists; nothing was written. Choose another directory with --to")
    config = run.config()
    weights = chosen_weights(config.model, weights)
    if format == "hf":
        check_transformers_has_them(config)
    sides = _restore(run, config, at, data, weights, allow_code)
    with _written_aside(to) as folder:
        for side in sides:
            if format == "hf":
                _write_hf(side, folder / side.name)
            else:
                _save(side.encoder, folder / f"{side.name}.safetensors", side.facts)
                _copy_tokenizer(side, folder)
    return sorted(path for path in to.rglob("*") if path.is_file())


def check_transformers_has_them(config: TrainConfig) -> None:
    """Raise ConfigError if transformers has no such encoder as one of the run's."""
    sides = {"image": config.model.image}
    if config.objective.mode == "bimodal":
        sides["text"] = config.model.text
    for side, encoder in sides.items():
        if not encoder.name.startswith(HF):
            what = f"{encoder.name!r}, which transformers does not have"
        elif encoder.config.get("stem") == "cifar":
            what = f"{encoder.name!r} with the stem 'cifar', which transformers' ResNet does not have"
        else:
            continue
        raise ConfigError(f"the run's {side} encoder is {what}; export it with --format safetensors")


def _restore(
    run: RunDirectory, config: TrainConfig, at: str, data: Place | None, weights: Weights, allow_code: bool
) -> list[_Side]:
    checkpoint = find_checkpoint(run, at)
    info, training = load_found(checkpoint)
    folder = data or config.data.places
    tokenizer, sizes = tokenizer_of(folder, info) if config.objective.mode == "bimodal" else (None, None)
    encoders = restore_encoders(config, checkpoint, training, sizes, weights, allow_code=allow_code)
    for name, values in encoders.state_dict().items():
        if not values.isfinite().all():
            raise RunError(
                f"{checkpoint} holds weights that are not finite ({name}); nothing was written. Export an older "
                "checkpoint with --at"
            )
    recipe = recipe_named(config.data.recipe)
    facts = {"weights": weights, "image_size": config.data.image_size, "mean": recipe.mean, "std": recipe.std}
    image = _Side("image", encoders.image, _facts(config, config.model.image, encoders.image, info.step) | facts)
    if encoders.momentum is not None:
        facts = image.facts | {"network": "momentum", "weights": "raw"}
        return [image, replace(image, name="momentum", encoder=encoders.momentum, facts=facts)]
    if encoders.text is None or tokenizer is None or sizes is None:
        return [image]
    facts = {"weights": weights} | sizes.model_dump(include={"vocab_size", "context_length", "end_id"})
    facts = _facts(config, config.model.text, encoders.text, info.step) | facts
    pad_token = (tokenizer.padding or {})["pad_token"]
    return [image, _Side("text", encoders.text, facts, open_dataset(folder).tokenizer_path, pad_token)]


def _facts(config: TrainConfig, encoder: EncoderConfig, module: Encoder, step: int) -> dict[str, Any]:
    model = config.model
    # For a local model only the directory's name: its path is private and useless elsewhere.
    name = HF + Path(encoder.name).name if is_directory(encoder.name) else encoder.name
    return {
        "encoder": name,
        "config": encoder.config,
        "width": module.backbone.width,
        "head": model.head,
        "head_width": model.head_width,
        "dim": model.dim,
        "step": step,
        "thermopile": __version__,
    }


def _write_hf(side: _Side, folder: Path) -> None:
    from .encoders.hf_directory import quiet

    model: Any = side.encoder.backbone.model
    with quiet():
        model.save_pretrained(folder)
    _save(side.encoder.head, folder / "head.safetensors", side.facts)
    if side.tokenizer is None:
        _write_json(folder / "preprocessor_config.json", _preprocessor(side.facts))
    else:
        _copy_tokenizer(side, folder)
        # With these, AutoTokenizer uses tokenizer.json unchanged, and pads and truncates.
        settings = {"model_max_length": side.facts["context_length"], "pad_token": side.pad_token}
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | settings)
    (folder / "README.md").write_text(_card(side, type(model).__name__), "utf-8")


def _copy_tokenizer(side: _Side, folder: Path) -> None:
    if side.tokenizer is not None:
        shutil.copyfile(side.tokenizer, folder / side.tokenizer.name)


def _save(module: nn.Module, path: Path, facts: dict[str, Any]) -> None:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    save_tensors(path, module.state_dict(), {"format": "pt"} | texts)


def _preprocessor(facts: dict[str, Any]) -> dict[str, Any]:
    """Return `thermopile eval`'s preprocessing, the central square, except for another resampler's rounding."""
    size = facts["image_size"]
    return {
        "image_processor_type": "CLIPImageProcessor",  # it resizes the short side and crops the centre
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": 2,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": facts["mean"],
        "image_std": facts["std"],
    }


def _card(side: _Side, model_class: str) -> str:
    facts = side.facts
    outputs = {
        "ResNetModel": "`pooler_output.flatten(1)`",
        "ViTModel": "`pooler_output`",
        "DistilBertModel": "`last_hidden_state[:, 0]`",
        "CLIPTextModel": (
            f"`last_hidden_state` at the first token {facts.get('end_id')}, which closes a text (not `pooler_output`: "
            "transformers pools elsewhere where the end token's id is 2)"
        ),
    }
    about = "\n".join(f"| {key} | {json.dumps(value)} |" for key, value in facts.items())
    return f"""---
library_name: transformers
---

# The {side.name} encoder of a thermopile run

A `{model_class}`, trained contrastively to step {facts["step"]:,}. `transformers.AutoModel.from_pretrained` loads it.

Its features, {facts["width"]} wide, are {outputs[model_class]}. `head.safetensors` holds the projection head
({facts["head"]}) from them to the {facts["dim"]} dimensions of the objective's space.

| | |
|---|---|
{about}
"""


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", "utf-8")


@contextmanager
def _written_aside(to: Path) -> Iterator[Path]:
    """Yield a temporary directory that is flushed and renamed to `to` at the end, or removed on failure."""
    # The process id keeps two exports to one name apart.
    beside = to.with_name(f".{to.name}.{writer_name()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    usual = beside.stat().st_mode & 0o666  # a new file's permissions under the umask
    try:
        yield beside
        for path in beside.rglob("*"):
            if path.is_file():
                path.chmod(usual)  # safetensors creates files readable only by their owner
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            else:
                sync(path)
        sync(beside)
        beside.rename(to)
    except (OSError, SafetensorError) as error:  # SafetensorError comes from transformers
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{to} cannot be written: {reason}. Nothing was left behind") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    sync(to.parent)
