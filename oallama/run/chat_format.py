"""The chat templates of a GGUF as llama_cpp.Llama offers them, none of which is compiled in this process.

Llama compiles them all when it is made, with jinja2, which computes what is constant in them meanwhile, however much
that is. Importing this module imports llama_cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format

from oallama.model.chat_template import render_chat

_KEY = "tokenizer.chat_template"


def without_templates(metadata: Mapping[str, str]) -> dict[str, str]:
    """A GGUF's text metadata without its chat templates."""
    return {key: value for key, value in metadata.items() if not key.startswith(_KEY)}


def offer_templates(llama: Any, metadata: Mapping[str, str]) -> None:
    """Give a Llama that was made without them the chat templates of its metadata, and choose as Llama does."""
    for key, template in metadata.items():
        if key == _KEY or key.startswith(f"{_KEY}."):
            name = "chat_template.default" if key == _KEY else key.removeprefix("tokenizer.")
            handler = llama_chat_format.chat_formatter_to_chat_completion_handler(ChatFormat(llama, template))
            llama._chat_handlers[name] = handler
    if _KEY in metadata:
        known = llama_chat_format.guess_chat_format_from_gguf_metadata(dict(metadata))
        llama.chat_format = known or "chat_template.default"


class ChatFormat:
    """Makes prompts of messages by one template, in a child process. Raises ModelFileError, as render_chat."""

    def __init__(self, llama: Any, template: str) -> None:
        model = llama._model
        self._template = template
        self._eos = int(llama.token_eos())
        self._marks = [
            model.token_get_text(token) if token != -1 else "" for token in (int(llama.token_bos()), self._eos)
        ]

    def __call__(self, *, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Any:
        """llama_cpp's ChatFormatterResponse."""
        bos, eos = self._marks

        def at_end(tokens: Any, _logits: Any) -> bool:
            return bool(tokens[-1] == self._eos)

        return llama_chat_format.ChatFormatterResponse(
            prompt=render_chat(self._template, messages, bos, eos, **variables),
            stop=[eos],
            stopping_criteria=llama_cpp.StoppingCriteriaList([at_end]),
            added_special=True,
        )
