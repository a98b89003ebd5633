"""Check of text: whether it can be written as UTF-8."""

from __future__ import annotations


def is_text(characters: str) -> bool:
    """Whether there is no surrogate among them, as of bytes that a locale such as C lets pass, or of JSON's \\ud800."""
    return not any("\ud800" <= character <= "\udfff" for character in characters)
