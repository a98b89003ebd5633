"""Renders a GGUF's chat template, which is a program from a stranger (CVE-2024-34359: such a template ran commands).

It runs in jinja2's ImmutableSandboxedEnvironment, set up as transformers sets up its own, and in a child process with
limits on time and memory, because no sandbox of one process stops a template that never ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from oallama.core.errors import ModelFileError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1 << 18  # the longest in use have some 30 thousand
MAX_RENDERED_CHARS = 1 << 24
MAX_MEMORY_BYTES = 1 << 30
TIMEOUT_S = 10.0

_REMEDY = "give the prompt without a chat template, or use another file"


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> str:
    """The text that `template` makes of `messages` (role, content, ...), with the opening of the answer if asked for.

    messages and tools hold what JSON can. Raises ModelFileError, one sentence, for whatever the template does but
    return a text: a fault in it, a message it refuses, a way out of the sandbox, too much time, memory or text.
    """
    from ggml_bridge.child import run_in_child
    from ggml_bridge.errors import BridgeError

    if len(template) > MAX_TEMPLATE_CHARS:
        raise ModelFileError(f"the chat template has {len(template)} characters, which no real one has; {_REMEDY}")
    variables = {
        "messages": list(messages),
        "tools": tools,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
    }
    request = {"template": template, "variables": variables}
    try:
        return str(run_in_child("oallama.model.chat_template", request, timeout_s=timeout_s)["text"])
    except (BridgeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelFileError(f"the chat template cannot be used ({reason}); {_REMEDY}") from None


#
# the child's side
#


def _render(request: dict[str, Any], _progress: Any) -> dict[str, str]:
    """Render within the limits; ValueError with the reason where that fails."""
    import jinja2

    _limit_memory()
    try:
        template = _environment().from_string(request["template"])
        pieces, length = [], 0
        for piece in template.generate(**request["variables"]):
            length += len(piece)
            if length > MAX_RENDERED_CHARS:
                raise ValueError(f"it makes more than {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} is wrong: {error.message}") from None
    except MemoryError:
        raise ValueError(f"it needs more than {MAX_MEMORY_BYTES} bytes of memory") from None
    except RecursionError:
        raise ValueError("it calls itself without end") from None
    return {"text": "".join(pieces)}


def _environment() -> ImmutableSandboxedEnvironment:
    """jinja2 as transformers.utils.chat_template_utils configures it; for-loops over range() end at its MAX_RANGE."""
    from datetime import datetime

    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}…{% endgeneration %} marks what is trained on; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise ValueError(f"it refuses the messages: {message}")

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    except (ImportError, OSError, ValueError):  # not on this system; the time limit remains
        return


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    child_main(_render)
