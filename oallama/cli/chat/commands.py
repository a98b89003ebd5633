"""Slash commands of a chat: parsing, completion and execution."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

from oallama.cli.chat.session import ChatSession
from oallama.cli.chat.settings import MEANINGS, parsed_setting, setting_named
from oallama.cli.output import deliver, log
from oallama.cli.prompt import text_of_file
from oallama.core.errors import UsageError
from oallama.core.files import user_path
from oallama.core.text import is_text, suggestion
from oallama.core.units import format_bytes
from oallama.report.text import model_title, plural, printable
from oallama.run.conversation import Conversation

_NAME = re.compile(r"/(\?|[a-z]+)?(?:\s|$)")


class Leave(Exception):
    """Raised by /bye."""


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A slash command. usage: its argument; help: one line; words: arguments to complete; path: it takes a file."""

    do: Callable[[ChatSession, str], None]
    usage: str
    help: str
    words: tuple[str, ...] = ()
    path: bool = False


def is_command(message: str) -> bool:
    """Whether text is a slash command; `/etc/hosts` and ` /set` are messages to the model."""
    return _NAME.match(message) is not None


def obey(session: ChatSession, message: str) -> None:
    """Execute a command. Raises Leave, and UsageError for an unknown or impossible command."""
    name, _, argument = message.strip().partition(" ")
    name = OTHER_NAMES.get(name, name)
    command = COMMANDS.get(name)
    if command is None:
        meant = suggestion(name, COMMANDS, "/? lists them")
        raise UsageError(f"unknown command {name}; {meant} (put a space before the / to send it to the model)")
    argument = argument.strip()
    if command.path:
        if not argument:
            raise UsageError(f"{name} needs the name of a file")
        argument = str(user_path(unquoted(argument)))
    command.do(session, argument)


def _help(_session: ChatSession, _argument: str) -> None:
    width = max(len(f"{name} {command.usage}") for name, command in COMMANDS.items())
    lines = [f"  {f'{name} {command.usage}':<{width}}  {command.help}" for name, command in COMMANDS.items()]
    lines += [
        "",
        f"  {QUOTES}            begin and end a message of several lines, or end each line but the last with \\",
        "  Ctrl-C         stop an answer",
        "  Ctrl-D         leaves, as /bye",
    ]
    log("\n".join(lines))


def _leave(_session: ChatSession, _argument: str) -> None:
    raise Leave


def _set(session: ChatSession, argument: str) -> None:
    word, _, text = argument.partition(" ")
    name = setting_named(word) if word else ""
    if not name:
        values = {each: session.settings.shown(each) for each in MEANINGS if each != "system"}
        values["system"] = session.conversation.system or "none"
        log("\n".join(f"{each:<14}  {printable(value):<8}  {MEANINGS[each]}" for each, value in values.items()))
    elif name == "system":
        session.begin(replace(session.conversation, system=parsed_setting(name, unquoted(text))))
        log("the system prompt is set" if session.conversation.system else "no system prompt now")
    else:
        session.settings = session.settings.changed(name, unquoted(text))
        log(f"{word}: {session.settings.shown(name)}")


def unquoted(text: str) -> str:
    """Strip the quotes of a value: three, or one with the escapes of JSON. Raises UsageError for invalid text."""
    value = text.strip()
    if value.startswith(QUOTES):
        value = value.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    elif len(value) > 1 and value[0] == value[-1] == '"':
        try:
            value = str(json.loads(value))
        except ValueError:
            value = value[1:-1]
    if not is_text(value):
        raise UsageError("this value is not valid text: it has half a character, like JSON's \\ud800")
    return value


def _show(session: ChatSession, _argument: str) -> None:
    from oallama.report.plan import plan_sentences

    info, engine, operators = session.placer.model, session.engine, session.placer.operators
    how = "in its chat template" if session.chats else "continues text (no chat template is used)"
    lines = [
        f"{model_title(info)}: {printable(info.arch)}, {info.n_layer} layers, {format_bytes(info.file_bytes)}; {how}",
        printable(info.path, 1000),
        f"context: {engine.n_ctx} tokens, trained on {info.n_ctx_train or 'an unknown number'}",
        *plan_sentences(engine.plan, operators),
    ]
    if session.last is not None:
        lines.append(f"last answer: {session.figures(session.last)}")
    log("\n".join(lines))


def _save(session: ChatSession, path: str) -> None:
    deliver(session.conversation.to_json(session.placer.model.name), path)


def _load(session: ChatSession, path: str) -> None:
    session.begin(Conversation.from_json(text_of_file(path, "conversation")))
    log(f"read {path}: {plural(session.conversation.n_turns, 'turn')}; the next message continues it")


def _image(session: ChatSession, path: str) -> None:
    from oallama.run.picture import data_url

    if not session.takes_pictures:
        raise UsageError("this chat takes no pictures; start it with --mmproj FILE, the model's vision projector")
    session.pictures.append(data_url(path))
    log(f"the next message will include {path}")


def _clear(session: ChatSession, _argument: str) -> None:
    session.begin(session.conversation.without_messages())
    log("a new conversation" + (", with the same system prompt" if session.conversation.system else ""))


def _undo(session: ChatSession, _argument: str) -> None:
    session.undo()
    n = session.conversation.n_turns
    log(f"removed the last question and its answer; {n} left")


COMMANDS = {
    "/?": SlashCommand(_help, "", "show this list"),
    "/set": SlashCommand(_set, "NAME VALUE", "change a setting; without NAME, explain all settings", tuple(MEANINGS)),
    "/show": SlashCommand(_show, "", "show the model, its placement and the speed of the last answer"),
    "/save": SlashCommand(_save, "FILE", "save the conversation as JSON", path=True),
    "/load": SlashCommand(_load, "FILE", "continue a saved conversation", path=True),
    "/image": SlashCommand(_image, "FILE", "add a picture to the next message (--mmproj)", path=True),
    "/clear": SlashCommand(_clear, "", "forget the conversation, except the system prompt"),
    "/undo": SlashCommand(_undo, "", "remove the last question and its answer"),
    "/retry": SlashCommand(lambda session, _: session.retry(), "", "answer the last question again"),
    "/bye": SlashCommand(_leave, "", "leave"),
}

OTHER_NAMES = {"/help": "/?", "/": "/?", "/exit": "/bye", "/quit": "/bye"}


QUOTES = '"""'


def message_of(text: str, at_end: bool = False) -> str | None:
    """Return the message in typed text; None if it needs another line. at_end: the input has no further line."""
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
    """Reads messages from a pipe or a file, one a line."""

    interactive = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read(self) -> str | None:
        """Return the next message, None at the end. Raises UsageError for text that is not UTF-8."""
        text = ""
        while True:
            try:
                line = self._stream.readline()
            except UnicodeDecodeError:
                raise UsageError("stdin is not UTF-8 text") from None
            if not is_text(line):
                raise UsageError("stdin is not UTF-8 text; convert it, e.g. with iconv")
            text += line
            if not line:
                return message_of(text.removesuffix("\n"), at_end=True) if text else None
            message = message_of(text.removesuffix("\n"))
            if message is not None:
                return message
