"""Vocabulary and context chosen from captions: at most one in a hundred is cut where 77 tokens allow it."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thermopile.pipeline.dataset.tokenizer import encode, load_tokenizer, train_tokenizer
from thermopile.pipeline.sources.caption_lengths import CONTEXTS, VOCABULARIES, measure
from thermopile.pipeline.sources.shards import in_runs

PAGES = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
ENGLISH = [word for page in PAGES for word in re.findall(r"[A-Za-z]+[.,]?", page.read_text("utf-8"))]


def english(words, count=4000, spread=0.5, seed=0):
    """Captions of about so many words in a row of the documentation; their lengths are spread as a corpus's are."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(words), spread, count)).astype(int)
    starts = rng.integers(len(ENGLISH) - lengths.max(), size=count)
    return [" ".join(ENGLISH[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize(
    ("words", "spread"), [(20, 0.5), *(pytest.param(*each, marks=pytest.mark.wide) for each in ((5, 0.5), (40, 0.2)))]
)
def test_at_most_one_caption_in_a_hundred_is_cut_by_default(words, spread, tmp_path):
    captions = english(words, spread=spread)
    chosen = measure(captions, None, None, None)
    assert chosen.vocab_size in VOCABULARIES
    assert chosen.context_length in CONTEXTS
    (tmp_path / "t.json").write_text(train_tokenizer(captions, vocab_size=chosen.vocab_size).to_str())
    kept = load_tokenizer(tmp_path / "t.json", context_length=chosen.context_length)
    assert encode(kept, captions).truncated / len(captions) == pytest.approx(chosen.share_cut)
    assert chosen.share_cut <= 0.01


def test_what_77_tokens_cut_is_said_with_the_option_for_more():
    chosen = measure(english(60, count=1000), None, None, None)
    assert chosen.context_length == 77
    assert chosen.share_cut > 0.1
    assert str(chosen).endswith(
        f"--context-length 77 cuts {chosen.share_cut:.1%} of them; a longer --context-length keeps more of them"
    )
    assert str(replace(chosen, share_cut=0.0)).endswith(" cuts 0.0% of them")
    assert str(replace(chosen, share_cut=1e-5)).endswith(" cuts under 0.1% of them")


def test_no_longer_context_is_advised_than_the_tokenizers_model_reads(tmp_path):
    captions = english(20, count=300)
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(captions, vocab_size=1024).to_str())
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 16}')
    advised = [str(measure(captions, None, length, tmp_path / "tokenizer.json")) for length in (16, 12)]
    assert advised[0].endswith("; the tokenizer's model reads no more than 16, so only shorter captions are kept")
    assert advised[1].endswith("; a longer --context-length keeps more of them")


def test_given_values_are_kept_and_measured():
    chosen = measure(english(20, count=1000), 2048, 16, None)
    assert (chosen.vocab_size, chosen.context_length) == (2048, 16)
    assert chosen.share_cut > 0.5


def test_the_vocabulary_grows_with_the_words():
    few = [f"a {colour} {shape}" for colour in ("red", "blue") for shape in ("ring", "box", "star")] * 100
    assert measure(few, None, None, None).vocab_size == 1024
    assert measure(english(40, count=1000), None, None, None).vocab_size > 1024


def test_pictures_alone_have_no_lengths():
    assert measure([], None, None, None) is None


def test_a_large_source_is_measured_in_runs_of_neighbours():
    places = in_runs(10**9, 20_000)
    assert len(places) == 20_000
    assert (places[0], places[-1]) == (0, 10**9 - 1)
    assert (np.diff(places) == 1).mean() > 0.98
    np.testing.assert_array_equal(in_runs(50, 100), np.arange(50))
