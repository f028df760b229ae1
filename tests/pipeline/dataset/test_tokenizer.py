"""Captions as token ids of a fixed length, by our own tokenizer or anybody's."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from thermopile.pipeline.dataset.tokenizer import (
    END_ID,
    PAD_ID,
    START_ID,
    encode,
    end_id_of,
    load_tokenizer,
    train_tokenizer,
    vocab_size_of,
)
from thermopile.pipeline.errors import DatasetError

CAPTIONS = ["a small dog on grass", "a large dog on sand", "a cat"] * 20


def tokenizer_in(folder, context_length):
    path = folder / "tokenizer.json"
    train_tokenizer(CAPTIONS, vocab_size=300).save(str(path))
    return load_tokenizer(path, context_length=context_length)


def byte_level():
    """A GPT-2 in small: the 256 bytes as tokens, and one special token behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def like_gpt2(template=None):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<|endoftext|>", 256)]
        )
    return tokenizer


def like_clip():
    """Start 256, end 257, no padding of its own: token 0 is a letter."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
    tokenizer.post_processor = processors.RobertaProcessing(("<|endoftext|>", 257), ("<|startoftext|>", 256))
    return tokenizer


def like_bert():
    """Has a padding token, id 3, but comes set to pad with id 0, at the left and to 64, and to cut at 7."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "a", "dog", "##s", "cat"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_padding(direction="left", length=64, pad_id=0, pad_token="[UNK]")
    tokenizer.enable_truncation(7, direction="left")
    return tokenizer


def loaded(tokenizer, folder, context_length=8):
    tokenizer.save(str(folder / "theirs.json"))
    return load_tokenizer(folder / "theirs.json", context_length=context_length)


def test_captions_open_and_close_and_are_padded_to_one_length(tmp_path):
    tokens, truncated = encode(tokenizer_in(tmp_path, 16), ["a cat", "a large dog on sand"])
    assert (tokens.shape, truncated) == ((2, 16), 0)
    assert (tokens[:, 0] == START_ID).all()
    for row in tokens.tolist():
        end = row.index(END_ID)
        assert PAD_ID not in row[:end]
        assert set(row[end + 1 :]) <= {PAD_ID}


def test_a_caption_too_long_is_cut_and_still_closes_and_is_counted(tmp_path):
    tokens, truncated = encode(tokenizer_in(tmp_path, 6), ["a large dog on sand " * 9, "a cat", "a large " * 9])
    assert tokens[0].tolist()[0] == START_ID
    assert tokens[0].tolist()[-1] == END_ID
    assert truncated == 2


def test_a_caption_that_fits_exactly_is_not_counted_as_cut(tmp_path):
    long = encode(tokenizer_in(tmp_path, 64), ["a large dog"]).tokens
    exact = int((long != PAD_ID).sum())
    assert encode(tokenizer_in(tmp_path, exact), ["a large dog"]).truncated == 0
    assert encode(tokenizer_in(tmp_path, exact - 1), ["a large dog"]).truncated == 1


def test_frequent_words_become_few_tokens(tmp_path):
    tokenizer = tokenizer_in(tmp_path, 64)
    lengths = (encode(tokenizer, ["a large dog on sand", "zygomorphic quartz jam"]).tokens != PAD_ID).sum(1)
    assert lengths[0] < 12 < lengths[1]


def test_training_twice_gives_the_same_tokenizer():
    assert train_tokenizer(CAPTIONS, vocab_size=300).to_str() == train_tokenizer(CAPTIONS, vocab_size=300).to_str()


@given(text=st.text(max_size=20))
def test_any_text_can_be_encoded_and_read_back(tmp_path_factory, text):
    tokenizer = tokenizer_in(tmp_path_factory.mktemp("tokenizer"), 128)
    assert tokenizer.decode(encode(tokenizer, [text]).tokens[0].tolist()) == text


def test_a_special_token_spelt_out_in_a_caption_is_text_and_does_not_end_it(tmp_path):
    tokens, _ = encode(tokenizer_in(tmp_path, 32), ["a <end> b <pad>"])
    assert tokens[0].tolist().count(END_ID) == 1
    assert tokenizer_in(tmp_path, 32).decode(tokens[0].tolist()) == "a <end> b <pad>"


@pytest.mark.parametrize(
    ("theirs", "end", "expected"),
    [
        (like_clip, 257, [256, "a", "b", 257, 0, 0, 0, 0]),
        (lambda: like_gpt2("$A <|endoftext|>"), 256, ["a", "b", 256, 0, 0, 0, 0, 0]),
    ],
    ids=["clip", "gpt2"],
)
def test_any_tokenizer_that_closes_captions_is_used_as_it_is(tmp_path, theirs, end, expected):
    tokenizer = loaded(theirs(), tmp_path)
    assert end_id_of(tokenizer) == end
    expected = [tokenizer.token_to_id(token) if isinstance(token, str) else token for token in expected]
    assert encode(tokenizer, ["ab", "x" * 99]).tokens[0].tolist() == expected
    cut, truncated = encode(tokenizer, ["x" * 99])
    assert (cut[0, -1], truncated) == (end, 1)


