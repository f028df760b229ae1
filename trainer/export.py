"""Export a run's encoders: directories for transformers, timm or open_clip, or plain safetensors with metadata.

None needs thermopile to be read. docs/exporting.md describes the files.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from .._version import __version__
from ..pipeline.dataset.index import TOKENIZER_FILE, read_index
from ..pipeline.errors import DatasetError
from ..storage.files import written_through
from ..storage.local import LocalPath
from ..storage.lock import LockedError
from ..storage.place import place_of, places_of
from .checkpoints.checkpoint_files import LATEST
from .checkpoints.tensors import save_tensors
from .config import FROZEN, EncoderConfig, TrainConfig, Weights
from .encoders import Encoder
from .encoders.hf_hub import hub_name
from .errors import ConfigError, RunError
from .evaluation.evaluate import tokenizer_of
from .evaluation.features import restore_encoders
from .metrics.metrics_file import last_lines, numbers_in
from .plugins import HF, OPEN_CLIP, TIMM
from .run.build import recipe_named
from .run.chosen_settings import LEARNED, has_own_heads, is_whole, learned_by
from .run_directory import RunDirectory, find_checkpoint, load_found, refuse_in_run

_log = logging.getLogger(__name__)
Format = Literal["hf", "timm", "open_clip", "safetensors"]
OF_IMAGES, OF_TEXTS, OF_PAIRS = "image-feature-extraction", "feature-extraction", "zero-shot-image-classification"
"""Tasks as a hub names them."""


@dataclass(frozen=True)
class _Side:
    """One encoder of a checkpoint, and the metadata that a reader of its weights needs, as JSON values."""

    name: str
    """image, text, or momentum: the moving average of the image encoder."""
    encoder: Encoder
    facts: dict[str, Any]
    known: dict[str, Any]
    """What a hub reads of the run, as `_known` returns it."""
    tokenizer: bytes | None = None
    """For texts, the file of the run's tokenizer."""
    pad_token: str = ""


def export_encoders(
    run: RunDirectory,
    to: Path,
    format: Format,
    *,
    at: str = LATEST,
    weights: Weights | None = None,
    allow_code: bool = False,
) -> list[Path]:
    """Write the encoders of a run's checkpoint, `latest` or step-N, to the new directory `to`; returns its files.

    weights: of image and text encoder, by default averaged if the run has averages; a momentum network has only its
    own. allow_code: as restore_encoders. A kill leaves no `to`, only a hidden directory next to it.
    Raises ConfigError if `to` exists or is in a run, the format has no such encoder or the run has no averaged weights,
    RunError if the run or checkpoint does not exist, a weight is not finite or the run's tokenizer is missing or
    damaged, OSError if writing fails.
    """
    if os.path.lexists(to):
        raise ConfigError(f"{to} already exists; nothing was written. Choose another directory with --to")
    refuse_in_run(place_of(to))
    config = run.config()
    weights = config.model.chosen_weights(weights)
    if why := why_impossible(config, format):
        raise ConfigError(f"{why}; export it with --format safetensors")
    sides = _restore(run, config, at, weights, allow_code)
    with _built(to) as folder:
        if format == "open_clip":
            _write_open_clip(*sides, folder=folder)
        for side in sides if format != "open_clip" else ():
            if format == "hf":
                _write_hf(side, folder / side.name)
            elif format == "timm" and side.tokenizer is None:
                _write_timm(side, folder / side.name)
            else:
                _save(side.encoder, folder / f"{side.name}.safetensors", side.facts)
                _copy_tokenizer(side, folder)
        if format == "hf" and config.objective.mode == "bimodal" and has_own_heads(config.model):
            _write_whole(sides, folder)
    return sorted(path for path in to.rglob("*") if path.is_file())


