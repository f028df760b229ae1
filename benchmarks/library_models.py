"""Small models of benchmarks.libraries, saved by transformers, timm and open_clip themselves, and read by them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from thermopile.pipeline.opening import Dataset

SIDE, CONTEXT, DIM = 32, 64, 16
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
SCALE, BIAS = 3.5, -3.0
TEXT = {"name": "mean_embedding", "config": {"width": 8}}


class Model(NamedTuple):
    """A model that is saved, and the run that begins with it."""

    saved_by: str
    save: Callable[[Path], Path]
    """Writes the model to a folder unless it is there; returns the folder."""
    settings: Callable[[Path, Dataset], dict[str, Any]]
    """`model` of a run that begins with it."""
    objective: str = "clip"
    read: Callable[[Path, Sequence[Image.Image], Tensor], Theirs] = lambda *_: NotImplemented


class Theirs(NamedTuple):
    """What a library makes of pictures and tokens."""

    pixels: Tensor
    features: Tensor | None = None
    """None where the loss of a whole model is compared."""
    loss: float | None = None
    scale: float | None = None
    bias: float | None = None


WORDS = ("the character", "latin", "greek", "small", "capital letter")


def clip_tokenizer(folder: Path, words: Sequence[str] = WORDS, context: int = CONTEXT) -> int:
    """Write a tokenizer like CLIP's, trained on `words`: its closing token has the highest id, which is returned, and
    also pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<|start|>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $A <|end|>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return len(tokenizer.get_vocab()) - 1


def _whole(kind: str, layout: int) -> Callable[[Path], Path]:
    """A CLIP or SigLIP; layout: 5 is AutoProcessor.save_pretrained's of transformers 5, 4 that of transformers 4."""

    def save(folder: Path) -> Path:
        if folder.exists():
            return folder
        from transformers import AutoConfig, AutoModel, AutoProcessor

        folder.mkdir(parents=True)
        end_id = clip_tokenizer(folder)
        words = {"vocab_size": end_id + 1, "max_position_embeddings": CONTEXT, "eos_token_id": end_id,
                 "bos_token_id": end_id - 1, "pad_token_id": end_id}  # fmt: skip
        space = {"projection_dim": DIM} if kind == "clip" else {}
        vision = TOWER | {"image_size": SIDE, "patch_size": 8}
        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, text_config=TOWER | words, vision_config=vision, **space)
        model: Any = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
        torch.nn.init.constant_(model.logit_scale, SCALE)
        if kind == "siglip":
            torch.nn.init.constant_(model.logit_bias, BIAS)
        model.save_pretrained(folder)
        _write_processor(folder, "CLIPImageProcessor" if kind == "clip" else "SiglipImageProcessor")
        if layout == 5:  # one file, processor_config.json
            processor: Any = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]
            (folder / "preprocessor_config.json").unlink()
            processor.save_pretrained(folder)
        return folder

    return save


def _write_processor(folder: Path, kind: str) -> None:
    size = {"shortest_edge": SIDE} if kind == "CLIPImageProcessor" else {"height": SIDE, "width": SIDE}
    told = {"image_processor_type": kind, "image_mean": MEAN, "image_std": STD, "size": size,
            "crop_size": {"height": SIDE, "width": SIDE}}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(told))


def _read_whole(folder: Path, pictures: Sequence[Image.Image], tokens: Tensor) -> Theirs:
    from transformers import AutoModel, AutoProcessor

    read: Any = AutoProcessor
    model: Any = AutoModel.from_pretrained(folder).eval()
    processor = read.from_pretrained(folder)
    pixels = processor(images=list(pictures), return_tensors="pt")["pixel_values"]
    tokens = tokens.cummax(1).values.where(
        (tokens == tokens.max()).cumsum(1) > 0, tokens
    )  # padded as transformers pads
    loss = model(pixel_values=pixels, input_ids=tokens, return_loss=True).loss.item()
    bias = model.logit_bias.item() if hasattr(model, "logit_bias") else None
    return Theirs(pixels, None, loss, model.logit_scale.item(), bias)


def _both(place: Path, dataset: Dataset) -> dict[str, Any]:
    return {"image": {"name": f"hf:{place}"}, "text": {"name": f"hf:{place}"}}


