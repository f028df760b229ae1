"""Captions as token ids of a fixed length."""

from hypothesis import given
from hypothesis import strategies as st

from thermopile.pipeline.tokenizer import END_ID, PAD_ID, START_ID, encode, load_tokenizer, train_tokenizer

CAPTIONS = ["a small dog on grass", "a large dog on sand", "a cat"] * 20


def tokenizer_in(folder, context_length):
    path = folder / "tokenizer.json"
    train_tokenizer(CAPTIONS, vocab_size=300).save(str(path))
    return load_tokenizer(path, context_length=context_length)


def test_captions_open_and_close_and_are_padded_to_one_length(tmp_path):
    tokens = encode(tokenizer_in(tmp_path, 16), ["a cat", "a large dog on sand"])
    assert tokens.shape == (2, 16)
    assert (tokens[:, 0] == START_ID).all()
    for row in tokens.tolist():
        end = row.index(END_ID)
        assert PAD_ID not in row[:end]
        assert set(row[end + 1 :]) <= {PAD_ID}


def test_a_caption_too_long_is_cut_and_still_closes(tmp_path):
    tokens = encode(tokenizer_in(tmp_path, 6), ["a large dog on sand " * 9])
    assert tokens[0].tolist()[0] == START_ID
    assert tokens[0].tolist()[-1] == END_ID


def test_frequent_words_become_few_tokens(tmp_path):
    tokenizer = tokenizer_in(tmp_path, 64)
    tokens = (encode(tokenizer, ["a large dog on sand", "zygomorphic quartz jam"]) != PAD_ID).sum(1)
    assert tokens[0] < 12 < tokens[1]


def test_training_twice_gives_the_same_tokenizer():
    assert train_tokenizer(CAPTIONS, vocab_size=300).to_str() == train_tokenizer(CAPTIONS, vocab_size=300).to_str()


@given(text=st.text(max_size=20))
def test_any_text_can_be_encoded_and_read_back(tmp_path_factory, text):
    tokenizer = tokenizer_in(tmp_path_factory.mktemp("tokenizer"), 128)
    assert tokenizer.decode(encode(tokenizer, [text])[0].tolist()) == text