def why_impossible(config: TrainConfig, format: Format) -> str:
    """Return why the format cannot hold the run's encoders, empty if it can."""
    sides = {"image": config.model.image} | ({"text": config.model.text} if config.objective.mode == "bimodal" else {})
    image, names, what = config.model.image.name, [encoder.name for encoder in sides.values()], ""
    if format == "timm" and not image.startswith(TIMM):
        what = f"the run's image encoder is {image!r}, which timm does not have"
    is_pair = names == [image] * 2 and image.startswith(OPEN_CLIP) and config.model.head == "none"
    if format == "open_clip" and not is_pair:
        what = "the run has not both towers of a model of open_clip, with model.head = 'none'"
    for side, encoder in sides.items() if format == "hf" else ():
        with_stem = " with the stem 'cifar'" if encoder.config.get("stem") == "cifar" else ""
        if with_stem or not encoder.name.startswith(HF):
            what = f"the run's {side} encoder is {encoder.name!r}{with_stem}, which transformers does not have"
    return what


def _restore(run: RunDirectory, config: TrainConfig, at: str, weights: Weights, allow_code: bool) -> list[_Side]:
    checkpoint = find_checkpoint(run, at)
    info, training = load_found(checkpoint)
    has_texts = config.objective.mode == "bimodal"
    tokenizer, sizes, file = tokenizer_of(run) if has_texts else (None, None, None)
    encoders = restore_encoders(config, checkpoint, training, sizes, weights, allow_code=allow_code)
    for name, values in encoders.state_dict().items():
        if not values.isfinite().all():
            raise RunError(
                f"{checkpoint} holds weights that are not finite ({name}); nothing was written. Export an older "
                "checkpoint with --at"
            )
    recipe, size = recipe_named(config.data.recipe), config.data.image_size
    facts: dict[str, Any] = {"weights": weights, "image_size": size, "mean": recipe.mean, "std": recipe.std}
    if has_texts:
        facts |= _logits(config, training.get("objective", {}))
    facts = _facts(config, config.model.image, encoders.image, info.step) | facts
    image = _Side("image", encoders.image, facts, _known(run, config, info.step, weights))
    if encoders.momentum is not None:
        facts, known = facts | {"network": "momentum", "weights": "raw"}, image.known | {"eval_results": None}
        return [image, replace(image, name="momentum", encoder=encoders.momentum, facts=facts, known=known)]
    if encoders.text is None or tokenizer is None or sizes is None:
        return [image]
    facts = {"weights": weights} | sizes.model_dump(include={"vocab_size", "context_length", "end_id"})
    facts = _facts(config, config.model.text, encoders.text, info.step) | facts
    pad_id = getattr(encoders.text.backbone, "pad_id", None)  # of a model that reads padding
    own_pad = None if pad_id is None else tokenizer.id_to_token(pad_id)
    pad_token = own_pad or (tokenizer.padding or {})["pad_token"]
    return [image, _Side("text", encoders.text, facts, image.known, file, pad_token)]


