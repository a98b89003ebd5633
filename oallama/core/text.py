"""Check of text: whether it can be written as UTF-8."""

from __future__ import annotations


def is_text(characters: str) -> bool:
    """Whether the text has no surrogates, which come from undecoded bytes in a C locale, or from JSON's \\ud800."""
    return not any("\ud800" <= character <= "\udfff" for character in characters)
