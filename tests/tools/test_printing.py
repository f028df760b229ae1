import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from thermopile.tools.printing import plain_text


@given(st.text(st.characters(), max_size=50))
def test_no_text_brings_a_control_or_bidi_character_or_fails_to_encode(text):
    shown = plain_text(text)
    shown.encode("utf-8")
    assert not [c for c in shown if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and
                c not in "\u200c\u200d"]  # fmt: skip


@given(st.text("abcäöü日本 <>&\"'", max_size=100))
def test_harmless_text_stays_as_it_is_but_for_its_white_space(text):
    assert plain_text(text) == " ".join(text.split())


def test_hidden_characters_are_written_as_their_code_points():
    assert plain_text("a\x00b \u202egnp") == "a[U+0000]b [U+202E]gnp"
    assert plain_text("\x1b[31m") == "[U+001B][31m"
    assert plain_text("broken \udc80 name") == "broken [U+DC80] name"


def test_a_family_of_emoji_stays_one():
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    assert plain_text(family) == family


@given(st.integers(1, 50), st.integers(0, 400))
def test_long_text_is_cut_and_says_so(most, length):
    text = "x" * length
    assert plain_text(text, most) == (text if length <= most else "x" * most + "…")