def _logits(config: TrainConfig, learned: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return what makes logits of cosines: log_logit_scale, and a logit_bias; empty without a temperature.

    Temperatures of single samples count as the one that they began with, since other samples have none. A bias that the
    objective does not learn is that of the model that the run began from.
    """
    found = {name: value.item() for name, value in learned.items() if name in LEARNED}
    settings, image = config.objective.settings, config.model.image
    tau = learned["tau"].item() if "tau" in learned else settings.get("tau", settings.get("tau_init"))
    if "log_tau" in learned:
        found["log_logit_scale"] = -learned["log_tau"].item()
    elif tau:
        found.setdefault("log_logit_scale", -math.log(tau))
    if "logit_bias" not in found and image.config.get("model_type") != "clip_vision_model" and is_whole(config.model):
        try:
            found |= {name: value for name, value in learned_by(config.model).items() if name == "logit_bias"}
        except ConfigError:
            _log.warning("%s cannot be read, so the exported model has no logit_bias of its own", image.name)
    return found


def _facts(config: TrainConfig, encoder: EncoderConfig, module: Encoder, step: int) -> dict[str, Any]:
    # For a local model or file of weights only its name: its path is private and useless elsewhere.
    facts = {"encoder": re.sub(":[^:]*/", ":", encoder.name), "config": encoder.config, "width": module.backbone.width}
    of_head = config.model.model_dump(include={"head", "head_width", "dim"})
    return facts | of_head | {"step": step, "thermopile": __version__}


def _write_hf(side: _Side, folder: Path) -> None:
    from .encoders.hf_directory import quiet

    model: Any = side.encoder.backbone.model
    with quiet():
        model.save_pretrained(folder)
    _save(side.encoder.head, folder / "head.safetensors", side.facts)
    _write_preparation(side, folder)
    features = f"Its features, {side.facts['width']} wide, are {side.encoder.backbone.output}. `head.safetensors` holds"
    head = f"the projection head ({side.facts['head']}) from them to {side.facts['dim']} dimensions."
    how = f"`transformers.{type(model).__name__}.from_pretrained` loads it.\n\n{features} {head}"
    _write_card(side, folder, "transformers", OF_TEXTS if side.tokenizer else OF_IMAGES, how)


def _write_whole(sides: list[_Side], folder: Path) -> None:
    """Write the CLIP or SigLIP that a run began from, in the folder of that name, if its features are the run's."""
    from .encoders.hf_directory import quiet, whole_model

    image, text = (side.encoder for side in sides)
    if sides[1].facts["end_id"] == 2 and str(sides[0].facts["config"]["model_type"]).startswith("clip"):
        _log.warning(
            "no clip/ is written: where the end token's id is 2, as in the run's tokenizer, transformers' CLIP reads a "
            "text at its largest token; image/ and text/ give the run's features"
        )
        return
    learned = {tensor: sides[0].facts[name] for name, tensor in LEARNED.items() if name in sides[0].facts}
    model = whole_model(image, text, learned)
    folder = folder / model.config.model_type
    with quiet():
        model.save_pretrained(folder)
    for side in sides:
        _write_preparation(side, folder)
    how = "`transformers.AutoModel.from_pretrained` loads both towers."
    _write_card(sides[0], folder, "transformers", OF_PAIRS, how)


def _write_preparation(side: _Side, folder: Path) -> None:
    """Write the tokenizer, or the image processor.

    It does what `thermopile eval` does, the central square, except for another resampler's rounding.
    """
    if side.tokenizer is not None:
        _write_tokenizer(side, folder)
        return
    size = side.facts["image_size"]
    steps = ("do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize")
    processor = dict.fromkeys(steps, True) | {
        "image_processor_type": "CLIPImageProcessor",  # it resizes the short side and crops the centre
        "size": {"shortest_edge": size},
        "resample": 2,
        "crop_size": {"height": size, "width": size},
        "rescale_factor": 1 / 255,
        "image_mean": side.facts["mean"],
        "image_std": side.facts["std"],
    }
    _write_json(folder / "preprocessor_config.json", processor)


def _write_timm(side: _Side, folder: Path) -> None:
    from timm.models import save_for_hf

    backbone: Any = side.encoder.backbone
    shown = {"input_size": (3, *[side.facts["image_size"]] * 2), "crop_pct": 1.0} | _normalisation(side)
    backbone.body.pretrained_cfg |= shown
    save_for_hf(backbone.body, folder, model_args=backbone.settings, safe_serialization=True)
    _save(side.encoder.head, folder / "head.safetensors", side.facts)
    _write_card(side, folder, "timm", OF_IMAGES, "`timm.create_model` loads it; `head.safetensors` holds its head.")


def _write_open_clip(image: _Side, text: _Side, *, folder: Path) -> None:
    visual: Any = image.encoder.backbone
    words: Any = text.encoder.backbone
    model = nn.ModuleDict({"visual": visual.body, "text": words.body})
    learned = {tensor: image.facts[name] for name, tensor in LEARNED.items() if name in image.facts}
    for name, value in ({"logit_scale": math.log(1 / 0.07)} | learned).items():  # open_clip's first, for other losses
        setattr(model, name, nn.Parameter(torch.tensor(value)))
    _save(model, folder / "open_clip_model.safetensors", image.facts)
    text_cfg = words.config["text_cfg"] | {"hf_tokenizer_name": ".", "tokenizer_kwargs": {}}
    config = visual.config | words.config | {"text_cfg": text_cfg}
    if "logit_bias" in learned:
        config["init_logit_bias"] = learned["logit_bias"]  # open_clip has a bias only then
    _write_json(folder / "open_clip_config.json", {"model_cfg": config, "preprocess_cfg": _normalisation(image)})
    _write_tokenizer(text, folder)
    _write_card(image, folder, "open_clip", OF_PAIRS, "`open_clip.create_model_and_transforms` loads it.")


def _normalisation(side: _Side) -> dict[str, Any]:
    return {"mean": side.facts["mean"], "std": side.facts["std"], "interpolation": "bilinear"}


def _write_tokenizer(side: _Side, folder: Path) -> None:
    _copy_tokenizer(side, folder)
    # With these, AutoTokenizer uses tokenizer.json unchanged, and pads and truncates.
    settings = {"model_max_length": side.facts["context_length"], "pad_token": side.pad_token}
    if str(side.facts["config"].get("model_type")).startswith("siglip"):  # it reads padding
        settings |= {"model_input_names": ["input_ids"]}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | settings)


