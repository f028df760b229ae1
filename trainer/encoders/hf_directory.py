"""A transformers model in a local directory, as written by save_pretrained: its architecture and weights.

Nothing in it is executed: the architecture must be one of MODEL_TYPES, and the weights must be safetensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ...storage.files import read_regular
from ...storage.sealed_json import parse
from ..config import EncoderConfig
from ..errors import ConfigError

MODEL_TYPES = {"image": ("resnet", "vit"), "text": ("distilbert", "clip_text_model")}
"""Allowed architectures of each side's encoder, by their names in transformers."""
MODEL_TYPE = "model_type"
"""Key under which a run's settings record a directory's architecture, next to its non-default settings."""
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX)


def with_architecture(side: str, encoder: EncoderConfig) -> EncoderConfig:
    """Return the encoder with the directory's absolute path and recorded architecture; explicit settings win.

    With them a run can be resumed and evaluated without the directory, which only its first step needs.
    Raises ConfigError if the directory holds no model that fits the side.
    """
    if MODEL_TYPE in encoder.config:
        return encoder
    folder = folder_of(encoder.name)
    where = f"model.{side}.name = 'hf:{folder}'"
    if not folder.is_dir():
        raise ConfigError(f"{where}: no such directory; give one written by save_pretrained")
    stored = _read_object(where, folder, "config.json")
    model_type = stored.get(MODEL_TYPE)
    if model_type not in MODEL_TYPES[side]:
        raise ConfigError(
            f"{where} holds a model of type {model_type!r}; model.{side} supports: {', '.join(MODEL_TYPES[side])}"
        )
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise ConfigError(
            f"{where} has no {_WEIGHTS[0]}. Weights of another format (.bin, .pt, .h5) are not read, "
            "since they may execute code: load the model where you trust it, and save it again with "
            "save_pretrained"
        )
    config = {MODEL_TYPE: model_type} | _architecture(model_type, stored) | encoder.config
    return encoder.model_copy(update={"name": f"hf:{folder}", "config": config})


def folder_of(name: str) -> Path:
    """Return the absolute path of `hf:/path/to/model` or `hf:./model`."""
    return Path(name.removeprefix("hf:")).expanduser().absolute()


def _read_object(where: str, folder: Path, name: str) -> dict[str, Any]:
    try:
        stored = parse(read_regular(folder / name))
    except FileNotFoundError:
        raise ConfigError(f"{where} has no {name}; give a directory written by save_pretrained") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: its {name} cannot be read: {error}") from None
    if not isinstance(stored, dict):
        raise ConfigError(f"{where}: its {name} is not a JSON object; save the model again")
    return stored


def _check_index(where: str, folder: Path) -> None:
    """Raise ConfigError unless an index names safetensors in the directory: transformers opens even pickles."""
    index = _read_object(where, folder, _INDEX)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files or not isinstance(index.get("metadata"), dict):
        raise ConfigError(f"{where}: its {_INDEX} lacks weight_map or metadata; save the model again")
    for name in files.values():
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{where}: its {_INDEX} names {name!r}; only *.safetensors in the directory itself are "
                "read. Save the model again where you trust it"
            )


def _architecture(model_type: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json that differ from the default of the model's type.

    Leaves out settings common to all models (some name code to fetch or run), settings for outputs other than features,
    and token ids, which come from the run's tokenizer.
    """
    default = AutoConfig.for_model(model_type).to_dict()
    own = default.keys() - PreTrainedConfig().to_dict().keys() - {"out_features", "out_indices"}
    return {
        key: value
        for key, value in sorted(stored.items())
        if key in own and value != default[key] and not key.endswith("_token_id") and _is_setting(value)
    }


def _is_setting(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int) for item in value)
    return isinstance(value, bool | int | float | str)


def load_model(where: str, folder: Path, config: Any) -> nn.Module:
    """Return the directory's model, float32. Raises ConfigError if its weights do not match the config."""
    if not folder.is_dir():
        raise ConfigError(f"{where}: the directory, whose weights the run starts from, no longer exists")
    if (folder / _INDEX).exists():
        _check_index(where, folder)
    try:
        with quiet():
            model, found = AutoModel.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{where}: its weights do not match its config.json ({_first_line(error)})") from error
    # A ViT is often published with a classifier instead of the pooler; the pooler is then trained from scratch.
    if missing := sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
        raise ConfigError(f"{where} lacks {len(missing)} of the model's tensors, for example {missing[0]}")
    # It is loaded in evaluation mode: without dropout, and with batch norms that do not learn.
    loaded: nn.Module = model.train()
    return loaded


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and reports; its warnings are errors here."""
    log: Any = transformers_logging  # it has no types
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
