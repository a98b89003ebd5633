"""Chat templates of real models in our sandbox and in transformers: whether both make the same text of a chat."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure.measure import Measure, MeasureStep
from oallama.core.errors import ModelFileError
from oallama.model.chat_template import render_chat

BOS, EOS = "<s>", "</s>"
SHOWN = 20  # differences that the table names

SYSTEM = {"role": "system", "content": "Answer in one line."}
ASKED = {"role": "user", "content": "Why is <the> sky “blue”?"}
TURNS = [ASKED, {"role": "assistant", "content": "Light\nis scattered."}, {"role": "user", "content": "  At dusk?  "}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place & a day.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "a town"},
                "days": {"type": ["integer", "null"], "enum": [1, 7]},
            },
            "required": ["place"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
CALLED = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"celsius": 7}'},
]

CHATS: dict[str, dict[str, Any]] = {
    "question": {"messages": [ASKED]},
    "question, no opening": {"messages": [ASKED], "add_generation_prompt": False},
    "system": {"messages": [SYSTEM, ASKED]},
    "turns": {"messages": TURNS},
    "system, turns, no opening": {"messages": [SYSTEM, *TURNS], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, ASKED], "tools": [TOOL]},
    "tool called": {"messages": CALLED, "tools": [TOOL]},
    "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]},
    "reasoning": {
        "messages": [ASKED, {"role": "assistant", "content": "It is.", "reasoning_content": "Rayleigh."}, ASKED]
    },
    "answered": {"messages": TURNS[:2], "add_generation_prompt": False},
    "roles out of turn": {"messages": [ASKED, ASKED]},
    "nothing said": {"messages": []},
}
"""What render_chat is given beside a template."""

_TRANSFORMERS = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template

for line in sys.stdin:
    template, bos, eos, chats = json.loads(line)
    answers = []
    for chat in chats:
        given = {"tools": None, "add_generation_prompt": True, **chat}
        messages = given.pop("messages")
        try:
            texts, _ = render_jinja_template([messages], chat_template=template, bos_token=bos, eos_token=eos, **given)
            answers.append({"text": texts[0]})
        except Exception as error:
            answers.append({"refused": f"{type(error).__name__}: {error}"[:200]})
    print(json.dumps(answers), flush=True)
"""


def _steps(options: argparse.Namespace) -> Iterator[MeasureStep]:
    known: set[str] = set()
    for folder in options.files:
        for path in sorted(Path(folder).rglob("*.jinja")):
            template = path.read_bytes().decode("utf-8", "replace")
            name = hashlib.sha256(template.encode()).hexdigest()[:16]
            if name not in known:
                known.add(name)
                run = functools.partial(_compare, template, options.python)
                yield MeasureStep(f"{Path(folder).name} {name}", str(path), run)


def _compare(template: str, python: str) -> dict[str, Any]:
    """By chat: equal, both refuse, or what each of the two has."""
    pairs = zip(CHATS.items(), _theirs(template, python), strict=True)
    return {name: _outcome(_ours(template, chat), their) for (name, chat), their in pairs}


def _ours(template: str, chat: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render_chat(template, bos_token=BOS, eos_token=EOS, **chat)}
    except ModelFileError as error:
        return {"refused": str(error)[:200]}


@functools.cache
def _transformers(python: str) -> subprocess.Popen[str]:
    """A process that renders as long as this one lives; it takes seconds to begin."""
    return subprocess.Popen([python, "-c", _TRANSFORMERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _theirs(template: str, python: str) -> list[dict[str, str]]:
    process = _transformers(python)
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps([template, BOS, EOS, list(CHATS.values())]), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"measure: templates: {python} cannot render with transformers; see above")
    answers: list[dict[str, str]] = json.loads(line)
    return answers


def _outcome(ours: dict[str, str], theirs: dict[str, str]) -> Any:
    if "refused" in ours and "refused" in theirs:
        return "both refuse"
    if ours == theirs:
        return "equal"
    return {"ours": ours, "transformers": theirs}


def _rows(found: Sequence[tuple[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    sources = dict.fromkeys(name.split(" ")[0] for name, _ in found)
    for source in [*sources, ""]:
        chosen = [outcomes for name, outcomes in found if name.startswith(source)]
        counts = Counter(
            each if isinstance(each, str) else "differ" for outcomes in chosen for each in outcomes.values()
        )
        rows.append((source or "all", len(chosen), counts["equal"], counts["both refuse"], counts["differ"]))
    differences = [
        (f"{name}: {chat}", "", "", "", str(each)[:300])
        for name, outcomes in found
        for chat, each in outcomes.items()
        if not isinstance(each, str)
    ]
    return rows + differences[:SHOWN]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FOLDER", help="with .jinja files, at any depth")
    parser.add_argument("--python", required=True, help="an interpreter that has transformers and jinja2")


MEASURE = Measure(
    "chat templates (.jinja) as transformers renders them: a dozen chats through each, equal, both refused or not",
    _add_options, _steps, ("source", "templates", "equal", "both refuse", "differ"), _rows,
)  # fmt: skip
