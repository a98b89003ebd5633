"""The loop of a chat: a message, its answer, until the user leaves."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from oallama.cli.chat.commands import Leave, PipedLines, is_command, obey
from oallama.cli.chat.session import ChatSession
from oallama.cli.output import is_terminal, log
from oallama.cli.signals import asked_to_end
from oallama.core.errors import DeviceError, OallamaError
from oallama.report.text import printable

if TYPE_CHECKING:
    from oallama.cli.chat.terminal import Terminal

HOW_TO_LEAVE = "to leave: /bye or Ctrl-D"


def somebody_types() -> bool:
    return is_terminal(sys.stdin) and (is_terminal(sys.stdout) or is_terminal(sys.stderr))


def reader_of_stdin() -> Terminal | PipedLines:
    """Read from an interactive terminal, else line by line; a closed stdin has no lines."""
    if somebody_types():
        from oallama.cli.chat.terminal import HISTORY, Terminal
        from oallama.core.files import cache_folder

        return Terminal(cache_folder() / HISTORY)
    return PipedLines(io.StringIO() if sys.stdin is None else sys.stdin)


def converse(session: ChatSession, reader: Terminal | PipedLines) -> None:
    """Answer until the end of the input or /bye. An invalid message or command prints one sentence, and the session
    continues. Raises DeviceError for a lost device, and KeyboardInterrupt for a Ctrl-C from a pipe."""
    told = False  # measured times of tokens against the predicted ones
    while True:
        try:
            message = reader.read()
        except KeyboardInterrupt:
            if not reader.interactive or asked_to_end():
                raise
            log(HOW_TO_LEAVE)
            continue
        if message is None:
            if asked_to_end():  # the terminal is closed
                raise KeyboardInterrupt
            return
        last = session.last
        try:
            _take(session, message, reader.interactive)
        except Leave:
            return
        except KeyboardInterrupt:
            if not reader.interactive or asked_to_end():
                raise
            log("stopped")
        except DeviceError:
            raise
        except OallamaError as error:
            log(printable(" ".join(str(error).split()), 2000))
        if session.last is not None and session.last is not last:
            if session.settings.verbose:
                log(session.figures(session.last))
            told = told or (reader.interactive and session.tell_drift(session.last))


def _take(session: ChatSession, message: str, interactive: bool) -> None:
    if is_command(message):
        obey(session, message)
    elif message.strip():
        session.ask(message)
    elif interactive and not session.chats and session.conversation.messages and not session.ended:
        session.go_on()
