"""A transformers model in a local directory, as written by save_pretrained: its architecture and weights.

Nothing in it is executed: the architecture must be one of transformers' own, and the weights must be safetensors.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...pipeline.dataset.index import TOKENIZER_FILE
from ...pipeline.dataset.tokenizer import is_same_tokenizer, read_tokenizer
from ...storage.files import read_regular
from ...storage.sealed_json import parse
from ..config import EncoderConfig
from ..errors import ConfigError, refusing
from ..plugins import HF
from .backbones import refuse_absurd
from .hf_hub import hub_name, snapshot

try:
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedConfig, SiglipTextModel
    from transformers.models.auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    cure = "install torchvision from the index that torch comes from, or remove it"
    raise ConfigError(f"transformers' models cannot be imported beside this torchvision; {cure}") from error

SUPPORTED = {
    "image": "resnet, vit, clip_vision_model, dinov2 and other models of images, and towers of clip and siglip",
    "text": "distilbert, clip_text_model, bert and other encoders or decoders of text, and towers of clip and siglip",
}
_TEXT_TOWERS = ("clip_text_model", "siglip_text_model")
MODEL_TYPE, PROJECTION = "model_type", "projection"
"""Keys under which a run's settings record a directory's architecture, next to its non-default settings, and the
dimension of the space of the whole model that a tower is from."""
FETCHING = ("mra", "yoso", "rwkv", "timm_wrapper", "timm_backbone")
"""Model types whose creation may fetch code of the hub, or models."""
_WEIGHTS = ("model.safetensors", _INDEX := "model.safetensors.index.json")
_log = logging.getLogger(__name__)


def model_class(model_type: str, side: str = "") -> Any:
    """Return transformers' class of a type, or None if it has none that takes what the side has.

    Types that may fetch other models or code, or are composed of several models, as encoder and decoder, have none.
    """
    try:
        config = CONFIG_MAPPING[model_type]
        made: Any = SiglipTextModel if model_type == "siglip_text_model" else MODEL_MAPPING[config]
        settings = config().to_dict()
        parts = config.sub_configs or [key for key in settings if "backbone" in key]
        is_composed = parts or settings.get("is_encoder_decoder")
        has_tokens = config in MODEL_FOR_MASKED_LM_MAPPING or config in MODEL_FOR_CAUSAL_LM_MAPPING
        reads_text = model_type in _TEXT_TOWERS or (has_tokens and "eos_token_id" in settings)
        fits = {"image": made.main_input_name == "pixel_values", "text": reads_text}
    except (KeyError, ImportError, AttributeError, ValueError, TypeError):  # unknown, or its packages are missing
        return None
    return None if model_type in FETCHING or is_composed or not fits.get(side, True) else made


def refuse_type(where: str, side: str, model_type: object) -> None:
    """Raise ConfigError unless a model of this type can be the side's encoder."""
    if model_class(str(model_type), side) is None:
        raise ConfigError(f"{where} holds a model of type {model_type!r}; model.{side} supports: {SUPPORTED[side]}")


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
    stored = read_object(where, folder, "config.json")
    refuse_absurd(where, stored)
    recorded: dict[str, Any] = {}
    if stored.get(MODEL_TYPE) in ("clip", "siglip"):
        stored, recorded = _tower(where, side, stored)
    model_type = stored.get(MODEL_TYPE)
    refuse_type(where, side, model_type)
    if encoder.config.get("pretrained", True) and not any((folder / name).is_file() for name in _WEIGHTS):
        raise ConfigError(
            f"{where} has no {_WEIGHTS[0]}. Weights of another format (.bin, .pt, .h5) are not read, "
            "since they may execute code: load the model where you trust it, and save it again with "
            f"save_pretrained. For fresh weights, set model.{side}.config.pretrained=false"
        )
    recorded |= {MODEL_TYPE: model_type} | _architecture(where, folder, str(model_type), stored)
    name = f"{HF}{hub[0]}@{folder.name}" if (hub := hub_name(encoder.name)) else f"{HF}{folder}"
    return encoder.model_copy(update={"name": name, "config": recorded | encoder.config})


