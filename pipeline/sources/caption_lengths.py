"""The lengths of a source's captions in tokens, and the vocabulary and context that suit them."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..dataset.tokenizer import load_tokenizer, model_context, train_tokenizer
from ..errors import DatasetError

MEASURED_ON = 20_000
"""Samples whose captions are measured."""
VOCABULARIES = tuple(1 << bits for bits in range(10, 16))
CONTEXTS = (*range(32, 73, 8), 77)
"""Lengths that are chosen: 77 is CLIP's."""
MAX_SHARE_CUT = 0.01
MAX_CHARACTERS = 2_000
"""Characters of a caption that are measured, far more than the longest context holds."""


@dataclass(frozen=True)
class CaptionLengths:
    """What was measured, and chosen unless it was given."""

    vocab_size: int
    context_length: int
    is_given: bool
    """Whether the tokenizer was given, which has its own vocabulary."""
    tokens_a_word: float
    share_cut: float
    """Share of the captions that the context cuts."""
    longest: int | None = None
    """The context of the model whose tokenizer was given, if it tells one."""

    def __str__(self) -> str:
        vocabulary = "" if self.is_given else f" with --vocab-size {self.vocab_size}"
        longer = ""
        if self.share_cut > MAX_SHARE_CUT:
            longer = "; a longer --context-length keeps more of them"
            if self.longest and self.context_length >= self.longest:
                longer = f"; the tokenizer's model reads no more than {self.longest}, so only shorter captions are kept"
        cut = "under 0.1%" if 0 < self.share_cut < 0.0005 else f"{self.share_cut:.1%}"
        return (
            f"captions: {self.tokens_a_word:.1f} tokens a word{vocabulary}; "
            f"--context-length {self.context_length} cuts {cut} of them{longer}"
        )


def measure(
    captions: Iterable[str], vocab_size: int | None, context_length: int | None, tokenizer: Path | None
) -> CaptionLengths | None:
    """Measure a sample of a source's captions, and choose what is None; return None if there are no captions.

    The vocabulary is the smallest power of two that holds the words which occur three times or more, or a larger one if
    only that lets a context keep the captions; the context is the shortest that cuts MAX_SHARE_CUT of them or fewer, or
    the longest. Every process chooses the same. tokenizer: a file in place of a tokenizer trained on the captions.
    """
    captions = [caption[:MAX_CHARACTERS] for caption in captions]
    if not captions:
        return None
    words = Counter(word for caption in captions for word in re.findall(r"\w+", caption))
    frequent = sum(count >= 3 for count in words.values())
    holding = [size for size in VOCABULARIES if size >= frequent] or [VOCABULARIES[-1]]
    tried, longest = [], None
    with suppress(DatasetError):  # of another folder's config.json
        longest = model_context(tokenizer.parent) if tokenizer else None
    for size in [vocab_size] if vocab_size else [holding[0]] if tokenizer or context_length else holding:
        own = load_tokenizer(tokenizer, context_length=CONTEXTS[-1]) if tokenizer else None
        own = own or train_tokenizer(captions, vocab_size=size)
        own.no_padding()
        own.no_truncation()
        lengths = np.array([len(encoding.ids) for encoding in own.encode_batch(captions)], np.int64)
        fits = (context for context in CONTEXTS if (lengths > context).mean() <= MAX_SHARE_CUT)
        context = context_length or next(fits, CONTEXTS[-1])
        share_cut = float((lengths > context).mean())
        a_word = lengths.sum() / max(1, words.total())
        tried.append(CaptionLengths(size, context, tokenizer is not None, a_word, share_cut, longest))
        if share_cut <= MAX_SHARE_CUT:
            return tried[-1]
    return tried[0]
