"""Chat templates: whether a model is asked in its own, and the text that it then starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from oallama.core.errors import ModelFileError, UsageError
from oallama.run.conversation import Conversation
from oallama.stores.default_model import FILE

_REMEDY = "use --no-chat to continue the prompt as it is"


class Tokenizer(Protocol):
    """The part of an engine that is needed here."""

    def tokenize(self, text: str, add_special: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text for the model, in its chat template or as it is."""

    text: str
    add_special: bool = True  # False: the template has written the BOS token itself
    ends: bool = False  # whether the model was trained to end what follows

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.tokenize(self.text, add_special=self.add_special)


@dataclass(frozen=True, slots=True)
class Template:
    """A model's chat template, with the texts of its BOS and EOS tokens."""

    text: str
    bos: str
    eos: str

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """Messages of role and content, with the opening of the answer. A child process renders them, so ask once.
        Raises ModelFileError for a template that cannot be used."""
        from oallama.model.chat_template import render_chat

        try:
            text = render_chat(self.text, messages, self.bos, self.eos)
        except ModelFileError as error:
            raise ModelFileError(f"{error}; {_REMEDY}") from None
        return Prompt(text, add_special=not (self.bos and text.startswith(self.bos)), ends=True)


def template_for(path: str, chat: bool | None, system: str | None = None) -> Template | None:
    """The model's template; None where its text is to be continued: if not `chat`, or (None) if it has no template.
    system: a message of a chat, which needs the template.

    Raises UsageError for --chat or --system without a template.
    """
    if system is not None:
        if chat is False:
            raise UsageError("--system is a message of a chat, so it does not go with --no-chat; leave one of them out")
        chat = True
    text, bos, eos = (None, "", "") if chat is False else template_of(path)
    if text is not None:
        return Template(text, bos, eos)
    if chat:
        raise UsageError(f"this model has no chat template; {_REMEDY}")
    return None


def prompt_of(path: str, prompt: str, chat: bool | None, system: str | None = None) -> Prompt:
    """The prompt in the model's chat template if `chat` (None: if it has one and is not ours). system: a message
    before it. Raises like template_for and Template.prompt."""
    tells_stories = Path(path).name == FILE
    if chat is None and system is None and tells_stories:
        chat = False  # a question wants --chat
    template = template_for(path, chat, system)
    if template is None:
        return Prompt(prompt, ends=tells_stories)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return template.prompt([*messages, {"role": "user", "content": prompt}])


def prompt_for(template: Template | None, conversation: Conversation) -> Prompt:
    """The conversation in a template; without one as a text to continue. Raises UsageError for a system prompt without
    a template, and as Template.prompt."""
    if template is not None:
        return template.prompt(conversation.for_template())
    if conversation.system is not None:
        raise UsageError("this model has no chat template, so it cannot be given a system prompt")
    return Prompt(conversation.as_text())


def template_of(path: str) -> tuple[str | None, str, str]:
    """(the chat template or None, the texts of the BOS and EOS tokens) as the GGUF states them."""
    from oallama.model.gguf_reader import read_gguf

    metadata = read_gguf(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    marks = []
    for name in ("bos", "eos"):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        known = isinstance(number, int) and 0 <= number < len(tokens)
        marks.append(str(tokens[number]) if known else "")
    template = metadata.get("tokenizer.chat_template")
    return (template if isinstance(template, str) and template else None), marks[0], marks[1]
