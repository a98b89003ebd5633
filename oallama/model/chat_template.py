"""Renders a GGUF's chat template, which is a program from a stranger (CVE-2024-34359: such a template ran commands).

It runs in jinja2's ImmutableSandboxedEnvironment, set up as transformers sets up its own, and in a child process with
limits on time and memory, because no sandbox of one process stops a template that never ends. Compiling is no safer:
jinja2 computes constant expressions then, and `{{ ('x' * 2**17) * 2**17 }}` is one.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from oallama.core.errors import ModelFileError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1 << 18  # the longest in use have some 30 thousand
MAX_RENDERED_CHARS = 1 << 24
MAX_MEMORY_BYTES = 1 << 26  # beside what the messages take
BYTES_PER_CHAR = 32  # of the messages: read, put into pieces, joined, and written down again as JSON
MAX_CPU_S = 1.0  # to compile and to render; the longest templates in use take some 0.05 s
TIMEOUT_S = 30.0  # for the whole process, on a machine however busy

REASONING = ("reasoning_content", "thinking", "reasoning")

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
    **more: Any,
) -> str:
    """The text that `template` makes of `messages` (role, content, ...), with the opening of the answer if asked for.

    messages, tools and more (further variables) hold what JSON can. As in transformers, `documents` is None where none
    are given, and a message's reasoning goes by every name that templates read it by. Raises ModelFileError, one
    sentence, for whatever the template does but return a text: a fault in it, a message it refuses, a way out of the
    sandbox, too much time, memory or text.
    """
    from ggml_bridge.child import run_in_child
    from ggml_bridge.errors import BridgeError, ChildDied

    if len(template) > MAX_TEMPLATE_CHARS:
        raise ModelFileError(f"the chat template has {len(template)} characters, which no real one has; {_REMEDY}")
    variables = {
        "documents": None,
        **more,
        "messages": [_with_reasoning(message) for message in messages],
        "tools": tools,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "add_generation_prompt": add_generation_prompt,
    }
    request = {"template": template, "variables": variables}
    try:
        return str(run_in_child("oallama.model.chat_template", request, timeout_s=timeout_s)["text"])
    except (BridgeError, ValueError) as error:
        if isinstance(error, ChildDied) and error.signal == getattr(signal, "SIGPROF", None):
            error = ValueError(f"it takes more than {MAX_CPU_S:g} s of computing")
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelFileError(f"the chat template cannot be used ({reason}); {_REMEDY}") from None


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning, the first of REASONING that it has, as `reasoning_content` and `thinking`."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


#
# the child's side
#


def _render(request: dict[str, Any], _progress: Any) -> dict[str, str]:
    """Compile and render within the limits; ValueError with the reason where that fails."""
    import jinja2

    environment, variables = _environment(), request["variables"]
    most_bytes = MAX_MEMORY_BYTES + BYTES_PER_CHAR * len(json.dumps(variables, ensure_ascii=False))
    pieces, length = [], 0
    try:
        with contextlib.ExitStack() as limits:
            _limit_memory(limits, most_bytes)
            _limit_time(limits)
            for piece in environment.from_string(request["template"]).generate(**variables):
                length += len(piece)
                if length > MAX_RENDERED_CHARS:
                    raise ValueError(f"it makes more than {MAX_RENDERED_CHARS} characters")
                pieces.append(piece)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} is wrong: {error.message}") from None
    except MemoryError:
        raise ValueError(f"it needs more than {most_bytes} bytes of memory") from None
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

    class GenerationTag(Extension):
        """{% generation %}…{% endgeneration %} marks what is trained on; here it is only its content, in a scope of its
        own as a macro's."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("content"), [], [], content).set_lineno(line)

        def content(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> NoReturn:
        raise ValueError(f"it refuses the messages: {str(message)[:1000]}")

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _limit_memory(limits: contextlib.ExitStack, most_bytes: int) -> None:
    """Let this process take at most so many bytes more until `limits` ends; beyond that MemoryError is raised."""
    try:
        import resource

        taken_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + most_bytes, before[1]))
    except (ImportError, OSError, ValueError):  # not on this system; the time limit remains
        return
    limits.callback(resource.setrlimit, resource.RLIMIT_AS, before)


def _limit_time(limits: contextlib.ExitStack) -> None:
    """Let this process compute for at most MAX_CPU_S until `limits` ends; then SIGPROF ends it, in the midst of C code
    too."""
    if hasattr(signal, "setitimer"):  # elsewhere the time-out remains
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        limits.callback(signal.setitimer, signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    child_main(_render)
