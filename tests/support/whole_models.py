"""A whole CLIP or SigLIP in small, with tokenizer and image processor, as a directory of transformers has it."""

import json

import torch
from transformers import AutoConfig, AutoModel

from thermopile.benchmarks.library_models import clip_tokenizer
from thermopile.trainer.encoders.hf_directory import quiet

TOWER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CONTEXT, DIM, SIDE = 48, 12, 16
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def save_whole(folder, kind):
    """Write the directory; return the model."""
    folder.mkdir(parents=True, exist_ok=True)
    end_id = clip_tokenizer(folder, context=CONTEXT)
    words = {"vocab_size": end_id + 1, "max_position_embeddings": CONTEXT, "eos_token_id": end_id,
             "bos_token_id": end_id - 1, "pad_token_id": end_id}  # fmt: skip
    space = {"projection_dim": DIM} if kind == "clip" else {}
    torch.manual_seed(1)
    model = AutoModel.from_config(AutoConfig.for_model(
        kind, text_config=TOWER | words, vision_config=TOWER | {"image_size": SIDE, "patch_size": 8}, **space
    )).eval()  # fmt: skip
    torch.nn.init.constant_(model.logit_scale, 2.0)
    if kind == "siglip":
        torch.nn.init.constant_(model.logit_bias, -3.0)
    with quiet():
        model.save_pretrained(folder)
    processor = {"image_processor_type": "CLIPImageProcessor", "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model
