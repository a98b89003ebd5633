"""Prompts: whether to use the model's chat template, and the length of prompt and answer to plan for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oallama.core.errors import UsageError
from oallama.core.types import ModelInfo
from oallama.run.answer import DEFAULT_TOKENS, WITHOUT_END
from oallama.run.vocabulary import count_tokens
from oallama.stores.default_model import FILE

if TYPE_CHECKING:
    from oallama.run.answer import Generation, Stream
    from oallama.run.engine import Engine

REMEDY = "use --no-chat to continue the prompt as plain text"
BYTES_PER_TOKEN = 4  # of ordinary text
TEMPLATE_TOKENS = 64  # that a chat template writes around a message, at most as a rule
ADDED_TOKENS = 8  # that a vocabulary adds by itself, at most


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: a message in the chat template, after an optional system prompt, or a text to continue. ends: whether
    the model was trained to end its answer."""

    text: str
    chats: bool = False
    ends: bool = False
    system: str | None = None

    def stream(
        self,
        engine: Engine,
        max_tokens: int | None,
        on_progress: Callable[[int, int], None],
        on_reasoning: Callable[[str], None],
        **sampling: Any,
    ) -> Stream:
        """Answer it. max_tokens None: until the model ends, 128 where it does not. Raises as Engine.chat and stream."""
        most = self.most(max_tokens)
        if not self.chats:
            return engine.stream(self.text, most, on_progress=on_progress, **sampling)
        return engine.chat(self._messages, True, most, on_progress=on_progress, on_reasoning=on_reasoning, **sampling)

    def generate(self, engine: Engine, max_tokens: int | None, **sampling: Any) -> Generation:
        """Answer it whole, otherwise as stream."""
        most = self.most(max_tokens)
        if not self.chats:
            return engine.generate(self.text, most, **sampling)
        return engine.chat(self._messages, False, most, **sampling)

    def most(self, max_tokens: int | None) -> int:
        """Most tokens of the answer: as requested, else WITHOUT_END if the model ends it."""
        return max_tokens if max_tokens is not None else WITHOUT_END if self.ends else DEFAULT_TOKENS

    @property
    def _messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, {"role": "user", "content": self.text}]

    @property
    def longest(self) -> int:
        """An upper bound of its tokens: one per byte, plus template and special tokens."""
        n_bytes = len(f"{self.system or ''}{self.text}".encode("utf-8", "surrogateescape"))
        return n_bytes + ADDED_TOKENS + (TEMPLATE_TOKENS if self.chats else 0)

    def count(self, path: str) -> int:
        """Number of its tokens for the GGUF at `path`, those of the template estimated. A child process counts them.
        Raises ModelFileError, BridgeError."""
        text = f"{self.system}\n{self.text}" if self.system else self.text
        return count_tokens(path, text) + (TEMPLATE_TOKENS if self.chats else 0)


def uses_template(model: ModelInfo, chat: bool | None, system: str | None = None) -> bool:
    """Whether to use the model's chat template: `chat`, or (None) if it has one. system: a system prompt, which needs
    the template. Raises UsageError for --chat or --system without a template."""
    if system is not None:
        if chat is False:
            raise UsageError("--system is a chat message and cannot be combined with --no-chat")
        chat = True
    found = chat is not False and model.chat_template is not None
    if chat and not found:
        raise UsageError(f"this model has no chat template; {REMEDY}")
    return found


def prompt_for(model: ModelInfo, text: str, chat: bool | None, system: str | None = None) -> Prompt:
    """The prompt in the model's chat template if `chat` (None: if it has one and is not ours). Raises like
    uses_template."""
    tells_stories = Path(model.path).name == FILE
    if chat is None and system is None and tells_stories:
        chat = False  # a question wants --chat
    chats = uses_template(model, chat, system)
    return Prompt(text, chats, ends=chats or tells_stories, system=system)


def likely_tokens(path: str, prompt: Prompt, n_ctx: int | None = None, n_gen: int = 0, room: int = 4096) -> int:
    """Tokens of a prompt to plan for: estimated if its length in bytes shows that it fits the context beside n_gen
    tokens, else counted. n_ctx: context size, None if not chosen yet; room: the least context that will be chosen.
    Raises UsageError if n_ctx is too short, and as Prompt.count."""
    if prompt.longest + n_gen <= (n_ctx or room):
        return min(prompt.longest, len(prompt.text.encode("utf-8", "surrogateescape")) // BYTES_PER_TOKEN + 1)
    n_tokens = prompt.count(path)
    if n_ctx is not None and n_tokens - (TEMPLATE_TOKENS if prompt.chats else 0) > n_ctx:
        raise UsageError(f"the prompt has {n_tokens} tokens but the context holds {n_ctx}; shorten it or raise -c")
    return n_tokens if n_ctx is None else min(n_tokens, n_ctx)
