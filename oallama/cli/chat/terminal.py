"""Terminal input of a chat: line editing, persistent history, completion."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from oallama.cli.chat.commands import COMMANDS, message_of

PROMPT, CONTINUATION = ">>> ", "... "
HISTORY = "chat-history"  # in the cache folder


class Terminal:
    """Reads messages from a terminal. history: the file of typed lines, if writable."""

    interactive = True

    def __init__(self, history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=InputHistory(history),
            completer=Commands(),
            complete_while_typing=False,
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=CONTINUATION,
            output=create_output(always_prefer_tty=True),
        )

    def read(self) -> str | None:
        """Return the next message; None at Ctrl-D. Raises KeyboardInterrupt at Ctrl-C where nothing was typed."""
        try:
            return message_of(self._session.prompt(PROMPT), at_end=True)
        except EOFError:
            return None


class InputHistory(FileHistory):
    """A history file that only its user can read, and that may be missing or unwritable."""

    def load_history_strings(self) -> Iterable[str]:
        with contextlib.suppress(OSError):
            return list(super().load_history_strings())
        return []

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            path = Path(os.fsdecode(self.filename))
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            super().store_string(string)


class Commands(Completer):
    """Completes /commands and their arguments: words, or names of files."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        name, blank, argument = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        if not blank:
            yield from _beginning(name, COMMANDS)
        elif name in COMMANDS and COMMANDS[name].path:
            path = Document(argument, len(argument))
            yield from PathCompleter(expanduser=True).get_completions(path, complete_event)
        elif name in COMMANDS and " " not in argument:
            yield from _beginning(argument, COMMANDS[name].words)


def _beginning(typed: str, words: Iterable[str]) -> Iterator[Completion]:
    return (Completion(word, -len(typed)) for word in words if word.startswith(typed))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        if message_of(event.current_buffer.text) is None:
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("c-c")
    def _interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys
