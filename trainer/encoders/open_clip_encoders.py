"""Towers of open_clip, each with its projection: untrained, or with weights of a file or published ones."""

from typing import Any

from safetensors.torch import load_file
from torch import nn

from ...pipeline.dataset_index import TokenizerInfo
from ..config import EncoderConfig
from ..errors import ConfigError, one_line
from ..plugins import OPEN_CLIP, TIMM
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
        try:
            tower = _tower(config, side, published.get("hf_hub") or weights if pretrained else "")
        except Exception as error:  # neither open_clip nor the hub has a common class
            raise ConfigError(f"{key} cannot be created: {one_line(error)}") from error
        super().__init__(key, tower, config["embed_dim"], recompute, given, _GROUPS)
        self.config = {field: config[field] for field in ("embed_dim", "quick_gelu", "custom_text", part)}


def published_normalisation(image: EncoderConfig) -> dict[str, list[float]]:
    """Return `mean` and `std` of the weights of timm or open_clip that the settings ask for; empty without any."""
    key, (library, _, name) = f"model.image.name = {image.name!r}", image.name.partition(":")
    found: dict[str, Any] = {}
    if image.name.startswith(TIMM) and image.config.get("pretrained"):
        models = imported(key, library).models
        found = vars(models.get_pretrained_cfg(name)) if models.is_model_pretrained(name) else {}
    elif image.name.startswith(OPEN_CLIP) and ":" in name:
        found = imported(key, library).get_pretrained_cfg(*name.split(":", 1))
    return {part: [*found[part]] for part in ("mean", "std") if part in found}


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
        raise ConfigError(
            f"{key} reads padding as it was trained with; use the model of transformers, hf:/path/to/model"
        )
    tower |= sizes
    if tower.get("pool_type", "argmax") in ("argmax", "eos"):  # argmax: CLIP's end token is its largest
        tower |= {"pool_type": "eos", "eos_id": tokens.end_id}


def _tower(config: dict[str, Any], side: str, weights: str) -> nn.Module:
    """Create a tower. weights: a file of the whole model, or a published model's repository and a slash, or empty."""
    from open_clip import model
    from open_clip.pretrained import HF_SAFE_WEIGHTS_NAME, download_pretrained_from_hf

    build, part = {"image": (model._build_vision_tower, "visual"), "text": (model._build_text_tower, "text")}[side]
    tower: nn.Module = build(config["embed_dim"], config[PARTS[side]], config["quick_gelu"])
    if weights:
        if not weights.endswith(".safetensors"):
            weights = download_pretrained_from_hf(weights.rpartition("/")[0], HF_SAFE_WEIGHTS_NAME)
        stored, whole = model.convert_to_custom_text_state_dict(load_file(weights)), nn.ModuleDict({part: tower})
        if side == "image":
            model.resize_pos_embed(stored, whole)
        whole.load_state_dict({name: values for name, values in stored.items() if name.startswith(f"{part}.")})
    return tower
