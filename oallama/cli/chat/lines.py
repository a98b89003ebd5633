"""Lines that make a message: one, or several in triple quotes or with a backslash at the end of each but the last."""

from __future__ import annotations

from typing import TextIO

from oallama.core.errors import UsageError
from oallama.core.text import is_text

QUOTES = '"""'


def message_of(text: str, at_end: bool = False) -> str | None:
    """The message that is typed so; None where another line belongs to it. at_end: none will come."""
    opened = text.lstrip()
    if opened.startswith("/") and QUOTES in opened:
        closed = opened.count(QUOTES) > 1 and opened.rstrip().endswith(QUOTES)
        return text if closed or at_end else None
    if opened.startswith(QUOTES):
        inside = opened[len(QUOTES) :]
        if inside.rstrip().endswith(QUOTES):
            return inside.rstrip()[: -len(QUOTES)].strip("\n")
        return inside.strip("\n") if at_end else None
    if text.endswith("\\"):
        if not at_end:
            return None
        text = text[:-1]
    return text.replace("\\\n", "\n")


class PipedLines:
    """Messages out of a stream that nobody types into."""

    interactive = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read(self) -> str | None:
        """The next message, None at the end. Raises UsageError for what is not UTF-8 text."""
        text = ""
        while True:
            try:
                line = self._stream.readline()
            except UnicodeDecodeError:
                raise UsageError("what comes in on stdin is not UTF-8 text") from None
            if not is_text(line):
                raise UsageError("what comes in on stdin is not UTF-8 text; convert it, for example with iconv")
            text += line
            if not line:
                return message_of(text.removesuffix("\n"), at_end=True) if text else None
            message = message_of(text.removesuffix("\n"))
            if message is not None:
                return message