def _hf_images(kind: str, **settings: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        from transformers import AutoConfig, AutoModel

        torch.manual_seed(1)
        model: Any = AutoModel.from_config(AutoConfig.for_model(kind, **settings))  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        _write_processor(folder, {"vit": "ViTImageProcessor"}.get(kind, "ConvNextImageProcessor"))
        if kind != "vit":
            told = json.loads((folder / "preprocessor_config.json").read_text())
            told |= {"size": {"shortest_edge": SIDE}, "crop_pct": 1.0}
            (folder / "preprocessor_config.json").write_text(json.dumps(told))
        return folder

    return save


def _read_hf_images(folder: Path, pictures: Sequence[Image.Image], tokens: Tensor) -> Theirs:
    from transformers import AutoImageProcessor, AutoModel

    read: Any = AutoImageProcessor
    pixels = read.from_pretrained(folder)(images=list(pictures), return_tensors="pt")["pixel_values"]
    return Theirs(pixels, AutoModel.from_pretrained(folder).eval()(pixels).pooler_output.flatten(1))


def _timm(name: str, **settings: Any) -> Model:
    def save(folder: Path) -> Path:
        import timm
        from timm.models import save_for_hf

        torch.manual_seed(1)
        model = timm.create_model(name, **settings)  # with a classifier, as timm's own
        model.pretrained_cfg |= {"mean": MEAN, "std": STD, "input_size": (3, SIDE, SIDE), "crop_pct": 1.0}
        save_for_hf(model, folder, model_args=settings, safe_serialization=True)
        return folder

    def in_settings(place: Path, dataset: Dataset) -> dict[str, Any]:
        return {"image": {"name": f"timm:{name}:{place}/model.safetensors", "config": settings}, "text": TEXT}

    return Model("timm", save, in_settings, read=_read_timm)


def _read_timm(folder: Path, pictures: Sequence[Image.Image], tokens: Tensor) -> Theirs:
    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    pixels = torch.stack([transform(picture) for picture in pictures])
    return Theirs(pixels, model(pixels))


def _open_clip(objective: str) -> Model:
    vision = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"layers": 2, "width": 32, "heads": 2}

    def save(folder: Path) -> Path:
        import open_clip

        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"vocab_size": clip_tokenizer(folder) + 1, "context_length": CONTEXT}
        config = {"embed_dim": DIM, "vision_cfg": vision | {"image_size": SIDE}, "text_cfg": text | sizes}
        config |= {"init_logit_bias": BIAS} if objective == "siglip" else {}
        torch.manual_seed(1)
        model = open_clip.CLIP(**config, init_logit_scale=SCALE)
        shown = open_clip.transform.PreprocessCfg(size=SIDE, mean=tuple(MEAN), std=tuple(STD))
        open_clip.model.set_model_preprocess_cfg(model, asdict(shown))
        tokenizer = SimpleNamespace(save_pretrained=str)  # it is there already
        sys.modules["open_clip.push_to_hf_hub"].save_for_hf(model, tokenizer, config, folder, safe_serialization=True)
        return folder

    def settings(place: Path, dataset: Dataset) -> dict[str, Any]:
        assert dataset.index.tokenizer is not None
        sizes = {"vocab_size": dataset.index.tokenizer.vocab_size, "context_length": CONTEXT, "embed_dim": DIM}
        name = f"open_clip:ViT-B-32:{place}/open_clip_model.safetensors"
        return {"dim": DIM, "head": "none", "image": {"name": name, "config": vision | {"embed_dim": DIM}},
                "text": {"name": name, "config": text | sizes}}  # fmt: skip

    return Model("open_clip", save, settings, objective, _read_open_clip)


def _read_open_clip(folder: Path, pictures: Sequence[Image.Image], tokens: Tensor) -> Theirs:
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    pixels = torch.stack([transform(picture) for picture in pictures])
    image, text, scale, *bias = model.eval()(pixels, tokens)
    loss = open_clip.loss.SigLipLoss() if bias else open_clip.ClipLoss()
    found = loss(image, text, scale, *bias)
    return Theirs(pixels, None, found.item(), scale.log().item(), bias[0].item() if bias else None)


_VIT = TOWER | {"image_size": SIDE, "patch_size": 8}
_STAGES = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}


def _hf(kind: str, **settings: Any) -> Model:
    def image_alone(place: Path, dataset: Dataset) -> dict[str, Any]:
        return {"image": {"name": f"hf:{place}"}, "text": TEXT}

    return Model("transformers", _hf_images(kind, **settings), image_alone, read=_read_hf_images)


MADE = {
    **{
        f"{name} of transformers {layout}": Model(
            "AutoProcessor" if layout == 5 else "files of transformers 4",
            _whole(name.lower(), layout), _both, name.lower(), _read_whole,
        )
        for name in ("CLIP", "SigLIP") for layout in (5, 4)
    },
    "ViT of transformers": _hf("vit", **_VIT),
    "ConvNeXt of transformers": _hf("convnext", **_STAGES),
    "ResNet of transformers": _hf("resnet", **_STAGES, embedding_size=8),
    "ViT of timm": _timm("vit_small_patch16_224", img_size=SIDE, depth=2, embed_dim=32, num_heads=2, patch_size=8),
    "ConvNeXt of timm": _timm("convnext_atto", depths=[1] * 4, dims=[8, 8, 16, 16]),
    "ResNet of timm": _timm("resnet18", channels=[4, 4, 8, 8], layers=[1] * 4, stem_width=4),
    "CLIP of open_clip": _open_clip("clip"),
    "CLIP of open_clip with a bias": _open_clip("siglip"),
}  # fmt: skip