def _tower(where: str, side: str, stored: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json of a whole model's tower, and what is recorded of the whole."""
    towers = {key: value for key, value in stored.items() if key.startswith(("text_config", "vision_config"))}
    with refusing(f"{where}: its config.json cannot be used"):
        whole: Any = AutoConfig.for_model(stored[MODEL_TYPE], **towers)
        in_tower = whole.vision_config.hidden_size if stored[MODEL_TYPE] == "siglip" else whole.projection_dim
        space = int(stored.get("projection_dim", in_tower))
        tower = (whole.vision_config if side == "image" else whole.text_config).to_dict()
    return tower, {PROJECTION: space}


def folder_of(name: str) -> Path:
    """Return the absolute path of `hf:/path/to/model` or `hf:./model`, or where `hf:org/name` was fetched to."""
    return snapshot(name) or Path(name.removeprefix(HF)).expanduser().absolute()


def read_object(where: str, folder: Path, name: str) -> dict[str, Any]:
    try:
        stored = parse(read_regular(folder / name))
    except FileNotFoundError:
        raise ConfigError(f"{where} has no {name}; give a directory written by save_pretrained") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: its {name} cannot be read: {error}") from None
    if not isinstance(stored, dict):
        raise ConfigError(f"{where}: its {name} is not a JSON object; save the model again")
    return stored


def _check_index(where: str, folder: Path) -> dict[str, str]:
    """Return tensor → file; raise ConfigError unless all are safetensors: transformers opens even pickles."""
    index = read_object(where, folder, _INDEX)
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files or not isinstance(index.get("metadata"), dict):
        raise ConfigError(f"{where}: its {_INDEX} lacks weight_map or metadata; save the model again")
    for name in files.values():
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise ConfigError(
                f"{where}: its {_INDEX} names {name!r}; only *.safetensors in the directory itself are "
                "read. Save the model again where you trust it"
            )
    return files


def _architecture(where: str, folder: Path, model_type: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a config.json that differ from the default of the model's type.

    Leaves out settings common to all models (some name code to fetch or run), settings for outputs other than features,
    and token ids, which come from the run's tokenizer; but for models that read padding its id, with which the
    directory's tokenizer pads.
    """
    default = AutoConfig.for_model(model_type).to_dict()
    if usual := default.get("rope_parameters"):
        known = {key: value for key, value in stored.items() if "rope" in key or "rotary" in key}
        rope = built(where, model_type, known).to_dict()["rope_parameters"]  # before transformers 5 several keys
        has_theta = rope == usual | {"rope_theta": rope.get("rope_theta")}  # and differs in nothing else
        default |= {"rope_theta": usual.get("rope_theta")}
        stored = stored | ({"rope_parameters": usual} | rope if has_theta else {"rope_parameters": rope})
    own = default.keys() - PreTrainedConfig().to_dict().keys() - {"out_features", "out_indices", "stage_names"}
    found = {
        key: value
        for key, value in sorted(stored.items())
        if key in own and value != default[key] and value is not None and not key.endswith("_token_id")
    }
    for key, value in found.items():
        lists = isinstance(value, list) and any(all(isinstance(each, kind) for each in value) for kind in (int, str))
        if not (lists or isinstance(value, bool | int | float | str)):
            raise ConfigError(f"{where}: its config.json sets {key} to a value that settings cannot record")
    if "pad_token_id" in default and model_type not in ("distilbert", "clip_text_model"):
        pad_id = stored.get("pad_token_id", default["pad_token_id"])
        if all((folder / name).is_file() for name in (TOKENIZER_FILE, "tokenizer_config.json")):  # its tokenizer's
            token = read_object(where, folder, "tokenizer_config.json").get("pad_token")
            name = token.get("content") if isinstance(token, dict) else token
            pad_id = read_tokenizer(folder / TOKENIZER_FILE).token_to_id(str(name))
        found |= {} if pad_id is None else {"pad_token_id": pad_id}
    return found


def built(where: str, model_type: str, settings: dict[str, Any]) -> Any:
    """Return transformers' config of a type. Raises ConfigError for settings that it refuses."""
    with refusing(where):
        return AutoConfig.for_model(model_type, **settings)


def refuse_other_tokenizer(folder: Path, tokenizer: Path) -> None:
    """Raise ConfigError if the directory has another tokenizer than this file's, padding and truncation apart."""
    if not (own := folder / TOKENIZER_FILE).is_file():
        _log.warning("hf:%s has no %s, so nothing shows whether the dataset has its tokens", folder, TOKENIZER_FILE)
    elif not is_same_tokenizer(own, tokenizer):
        raise ConfigError(
            f"model.text.name = 'hf:{folder}' has another tokenizer than the dataset; convert the dataset with it: "
            f"`thermopile convert … --tokenizer {quote(f'hf:{folder}')}`"
        )


def stored_tensor(where: str, folder: Path, name: str) -> Tensor:
    """Return one of a directory's tensors, float32. Raises ConfigError if it is missing or cannot be read."""
    files = _check_index(where, folder) if (folder / _INDEX).exists() else {}
    with (
        refusing(f"{where}: its {name} cannot be read", OSError, SafetensorError),
        safe_open(folder / files.get(name, _WEIGHTS[0]), "pt") as file,
    ):
        tensor: Tensor = file.get_tensor(name).float()
    return tensor


def whole_model(image: Any, text: Any, learned: dict[str, float]) -> Any:
    """Return the CLIP or SigLIP of two encoders that have its towers and heads. learned: its tensor → value."""
    towers = {"vision": image.backbone.model, "text": text.backbone.model}
    configs = {f"{name}_config": tower.config.to_dict() for name, tower in towers.items()}
    kind = towers["vision"].config.model_type.partition("_")[0]
    sizes = {"projection_dim": image.head.out_features} if kind == "clip" else {}
    whole: Any = AutoModel.from_config(AutoConfig.for_model(kind, **sizes, **configs))  # type: ignore[no-untyped-call]
    for name, tower in towers.items():
        getattr(whole, f"{name}_model").load_state_dict(tower.state_dict())
    if kind == "clip":
        whole.visual_projection.load_state_dict(image.head.state_dict())
        whole.text_projection.load_state_dict(text.head.state_dict())
    for name, value in learned.items():
        if hasattr(whole, name):
            nn.init.constant_(getattr(whole, name), value)
    return whole


def load_model(where: str, folder: Path, config: Any) -> nn.Module:
    """Return the directory's model, float32. Raises ConfigError if its weights do not match the config."""
    if not folder.is_dir():
        raise ConfigError(f"{where}: the directory, whose weights the run starts from, no longer exists")
    if (folder / _INDEX).exists():
        _check_index(where, folder)
    if (folder / "adapter_config.json").exists():  # transformers would load it, and other files that it names
        raise ConfigError(f"{where} has an adapter; merge it into the model, and save the model again")
    kinds = OSError, ValueError, RuntimeError, SafetensorError
    with refusing(f"{where}: its weights do not match its config.json", *kinds), quiet():
        safely = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
        model, found = model_class(config.model_type).from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True, **safely
        )
    # A ViT is often published with a classifier instead of the pooler; the pooler is then trained from scratch.
    if missing := sorted(key for key in found["missing_keys"] if not key.startswith("pooler.")):
        raise ConfigError(f"{where} lacks {len(missing)} of the model's tensors, for example {missing[0]}")
    # It is loaded in evaluation mode: without dropout, and with batch norms that do not learn.
    loaded: nn.Module = model.train()
    return loaded


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and reports; its warnings are errors here."""
    log: Any = transformers_logging  # it has no types
    with ExitStack() as end:
        end.callback(log.set_verbosity, log.get_verbosity())
        end.callback(log.enable_progress_bar if log.is_progress_bar_enabled() else log.disable_progress_bar)
        log.set_verbosity_error()
        log.disable_progress_bar()
        yield
