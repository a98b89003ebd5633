"""Slash commands of a chat: parsed, completed and carried out."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from oallama.cli.chat.session import ChatSession, figures
from oallama.cli.chat.settings import MEANINGS, changed, setting_name
from oallama.cli.output import talk, write_file
from oallama.cli.prompt import text_of_file
from oallama.core.errors import UsageError
from oallama.core.text import is_text
from oallama.core.units import format_bytes
from oallama.report.text import policy_on, printable
from oallama.run.conversation import Conversation

if TYPE_CHECKING:
    from oallama.cli.chat.model import ChatModel


_NAME = re.compile(r"/(\?|[a-z]+)?(?:\s|$)")


class Leave(Exception):
    """The user has enough."""


@dataclass(frozen=True, slots=True)
class Command:
    """usage: its argument; help: one line; words: what may follow, for completion; path: a file may."""

    do: Callable[[ChatSession, ChatModel, str], None]
    usage: str
    help: str
    words: tuple[str, ...] = ()
    path: bool = False


def is_command(message: str) -> bool:
    """Whether a message is for us; `/etc/hosts` and ` /set` are for the model."""
    return _NAME.match(message) is not None


def obey(session: ChatSession, model: ChatModel, message: str) -> None:
    """Do what a command says. Raises Leave, and UsageError for one that there is not or that cannot be."""
    name, _, argument = message.strip().partition(" ")
    name = OTHER_NAMES.get(name, name)
    command = COMMANDS.get(name)
    if command is None:
        closest = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean {closest[0]}?" if closest else "/? lists them"
        raise UsageError(f"there is no command {name}; {meant} (a message with a blank before the / goes to the model)")
    command.do(session, model, argument.strip())


def _help(_session: ChatSession, _model: ChatModel, topic: str) -> None:
    if topic.strip("/") == "set":
        lines = [f"  /set {name:<15} {meaning}" for name, meaning in MEANINGS.items()]
    elif topic.strip("/") == "show":
        lines = [f"  /show {name}" for name in TOPICS]
    else:
        width = max(len(f"{name} {command.usage}") for name, command in COMMANDS.items())
        lines = [f"  {f'{name} {command.usage}':<{width}}  {command.help}" for name, command in COMMANDS.items()]
        lines += [
            "",
            f"  {QUOTES}            begins and ends a message of several lines; a backslash at the end of a line too",
            "  Ctrl-C         stops an answer",
            "  Ctrl-D         leaves, as /bye",
        ]
    talk("\n".join(lines))


def _leave(_session: ChatSession, _model: ChatModel, _argument: str) -> None:
    raise Leave


def _set(session: ChatSession, model: ChatModel, argument: str) -> None:
    word, _, text = argument.partition(" ")
    if word == "parameter":  # as ollama says it
        word, _, text = text.strip().partition(" ")
    if not word:
        _show(session, model, "settings")
        return
    if word in ("quiet", "noformat"):
        word, text = {"quiet": ("verbose", "off"), "noformat": ("format", "text")}[word]
    name, value = setting_name(word), unquoted(text)
    if name == "system":
        session.begin(replace(session.conversation, system=None if value in ("", "none") else value))
        talk("the system prompt is set" if session.conversation.system else "there is no system prompt now")
        return
    session.settings = changed(session.settings, name, value)
    shown = {row[0]: row[1] for row in session.settings.rows()}
    talk(f"{name}: {shown[name]}" if name in shown else f"format: {shown['format']}")


def unquoted(text: str) -> str:
    """What is meant by a value, which may be in quotes, three or one, where one has the escapes of JSON. Raises
    UsageError for what is no text."""
    value = _unquoted(text.strip())
    if not is_text(value):
        raise UsageError("this value is no text: it has half of a character, as JSON's \\ud800 is")
    return value


def _unquoted(text: str) -> str:
    if text.startswith(QUOTES):
        return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text[1:-1]
    return text


def _show(session: ChatSession, model: ChatModel, topic: str) -> None:
    topic = {"parameters": "settings", "": "all"}.get(topic, topic)
    if topic != "all" and topic not in TOPICS:
        raise UsageError(f"there is nothing called {topic} to show; /show takes one of {', '.join(TOPICS)}")
    chosen = ("model", "placement", "speeds", "settings") if topic == "all" else (topic,)
    talk("\n".join(line for name in chosen for line in TOPICS[name](session, model)))


def _shown_model(session: ChatSession, model: ChatModel) -> list[str]:
    info = model.placer.model
    how = "in its chat template" if session.template is not None else "continues text (no chat template is used)"
    size = f"{info.n_layer} layers, {format_bytes(info.file_bytes)}"
    return [
        f"{printable(info.name)}: {printable(info.arch)}, {size}; {how}",
        printable(info.path, 1000),
        f"context: {model.engine.n_ctx} tokens, of {info.n_ctx_train or 'an unknown number'} that it was trained on",
    ]


def _shown_placement(_session: ChatSession, model: ChatModel) -> list[str]:
    from oallama.report.plan import plan_sentences, where_text

    engine = model.engine
    where = where_text(engine.plan, model.placer.operators)
    return [
        f"{policy_on(engine.plan.policy, engine.device)}: {where}",
        *plan_sentences(engine.plan, model.placer.operators),
    ]


def _shown_speeds(session: ChatSession, model: ChatModel) -> list[str]:
    last = session.last
    return ["no answer yet" if last is None else f"last answer: {figures(last, model.token_seconds)}"]


def _shown_settings(session: ChatSession, _model: ChatModel) -> list[str]:
    return [f"{name:<14}  {printable(value):<8}  {meaning}" for name, value, meaning in session.settings.rows()]


def _shown_system(session: ChatSession, _model: ChatModel) -> list[str]:
    system = session.conversation.system
    return ["no system prompt"] if system is None else [printable(line, 10_000) for line in system.split("\n")]


def _shown_conversation(session: ChatSession, _model: ChatModel) -> list[str]:
    lines = [
        f"{each.role}: {printable(line, 10_000)}" for each in session.conversation.messages
        for line in each.content.split("\n")
    ]  # fmt: skip
    return lines or ["nothing was said yet"]


def _shown_template(session: ChatSession, _model: ChatModel) -> list[str]:
    if session.template is None:
        return ["no chat template"]
    return [printable(line, 100_000) for line in session.template.text.split("\n")]


TOPICS: dict[str, Callable[[ChatSession, ChatModel], list[str]]] = {
    "model": _shown_model,
    "placement": _shown_placement,
    "speeds": _shown_speeds,
    "settings": _shown_settings,
    "system": _shown_system,
    "conversation": _shown_conversation,
    "template": _shown_template,
}


def _save(session: ChatSession, model: ChatModel, path: str) -> None:
    if not path:
        raise UsageError("/save needs the name of a file")
    target = home(unquoted(path))
    write_file(target, session.conversation.to_json(model.placer.model.name))
    talk(f"wrote {target}")


def _load(session: ChatSession, _model: ChatModel, path: str) -> None:
    if not path:
        raise UsageError("/load needs the name of a file that /save has written")
    source = home(unquoted(path))
    session.begin(Conversation.from_json(text_of_file(source, "conversation")))
    n = session.conversation.n_exchanges
    talk(f"read {source}: {n} exchange{'' if n == 1 else 's'}; the next message goes on from there")


def home(path: str) -> str:
    """With ~ as the user's folder."""
    try:
        return str(Path(path).expanduser())
    except RuntimeError:  # ~name of nobody here
        return path


