#!/usr/bin/env python3
"""Write the list of members in docs/python.md from the docstrings of the public classes.

usage: python scripts/gen_python_docs.py [--check]   --check: change nothing, exit 1 where the page is out of date
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from generated_page import ROOT, escape, write_or_check

TARGET = ROOT / "docs" / "python.md"

MARK = "<!-- made by scripts/gen_python_docs.py; change the docstrings, and run it again -->\n"

MEMBERS = {
    "Placer": "load profile affinity plan price run engine llama simulate",
    "Plan": "summary save load check fingerprint",
    "Engine": "generate stream chat embed tokenize prompt_tokens url api_key close",
    "Stream": "rest close",
    "Generation": "",
}
"""Members that are shown, by class, in the order of use."""


def document() -> str:
    """The list."""
    sys.path.insert(0, str(ROOT))
    import oallama
    from oallama.run.answer import Stream

    shown = (oallama.Placer, oallama.Plan, oallama.Engine, Stream, oallama.Generation)
    parts = ["", *(line for one in shown for line in section(one)), "## Errors", ""]
    for name in sorted(oallama.ERRORS):
        kind = getattr(oallama, name)
        parts.append(f"- `{name}({kind.__base__.__name__})`: {' '.join((kind.__doc__ or '').split())}")
    return "\n".join(parts) + "\n"


def section(kind: type) -> Iterator[str]:
    """A class: its docstring, and its members with signature and docstring."""
    yield from (f"## {kind.__name__}", "", prose(kind), "")
    if is_dataclass(kind):
        yield from ("Fields: " + ", ".join(f"`{field.name}`" for field in fields(kind)) + ".", "")
    for name in MEMBERS[kind.__name__].split():
        member = inspect.getattr_static(kind, name)
        call = "" if isinstance(member, property) else str(inspect.signature(getattr(kind, name)))
        call = re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r"\(self(, )?", "(", call))  # annotations are text
        yield from (f"### {kind.__name__}.{name}", "", f"`{name}{call}`<br>{prose(member)}", "")


def prose(item: object) -> str:
    """A docstring as Markdown, a line for each paragraph."""
    paragraphs = (inspect.getdoc(item) or "").split("\n\n")
    return escape("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs))


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, MARK, document()))
