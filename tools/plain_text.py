"""Make untrusted text safe to print: captions, class names and file names may come from anyone."""

from __future__ import annotations

import unicodedata

MAX_CHARACTERS = 200
MAX_ERROR_CHARACTERS = 10_000
"""Limit for error messages: room for a few paths of maximal length and the cure."""

_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that are invisible, or reorder or hide others."""
_JOINERS = "\u200c\u200d"
"""Harmless, and needed by Persian words and many emoji."""


def plain_text(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return `text` on one line, cut after `most` characters, with control and bidi characters written as [U+202E].

    The result can be encoded as UTF-8 whatever `text` holds. It is not escaped for HTML.
    """
    # Only look at the part that can be shown, however long the text is; outer white space does not count.
    line = " ".join(text[: 4 * most].split())
    cut = len(line) > most or len(text) > 4 * most
    return "".join(map(_visible, line[:most])) + ("…" if cut else "")


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in _INVISIBLE and character not in _JOINERS
    return f"[U+{ord(character):04X}]" if hidden else character