def _clear(session: ChatSession, _model: ChatModel, _argument: str) -> None:
    session.begin(session.conversation.without_messages())
    talk("a new conversation" + (", with the same system prompt" if session.conversation.system else ""))


def _undo(session: ChatSession, _model: ChatModel, _argument: str) -> None:
    session.undo()
    n = session.conversation.n_exchanges
    talk(f"the last question and its answer are gone; {n or 'none'} left")


def _retry(session: ChatSession, _model: ChatModel, _argument: str) -> None:
    session.retry()


COMMANDS = {
    "/?": Command(_help, "", "this list; /? set and /? show say more", ("set", "show")),
    "/set": Command(_set, "NAME VALUE", "change a setting; without a name: show them", tuple(MEANINGS)),
    "/show": Command(_show, "[TOPIC]", f"{', '.join(TOPICS)}", tuple(TOPICS)),
    "/save": Command(_save, "FILE", "write the conversation as JSON", path=True),
    "/load": Command(_load, "FILE", "go on from a conversation that was saved", path=True),
    "/clear": Command(_clear, "", "forget the conversation, but for the system prompt"),
    "/undo": Command(_undo, "", "take back the last question and its answer"),
    "/retry": Command(_retry, "", "answer the last question again"),
    "/bye": Command(_leave, "", "leave"),
}

OTHER_NAMES = {"/help": "/?", "/": "/?", "/exit": "/bye", "/quit": "/bye", "/parameters": "/set"}


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