def _copy_tokenizer(side: _Side, folder: Path) -> None:
    if side.tokenizer is not None:
        (folder / TOKENIZER_FILE).write_bytes(side.tokenizer)


def _save(module: nn.Module, path: Path, facts: dict[str, Any]) -> None:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    save_tensors(path, module.state_dict(), {"format": "pt"} | texts)


def _write_card(side: _Side, folder: Path, library: str, task: str, how: str) -> None:
    """Write a README.md with what a hub reads. how: the library's call that loads the folder, and more."""
    from huggingface_hub import ModelCardData

    about = ModelCardData(library_name=library, pipeline_tag=task, **side.known)
    trained = f"trained contrastively to step {side.facts['step']:,}"
    is_frozen = FROZEN in side.known["tags"]
    what = f"A model {'that judged pairs and was not trained here' if is_frozen else trained}. {how}"
    sets = "" if side.known["datasets"] else "its `datasets`, which are not known here, "
    cure = f"Before you publish it, add its `license` above, {sets}and the `language` of its captions."
    rows = "\n".join(f"| {key} | {json.dumps(value)} |" for key, value in side.facts.items())
    text = f"---\n{about}\n---\n\n# From a thermopile run\n\n{what}\n\n{cure}\n\n| | |\n|---|---|\n{rows}\n"
    (folder / "README.md").write_text(text, "utf-8")


def _known(run: RunDirectory, config: TrainConfig, step: int, weights: Weights) -> dict[str, Any]:
    """Return what a hub reads of a run: the hub's models and data sets that it is made of, and its scores at a step."""
    from huggingface_hub import EvalResult, parse_hf_uri

    encoders = [config.model.image, config.model.text][: 1 + (config.objective.mode == "bimodal")]
    models = [found[0] for each in encoders if (found := hub_name(each.name)) and each.config.get("pretrained", True)]
    test, results, sets = Path(config.evaluation.test).name, list[EvalResult](), list[str]()
    with suppress(OSError):  # where they were never written
        for line in last_lines(run.metrics, 0, 1, until=step).evaluations:
            if line["step"] == step and line.get("weights", "raw") == weights:
                scores = ((name, score) for name, score in numbers_in(line["evaluation"]) if name.endswith("/all"))
                of_test = partial(EvalResult, OF_PAIRS, test, test, "accuracy")
                results = [of_test(score, metric_name=name) for name, score in scores]
    with suppress(OSError, DatasetError, ValueError):  # where the dataset was moved, or says an odd place
        roots = [str(read_index(place).source.get("root")) for place in places_of(config.data.places)]
        sets = [parse_hf_uri(root).id for root in roots if root.startswith("hf://datasets/")]
    known = {"tags": ["thermopile", "contrastive-learning", config.objective.name], "base_model": models or None}
    return known | {"datasets": sets or None, "eval_results": results or None, "model_name": run.path.name}


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", "utf-8")


@contextmanager
def _built(to: Path) -> Iterator[Path]:
    """Yield a new directory that is flushed and gets the name `to` at the end, or is removed on failure."""
    try:
        with LocalPath(to).built() as building:
            building.mkdir()
            with written_through(building):
                yield building
                usual = building.stat().st_mode & 0o666  # a new file's permissions under the umask
                for path in building.rglob("*.safetensors"):
                    path.chmod(usual)  # safetensors creates files readable only by their owner
    except (OSError, SafetensorError, LockedError) as error:  # SafetensorError comes from transformers
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OSError(f"{to} cannot be written: {reason}. Nothing was left behind") from error
