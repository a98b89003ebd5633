"""Text: whether it can be written as UTF-8, and which known word a mistyped one may be."""

from __future__ import annotations

from collections.abc import Iterable


def is_text(characters: str) -> bool:
    """Whether the text has no surrogates, which come from undecoded bytes in a C locale, or from JSON's \\ud800."""
    return not any("\ud800" <= character <= "\udfff" for character in characters)


def suggestion(word: str, known: Iterable[str], otherwise: str = "", form: str = "{}") -> str:
    """`did you mean X?`, with the most similar of the known words, written by a form; otherwise: if none is similar."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, 1)
    return f"did you mean {form.format(close[0])}?" if close else otherwise
