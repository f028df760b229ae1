"""A whole CLIP or SigLIP in small, with tokenizer and image processor, as a directory of transformers has it."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel

from thermopile.trainer.encoders.hf_directory import quiet

TOWER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CONTEXT, DIM, SIDE = 48, 12, 16
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


def save_tokenizer(folder, words=("the character", "latin", "greek", "small", "capital letter")):
    """CLIP's kind: its closing token has the highest id, and it also pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet,
                                                             show_progress=False))  # fmt: skip
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<|start|>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $A <|end|>", special_tokens=ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT, "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return ends[1][1]


def save_whole(folder, kind):
    """Write the directory; return the model."""
    folder.mkdir(parents=True, exist_ok=True)
    end_id = save_tokenizer(folder)
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
