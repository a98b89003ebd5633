"""Slash commands of a chat: parsing, completion and execution."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

from oallama.cli.chat.session import ChatSession
from oallama.cli.chat.settings import MEANINGS, changed, check_setting
from oallama.cli.output import log, write_file
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
    command.do(session, argument.strip())


def _help(_session: ChatSession, topic: str) -> None:
    if topic.strip("/") == "set":
        lines = [f"  /set {name:<15} {meaning}" for name, meaning in MEANINGS.items()]
    elif topic.strip("/") == "show":
        lines = [f"  /show {name}" for name in TOPICS]
    else:
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
    name, _, text = argument.partition(" ")
    if not name:
        _show(session, "settings")
        return
    check_setting(name)
    value = unquoted(text)
    if name == "system":
        session.begin(replace(session.conversation, system=None if value in ("", "none") else value))
        log("the system prompt is set" if session.conversation.system else "no system prompt now")
        return
    session.settings = changed(session.settings, name, value)
    shown = {row[0]: row[1] for row in session.settings.rows()}
    log(f"{name}: {shown[name]}" if name in shown else f"format: {shown['format']}")


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


def _show(session: ChatSession, topic: str) -> None:
    if topic and topic not in TOPICS:
        raise UsageError(f"unknown topic {topic}; choose from {', '.join(TOPICS)}")
    chosen = (topic,) if topic else ("model", "placement", "speeds", "settings")
    log("\n".join(line for name in chosen for line in TOPICS[name](session)))


def _shown_model(session: ChatSession) -> list[str]:
    info = session.placer.model
    how = "in its chat template" if session.chats else "continues text (no chat template is used)"
    size = f"{info.n_layer} layers, {format_bytes(info.file_bytes)}"
    return [
        f"{model_title(info)}: {printable(info.arch)}, {size}; {how}",
        printable(info.path, 1000),
        f"context: {session.engine.n_ctx} tokens, trained on {info.n_ctx_train or 'an unknown number'}",
    ]


def _shown_placement(session: ChatSession) -> list[str]:
    from oallama.report.plan import plan_sentences

    return list(plan_sentences(session.engine.plan, session.placer.operators))


def _shown_speeds(session: ChatSession) -> list[str]:
    return ["no answer yet" if session.last is None else f"last answer: {session.figures(session.last)}"]


def _shown_settings(session: ChatSession) -> list[str]:
    return [f"{name:<14}  {printable(value):<8}  {meaning}" for name, value, meaning in session.settings.rows()]


def _shown_system(session: ChatSession) -> list[str]:
    system = session.conversation.system
    return ["no system prompt"] if system is None else [printable(line, 10_000) for line in system.split("\n")]


def _shown_conversation(session: ChatSession) -> list[str]:
    lines = [
        f"{each.role}: {printable(line, 10_000)}" for each in session.conversation.messages
        for line in each.content.split("\n")
    ]  # fmt: skip
    return lines or ["the conversation is empty"]


def _shown_template(session: ChatSession) -> list[str]:
    text = session.placer.model.chat_template if session.chats else None
    return ["no chat template"] if text is None else [printable(line, 100_000) for line in text.split("\n")]


TOPICS: dict[str, Callable[[ChatSession], list[str]]] = {
    "model": _shown_model,
    "placement": _shown_placement,
    "speeds": _shown_speeds,
    "settings": _shown_settings,
    "system": _shown_system,
    "conversation": _shown_conversation,
    "template": _shown_template,
}


def _file(argument: str) -> str:
    return str(user_path(unquoted(argument)))


def _save(session: ChatSession, path: str) -> None:
    if not path:
        raise UsageError("/save needs the name of a file")
    target = _file(path)
    write_file(target, session.conversation.to_json(session.placer.model.name))
    log(f"wrote {target}")


def _load(session: ChatSession, path: str) -> None:
    if not path:
        raise UsageError("/load needs the name of a file from /save")
    source = _file(path)
    session.begin(Conversation.from_json(text_of_file(source, "conversation")))
    log(f"read {source}: {plural(session.conversation.n_exchanges, 'exchange')}; the next message continues it")


def _image(session: ChatSession, path: str) -> None:
    from oallama.run.picture import data_url

    if not session.takes_pictures:
        raise UsageError("this chat takes no pictures; start it with --mmproj FILE, the model's vision projector")
    if not path:
        raise UsageError("/image needs the name of a picture file")
    source = _file(path)
    session.pictures.append(data_url(source))
    log(f"the next message will include {source}")


def _clear(session: ChatSession, _argument: str) -> None:
    session.begin(session.conversation.without_messages())
    log("a new conversation" + (", with the same system prompt" if session.conversation.system else ""))


def _undo(session: ChatSession, _argument: str) -> None:
    session.undo()
    n = session.conversation.n_exchanges
    log(f"removed the last question and its answer; {n} left")


COMMANDS = {
    "/?": SlashCommand(_help, "", "show this list; /? set and /? show explain more", ("set", "show")),
    "/set": SlashCommand(_set, "NAME VALUE", "change a setting; without NAME, show all settings", tuple(MEANINGS)),
    "/show": SlashCommand(_show, "[TOPIC]", f"{', '.join(TOPICS)}", tuple(TOPICS)),
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
