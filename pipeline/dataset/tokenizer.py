"""Encode captions to token ids of a fixed length, with a byte-level BPE trained on them or any `tokenizer.json`.

A row of tokens is a caption, its closing token and padding. Readers find the end by the first closing token, because
tokenizers pad differently, CLIP's even with the closing token itself.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ...storage.arrays import Int32s
from ...storage.files import read_regular
from ...storage.sealed_json import parse
from ..errors import DatasetError

PAD, START, END = "<pad>", "<start>", "<end>"
PAD_ID, START_ID, END_ID = 0, 1, 2
"""Ids in our own tokenizer, in the order in which the trainer receives the tokens."""

PAD_NAMES = (PAD, "[PAD]", "<|pad|>", "<|padding|>")
"""Names of the padding token in other tokenizers; the first that exists is used."""
MAX_FILE_BYTES = 256 << 20
MAX_VOCAB_SIZE = 1 << 22
"""Far above every published tokenizer; the embedding has a row per id, used or not."""


class EncodedCaptions(NamedTuple):
    """Captions in their stored form."""

    tokens: Int32s
    """int32 [captions, context_length]; every row has the closing token; after its first occurrence comes padding."""
    truncated: int
    """Number of captions that were truncated."""


def train_tokenizer(captions: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most vocab_size tokens; it can encode any text."""
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
        single=f"{START} $A {END}", special_tokens=[(START, START_ID), (END, END_ID)]
    )
    return tokenizer


def load_tokenizer(path: Path, *, context_length: int) -> Tokenizer:
    """Load a Hugging Face tokenizer.json, set to truncate captions to context_length tokens and to pad on the right.

    Padding is the file's own padding token, else one named `<pad>`, `[PAD]` or similar, else id 0; the choice does not
    matter, since it follows the closing token. A special token's name in a caption is plain text.
    Raises DatasetError if the file is not a tokenizer, its vocabulary exceeds MAX_VOCAB_SIZE, it does not close
    captions with a token (see end_id_of), or context_length leaves no room between its special tokens.
    """
    tokenizer = read_tokenizer(path)
    tokenizer.encode_special_tokens = True  # otherwise a caption that contains "<end>" would end there
    if (size := vocab_size_of(tokenizer)) > MAX_VOCAB_SIZE:
        raise DatasetError(f"{path} has token ids up to {size - 1:,}; at most {MAX_VOCAB_SIZE:,} are supported")
    pad_id = tokenizer.padding["pad_id"] if tokenizer.padding else None
    if pad_id is None or tokenizer.id_to_token(pad_id) is None:
        pad_id = next((i for name in PAD_NAMES if (i := tokenizer.token_to_id(name)) is not None), 0)
    tokenizer.enable_padding(length=context_length, pad_id=pad_id, pad_token=tokenizer.id_to_token(pad_id) or PAD)
    try:
        end_id_of(tokenizer)
    except DatasetError as error:
        raise DatasetError(f"{path} cannot be used: {error}") from None
    if context_length <= (special := tokenizer.num_special_tokens_to_add(is_pair=False)):
        raise DatasetError(
            f"{path} adds {special} special tokens to every caption, so a context length of "
            f"{context_length} leaves no room for text; use {special + 1} or more"
        )
    tokenizer.enable_truncation(context_length)
    return tokenizer


def is_same_tokenizer(first: Path, second: Path) -> bool:
    """Return whether two files make the same tokens of a text, padding and truncation apart. Raises DatasetError."""
    told = []
    for tokenizer in (read_tokenizer(first), read_tokenizer(second)):
        tokenizer.no_padding()
        tokenizer.no_truncation()
        told.append(tokenizer.to_str())
    return told[0] == told[1]


def model_context(folder: Path) -> int | None:
    """Return a model's context length in tokens from its directory, None if that has none. Raises DatasetError."""
    found = []
    try:
        for name, key in (("tokenizer_config.json", "model_max_length"), ("config.json", "max_position_embeddings")):
            if (folder / name).is_file():
                stored = parse(read_regular(folder / name))
                length = stored.get("text_config", stored).get(key)
                found.append(MAX_VOCAB_SIZE if length is None else int(length))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DatasetError(f"{folder / name} cannot be read: {error}") from error
    return min(found, default=None)


def end_id_of(tokenizer: Tokenizer) -> int:
    """Return the token that closes every caption and occurs nowhere else in it: encoders find a caption's end by it.

    Raises DatasetError if the tokenizer does not close captions with a token, or opens them with the same one.
    """
    empty, short = _real_ids(tokenizer, ""), _real_ids(tokenizer, "a")
    if unknown := [token for token in empty if tokenizer.id_to_token(token) is None]:
        raise DatasetError(f"it adds token {unknown[0]} to every caption, but its vocabulary does not have it")
    if not empty or short[-1:] != empty[-1:]:
        raise DatasetError(
            "it does not close captions with a token. Give it a post-processor that does, in Python: "
            "`tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single='$A "
            "<|endoftext|>', special_tokens=[('<|endoftext|>', ID)])`, with its own closing token and "
            "ID; then save it again"
        )
    if empty.count(empty[-1]) > 1:
        raise DatasetError(
            f"token {empty[-1]} ({tokenizer.id_to_token(empty[-1])}) both opens and closes captions. "
            "Give it a post-processor that adds it only at the end"
        )
    return empty[-1]


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Return the highest id plus 1: the rows that an embedding needs, even if ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def encode(tokenizer: Tokenizer, captions: Sequence[str]) -> EncodedCaptions:
    """Encode captions with a tokenizer from load_tokenizer. Truncated captions keep their special tokens.

    Raises DatasetError if the tokenizer does not give every caption the same length and a closing token.
    """
    try:
        encodings = tokenizer.encode_batch(captions)
    except Exception as error:  # tokenizers raises no narrower class
        raise DatasetError(f"the tokenizer cannot encode a caption: {error}") from error
    context_length = (tokenizer.padding or {})["length"]
    if any(len(encoding.ids) != context_length for encoding in encodings):
        raise DatasetError(f"the tokenizer did not encode a caption to {context_length} tokens; use another tokenizer")
    tokens = np.array([encoding.ids for encoding in encodings], np.int32).reshape(len(captions), context_length)
    if not (tokens == end_id_of(tokenizer)).any(1).all():
        raise DatasetError("the tokenizer did not close a caption with a token; use another tokenizer")
    return EncodedCaptions(tokens, sum(bool(encoding.overflowing) for encoding in encodings))


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json as it is. Raises DatasetError if it is none."""
    try:
        return Tokenizer.from_buffer(read_regular(path, MAX_FILE_BYTES))
    except Exception as error:  # tokenizers raises no narrower class
        raise DatasetError(
            f"{path} is not a tokenizer: {error}. Pass a tokenizer.json written by Hugging Face's `tokenizers`"
        ) from error


def _real_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, without padding."""
    try:
        encoding = tokenizer.encode(text)
    except Exception as error:  # tokenizers raises no narrower class
        raise DatasetError(f"it cannot encode {text!r}: {error}") from error
    return [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