def test_a_files_own_padding_is_kept_but_not_its_side_and_length(tmp_path):
    tokenizer = loaded(like_bert(), tmp_path)
    assert end_id_of(tokenizer) == 2
    tokens, truncated = encode(tokenizer, ["a dogs", "cat cat cat cat cat cat dog"])
    assert tokens.tolist() == [[1, 4, 5, 6, 2, 0, 0, 0], [1, 7, 7, 7, 7, 7, 7, 2]]
    assert truncated == 1


def test_a_file_without_padding_pads_with_the_token_of_that_name(tmp_path):
    theirs = like_bert()
    theirs.no_padding()
    assert encode(loaded(theirs, tmp_path), ["a"]).tokens.tolist() == [[1, 4, 2, 3, 3, 3, 3, 3]]


def test_the_vocabulary_counts_up_to_the_highest_id_where_ids_are_left_out(tmp_path):
    theirs = Tokenizer(models.WordLevel({"a": 3, "[SEP]": 90, "?": 0}, unk_token="?"))
    theirs.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 90)])
    assert vocab_size_of(loaded(theirs, tmp_path)) == 91


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (like_gpt2, "does not close captions with a token.*TemplateProcessing"),
        (lambda: like_gpt2("<|endoftext|> $A"), "does not close captions with a token"),
        (lambda: like_gpt2("<|endoftext|> $A <|endoftext|>"), r"both opens and closes captions"),
    ],
    ids=["no template", "opens alone", "opens with what closes"],
)
def test_a_tokenizer_that_does_not_close_captions_is_refused_with_the_cure(tmp_path, theirs, message):
    with pytest.raises(DatasetError, match=rf"theirs\.json cannot be used: .*{message}"):
        loaded(theirs(), tmp_path)


def test_a_context_without_room_for_one_word_is_refused(tmp_path):
    with pytest.raises(
        DatasetError, match=r"adds 2 special tokens.*length of 2 leaves no room for text; use 3 or more"
    ):
        loaded(like_clip(), tmp_path, context_length=2)
    assert encode(loaded(like_clip(), tmp_path, context_length=3), ["xx"]).tokens[0, 2] == 257


def test_a_closing_token_outside_of_the_vocabulary_is_refused(tmp_path):
    theirs = byte_level()
    theirs.post_processor = processors.TemplateProcessing(single="$A Z", special_tokens=[("Z", 999)])
    with pytest.raises(DatasetError, match="adds token 999 to every caption, but its vocabulary does not have it"):
        loaded(theirs, tmp_path)


def test_a_caption_that_the_tokenizer_cannot_encode_is_an_error_that_says_so(tmp_path):
    theirs = Tokenizer(models.WordLevel({"a": 0, "[SEP]": 1}, unk_token="absent"))
    theirs.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 1)])
    with pytest.raises(DatasetError, match="cannot encode a caption"):
        encode(loaded(theirs, tmp_path), ["zebra"])


def hostile_files():
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    return {
        "empty": b"",
        "no model": b"{}",
        "not json": b"\x00\xff",
        "cut short": train_tokenizer(CAPTIONS, vocab_size=300).to_str().encode()[:3000],
        "nested": b'{"model":' * 100_000,
        "merges of unknown tokens": json.dumps({"model": model | {"merges": [["x", "y"]]}}).encode(),
        "id beyond 32 bits": json.dumps({"model": model | {"vocab": {"a": 2**40}}}).encode(),
    }


def test_a_vocabulary_that_would_need_a_huge_embedding_is_refused(tmp_path):
    theirs = Tokenizer(models.WordLevel({"a": 0, "[SEP]": 2**23}, unk_token="a"))
    theirs.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2**23)])
    with pytest.raises(DatasetError, match="token ids up to 8,388,608; at most 4,194,304"):
        loaded(theirs, tmp_path)


@pytest.mark.parametrize("name", hostile_files())
def test_a_hostile_tokenizer_file_is_one_clear_error(tmp_path, name):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(hostile_files()[name])
    with pytest.raises(DatasetError, match=r"tokenizer\.json"):
        load_tokenizer(path, context_length=8)


def test_a_pipe_a_directory_and_a_file_that_is_too_large_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(300 << 20)
    refused = {"pipe": "a named pipe", ".": "a directory", "absent": "No such file", "large": "larger than the limit"}
    for name, message in refused.items():
        with pytest.raises(DatasetError, match=message):
            load_tokenizer(tmp_path / name, context_length=8)


def test_an_added_token_counts_in_the_vocabulary(tmp_path):
    theirs = like_clip()
    theirs.add_tokens([AddedToken("quokka")])
    tokenizer = loaded(theirs, tmp_path)
    assert vocab_size_of(tokenizer) == 259
    assert encode(tokenizer, ["quokka"]).tokens[0, 1] == 258
