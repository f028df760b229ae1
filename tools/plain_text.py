"""Text from data, made harmless to look at: captions, class names and file names are written by strangers."""

from __future__ import annotations

import unicodedata

MAX_CHARACTERS = 200
MAX_ERROR_CHARACTERS = 10_000
"""Characters of an error: room for a few paths as long as they can be, and for how to mend it."""

_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories that show nothing, or reorder and hide what others show."""
_JOINERS = "\u200c\u200d"
"""Change no order and hide nothing; Persian words and many emoji need them."""


def plain_text(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return `text` on one line, cut after `most` characters, control and bidi characters written as [U+202E].

    The result can be encoded as UTF-8 whatever `text` holds. It is not escaped for HTML.
    """
    # What is cut need not be looked at, however long it is; white space at the ends does not count.
    line = " ".join(text[: 4 * most].split())
    cut = len(line) > most or len(text) > 4 * most
    return "".join(map(_visible, line[:most])) + ("…" if cut else "")


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in _INVISIBLE and character not in _JOINERS
    return f"[U+{ord(character):04X}]" if hidden else character
