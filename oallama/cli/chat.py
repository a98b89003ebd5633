"""Whether `oallama run` chats or continues, and the tokens it then starts from.

A chat template is a program out of the model file. It is rendered in jinja2's immutable sandbox, in a child process
with little memory and little time: no loop and no huge string in it can hold up or hurt this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from oallama.cli.default_model import FILE
from oallama.core.errors import ModelFileError, UsageError

if TYPE_CHECKING:
    from oallama.run.engine import Engine

MAX_TEMPLATE_CHARS = 1 << 20
MAX_TEXT_CHARS = 64 << 20
MAX_MEMORY_BYTES = 1 << 30
TIMEOUT_S = 20.0

_REMEDY = "use --no-chat to continue the prompt as it is"


def prompt_tokens(engine: Engine, path: str, prompt: str, chat: bool | None) -> list[int]:
    """Token numbers of the prompt, in the model's chat template if `chat` (None: if it has one and is not ours).

    Raises UsageError for --chat without a template, ModelFileError for a template that cannot be used.
    """
    if chat is None and Path(path).name == FILE:
        chat = False
    if chat is False:
        return engine.tokenize(prompt)
    template, marks = template_of(path)
    if template is None:
        if chat:
            raise UsageError(f"this model has no chat template; {_REMEDY}")
        return engine.tokenize(prompt)
    text = render(template, [{"role": "user", "content": prompt}], marks)
    begins = bool(marks["bos_token"]) and text.startswith(marks["bos_token"])
    return engine.tokenize(text, add_special=not begins)


def template_of(path: str) -> tuple[str | None, dict[str, str]]:
    """(the chat template or None, the texts of the BOS and EOS tokens) as the GGUF states them."""
    from oallama.model.gguf_reader import read_gguf

    metadata = read_gguf(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    marks = {}
    for name in ("bos", "eos"):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        known = isinstance(number, int) and 0 <= number < len(tokens)
        marks[f"{name}_token"] = str(tokens[number]) if known else ""
    template = metadata.get("tokenizer.chat_template")
    return (template if isinstance(template, str) and template else None), marks


def render(template: str, messages: list[dict[str, str]], marks: dict[str, str], timeout_s: float = TIMEOUT_S) -> str:
    """The text that a chat template makes of messages, with the opening of the answer. Raises ModelFileError."""
    from ggml_bridge.child import run_in_child
    from ggml_bridge.errors import BridgeError

    if len(template) > MAX_TEMPLATE_CHARS:
        raise ModelFileError(
            f"the model's chat template has {len(template)} characters, which is no template; {_REMEDY}"
        )
    request = {"template": template, "messages": messages, "marks": marks}
    try:
        return str(run_in_child("oallama.cli.chat", request, timeout_s=timeout_s)["text"])
    except (BridgeError, ValueError) as error:
        raise ModelFileError(f"the model's chat template cannot be used ({error}); {_REMEDY}") from None


def _render_here(request: dict[str, Any], _progress: Any) -> dict[str, str]:
    """The child's side."""
    from datetime import datetime

    from jinja2.sandbox import ImmutableSandboxedEnvironment

    _limit_memory()

    def raise_exception(message: str) -> NoReturn:
        raise ValueError(f"it refuses the messages: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    text = environment.from_string(request["template"]).render(
        messages=request["messages"], add_generation_prompt=True, tools=None, **request["marks"]
    )
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError("it makes a text without end")
    return {"text": text}


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    except (ImportError, OSError, ValueError):  # not on this system; the time limit remains
        return


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    child_main(_render_here)
