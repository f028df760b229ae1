"""Captions → token ids of a fixed length, with a byte-level BPE trained on the captions themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, START, END = "<pad>", "<start>", "<end>"
PAD_ID, START_ID, END_ID = 0, 1, 2
"""Their ids, in the order in which they are given to the trainer. Encoders tell padding from text by PAD_ID."""


def train_tokenizer(captions: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most vocab_size tokens: any text can be encoded, none is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}",
        special_tokens=[(START, START_ID), (END, END_ID)],
    )
    return tokenizer


def load_tokenizer(path: Path, *, context_length: int) -> Tokenizer:
    """The tokenizer of a dataset, set to pad and truncate to context_length."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(context_length)
    tokenizer.enable_padding(length=context_length, pad_id=PAD_ID, pad_token=PAD)
    return tokenizer


def encode(tokenizer: Tokenizer, captions: Sequence[str]) -> NDArray[np.int32]:
    """int32 [len(captions), context_length]; START and END are kept when a caption is cut."""
    return np.array([encoding.ids for encoding in tokenizer.encode_batch(captions)], np.int32)
