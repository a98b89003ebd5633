"""Texts that end a generation, looked for in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from oallama.core.errors import UsageError


class Stops:
    """Lets text through up to the first of the texts, and holds back what may be the beginning of one.

    Raises UsageError for an empty text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            texts = (texts,)
        if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
            raise UsageError("--stop takes a text that ends the generation, or a list of them")
        if not all(texts):
            raise UsageError("--stop is empty; give a text that ends the generation")
        self._texts = tuple(texts)
        self._held = ""
        self.reached = False

    def shown(self, piece: str) -> str:
        """What of the text so far may be shown now."""
        if self.reached:
            return ""
        text = self._held + piece
        found = [position for position in (text.find(stop) for stop in self._texts) if position >= 0]
        if found:
            self.reached, self._held = True, ""
            return text[: min(found)]
        n_held = max((_overlap(text, stop) for stop in self._texts), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def rest(self) -> str:
        """What was held back, at the end of the generation."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of text that begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
