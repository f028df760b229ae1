"""Towers of open_clip, each with its projection: untrained, or with weights of a file or published ones."""

from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ...pipeline.dataset.index import TokenizerInfo
from ..errors import ConfigError, one_line, refusing
from .backbones import refuse_absurd, refuse_too_large
from .timm_encoders import LibraryBackbone, imported

PARTS = {"image": "vision_cfg", "text": "text_cfg"}
_GROUPS = {
    "stem": r"^(?:trunk|class_embedding|positional_embedding|token_embedding|cls_emb|conv\d|bn\d|ln_pre)",
    "blocks": [(r"^transformer\.resblocks\.(\d+)", None), (r"^layer(\d+)", None), (r"^ln_(?:post|final)", (99999,))],
}
"""The stem, or the whole of a timm model; each block, the last with the final norm; the projection."""


class OpenClipBackbone(LibraryBackbone):
    """A model's tower. `config`: its part of an open_clip config, with embed_dim and vision_cfg or text_cfg."""

    def __init__(
        self, side: str, name: str, own: dict[str, Any], recompute: bool, given: int | TokenizerInfo, pretrained: bool
    ) -> None:
        """name: ARCH, ARCH:TAG or ARCH:FILE. own: embed_dim, and fields of its vision_cfg or text_cfg."""
        key, (arch, _, weights) = f"model.{side}.name = 'open_clip:{name}'", name.partition(":")
        open_clip = imported(key, "open_clip")
        config = open_clip.get_model_config(arch) if arch in open_clip.list_models() else {}
        if not config or "multimodal_cfg" in config or "hf_model_name" in config["text_cfg"]:
            raise ConfigError(f"{key}: open_clip has no such pair of towers of its own; see open_clip.list_models()")
        if refused := [field for field in own if field.startswith(("timm_model", "hf_"))]:
            raise ConfigError(f"model.{side}.config.{refused[0]} is not for a run to set; choose a model by its name")
        refuse_absurd(key, own)
        part = PARTS[side]
        config |= {"embed_dim": own.get("embed_dim", config["embed_dim"]), "custom_text": True}
        config["vision_cfg"]["timm_model_pretrained"] = False
        config[part] |= {field: value for field, value in own.items() if field != "embed_dim"}
        if isinstance(given, int):
            config[part]["image_size"] = given
        else:
            _fit(key, config[part], given, trained=bool(weights))
        published = open_clip.get_pretrained_cfg(arch, weights)
        if weights and not published.get("hf_hub", "").endswith("/") and not weights.endswith(".safetensors"):
            tags = open_clip.list_pretrained_tags_by_model(arch)
            on_hub = [tag for tag in tags if open_clip.get_pretrained_cfg(arch, tag).get("hf_hub", "").endswith("/")]
            raise ConfigError(
                f"{key}: weights are a .safetensors file (others may run code) or one of: {', '.join(on_hub) or 'none'}"
            )
        config["quick_gelu"] = (published or config).get("quick_gelu", False)
        with refusing(f"{key} cannot be created"):
            refuse_too_large(lambda: _tower(config, side, ""))
            tower = _tower(config, side, weights_of(name, fetching=True) if pretrained else "")
        super().__init__(key, tower, config["embed_dim"], recompute, given, _GROUPS)
        self.config = {field: config[field] for field in ("embed_dim", "quick_gelu", "custom_text", part)}


def learned_by(name: str) -> dict[str, float]:
    """Return `logit_scale` and `logit_bias`, as far as they are there, of ARCH:FILE, or of ARCH:TAG in the hub's cache.

    Raises ConfigError if the file cannot be read.
    """
    if not Path(weights := weights_of(name)).is_file():
        raise ConfigError(f"open_clip:{name}: there is no file {weights}, which has its temperature")
    kinds = OSError, RuntimeError, ValueError, SafetensorError
    with refusing(f"open_clip:{name}: its temperature cannot be read", *kinds), safe_open(weights, "pt") as file:
        return {key: file.get_tensor(key).item() for key in {"logit_scale", "logit_bias"} & {*file.keys()}}


def weights_of(name: str, *, fetching: bool = False) -> str:
    """Return the file of ARCH:FILE, or of ARCH:TAG in the hub's cache; empty for ARCH.

    fetching: fetch it if it is not there. Raises ConfigError if it is not there in the end.
    """
    arch, _, weights = name.partition(":")
    open_clip = imported(f"open_clip:{name}", "open_clip")
    hub = open_clip.get_pretrained_cfg(arch, weights).get("hf_hub", "")
    if not hub.endswith("/"):
        return weights
    try:
        return hf_hub_download(hub[:-1], open_clip.constants.HF_SAFE_WEIGHTS_NAME, local_files_only=not fetching)
    except Exception as error:  # of the network, the hub, the disk
        unknown = "is not in Hugging Face's cache; a new run fetches it by --set"
        why = f"cannot be fetched: {one_line(error)}" if fetching else unknown
        raise ConfigError(f"open_clip:{name} {why}") from error


def _fit(key: str, tower: dict[str, Any], tokens: TokenizerInfo, *, trained: bool) -> None:
    sizes = tokens.model_dump(include={"vocab_size", "context_length"})
    if trained and any(tower[size] != sizes[size] for size in sizes):
        raise ConfigError(
            f"{key} has {tower['vocab_size']:,} tokens and captions of {tower['context_length']}, the dataset "
            f"{tokens.vocab_size:,} and {tokens.context_length}: convert it with --tokenizer tokenizer.json (that of "
            f"huggingface.co/{tower.get('hf_tokenizer_name', 'openai/clip-vit-base-patch32')}) and --context-length "
            f"{tower['context_length']}"
        )
    if trained and tower.get("pool_type") == "last":
        raise ConfigError(f"{key} reads padding, as it was trained; use transformers' model, hf:/path/to/model")
    tower |= sizes
    if tower.get("pool_type", "argmax") in ("argmax", "eos"):  # argmax: CLIP's end token is its largest
        tower |= {"pool_type": "eos", "eos_id": tokens.end_id}


def _tower(config: dict[str, Any], side: str, weights: str) -> nn.Module:
    """Create a tower. weights: a file of the whole model, or empty."""
    from open_clip import model

    build, part = {"image": (model._build_vision_tower, "visual"), "text": (model._build_text_tower, "text")}[side]
    tower: nn.Module = build(config["embed_dim"], config[PARTS[side]], config["quick_gelu"])
    if weights:
        stored, whole = model.convert_to_custom_text_state_dict(load_file(weights)), nn.ModuleDict({part: tower})
        if side == "image":
            model.resize_pos_embed(stored, whole)
        whole.load_state_dict({name: values for name, values in stored.items() if name.startswith(f"{part}.")})
    return tower
