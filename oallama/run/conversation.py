"""Conversation of a chat: system prompt and messages; as a template's input, as JSON, and shortened."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from oallama.core.errors import UsageError
from oallama.core.text import is_text

Role = Literal["user", "assistant"]

FORMAT = "oallama conversation"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Message:
    """images: data URLs of pictures that come with it."""

    role: Role
    content: str
    images: tuple[str, ...] = ()

    def for_template(self) -> dict[str, Any]:
        """The message as OpenAI's API has it."""
        if not self.images:
            return {"role": self.role, "content": self.content}
        pictures = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": self.role, "content": [*pictures, {"type": "text", "text": self.content}]}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A turn is a user message and the messages up to the next one."""

    system: str | None = None
    messages: tuple[Message, ...] = ()

    def with_message(self, role: Role, content: str, images: Sequence[str] = ()) -> Conversation:
        return replace(self, messages=(*self.messages, Message(role, content, tuple(images))))

    def without_messages(self) -> Conversation:
        return replace(self, messages=())

    @property
    def n_turns(self) -> int:
        return len(self._starts())

    def without_oldest(self, n: int) -> Conversation:
        """Drop the first n turns and what precedes them; n less than n_turns."""
        return self if n == 0 else replace(self, messages=self.messages[self._starts()[n] :])

    def without_last(self) -> Conversation:
        """Drop the last turn. Raises UsageError if there is none."""
        if not self._starts():
            raise UsageError("the conversation is empty")
        return replace(self, messages=self.messages[: self._starts()[-1]])

    @property
    def last_question(self) -> Message:
        """The user's last message. Raises UsageError if there is none."""
        if not self._starts():
            raise UsageError("the conversation is empty")
        return self.messages[self._starts()[-1]]

    def for_template(self) -> list[dict[str, Any]]:
        """Messages in the format of chat templates."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message.for_template() for message in self.messages)]

    def as_text(self) -> str:
        """Join the messages for a model without a template, with a space before each user message."""
        text = ""
        for message in self.messages:
            joint = message.role == "user" and text and not (text[-1].isspace() or message.content[:1].isspace())
            text += (" " if joint and message.content else "") + message.content
        return text

    def to_json(self, model: str = "") -> str:
        """The conversation as a JSON document. model: the model's name, for the reader."""
        document = {"format": FORMAT, "version": VERSION, "model": model, "messages": self.for_template()}
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Conversation:
        """Read what to_json wrote, any JSON object with `messages` of role and content, or a list of these. Raises
        UsageError."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"not a valid conversation: {error}") from None
        if isinstance(document, dict) and document.get("format") == FORMAT and document.get("version") != VERSION:
            raise UsageError(f"this conversation has version {document.get('version')!r}; this oallama reads {VERSION}")
        messages = document.get("messages") if isinstance(document, dict) else document
        if not isinstance(messages, list):
            raise UsageError('not a valid conversation: it needs a list "messages" of objects with role and content')
        return cls.of(messages)

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """Messages with role and content, after the system prompt if there is one. Raises UsageError."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise UsageError('messages must be a list, e.g. [{"role": "user", "content": "Hello!"}]')
        system: str | None = None
        checked: list[Message] = []
        for number, message in enumerate(messages, 1):
            role, content, images = _checked(message, number)
            if role == "system":
                if number != 1:
                    raise UsageError(f"message {number} is a system prompt, which must be the first message")
                system = content
            else:
                checked.append(Message("user" if role == "user" else "assistant", content, images))
        return cls(system, tuple(checked))

    def _starts(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message.role == "user"]


def _checked(message: Any, number: int) -> tuple[str, str, tuple[str, ...]]:
    """(role, text, pictures) of one message of a file. Raises UsageError."""
    if not isinstance(message, Mapping):
        raise UsageError(f"message {number} must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant"):
        raise UsageError(f"message {number} has role {str(role)[:40]!r}; it must be system, user or assistant")
    images: tuple[str, ...] = ()
    if isinstance(content, list) and role == "user":
        content, images = _parts(content)
    if not isinstance(content, str) or not is_text(content):
        raise UsageError(f"message {number} must have text as content")
    return role, content, images


def _parts(content: Sequence[Any]) -> tuple[str | None, tuple[str, ...]]:
    """Text and pictures of a content in parts; None for what is not one of texts and pictures as data URLs."""
    texts, images = list[str](), list[str]()
    for part in content:
        text, image = (part.get("text"), part.get("image_url")) if isinstance(part, Mapping) else (None, None)
        url = image.get("url") if isinstance(image, Mapping) else None
        if isinstance(text, str):
            texts.append(text)
        elif isinstance(url, str) and url.startswith("data:image/"):
            images.append(url)
        else:
            return None, ()
    return "\n".join(texts), tuple(images)


def fewest_dropped(conversation: Conversation, fits: Callable[[Conversation], bool]) -> int | None:
    """The least number of oldest turns to drop so that the rest fits; None if even the last does not fit. fits must
    be monotonic."""
    numbers = range(conversation.n_turns)
    n = bisect_left(numbers, True, key=lambda n: fits(conversation.without_oldest(n)))
    return n if n < len(numbers) else None
