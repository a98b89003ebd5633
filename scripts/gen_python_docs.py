#!/usr/bin/env python3
"""Write docs/python.md from the docstrings of the public classes, so that it cannot be out of date.

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

HEAD = """\
# From Python

<!-- made by scripts/gen_python_docs.py; change the docstrings, or that file, and run it again -->

Answer one prompt, as `oallama run` does:

```python
from oallama import Placer

print(Placer.load("model.gguf").run("Once upon a time", max_tokens=32).text)
```

A model is the path of a GGUF, or [a name](run.md#models-by-name) as on the command line.

Answer several prompts from a loaded model:

```python
placer = Placer.load("model.gguf", vram="6GiB")
plan = placer.plan("auto", n_prompt=64, n_gen=32)
print(plan.summary())

with placer.engine(plan) as engine:
    answer = engine.generate("Once upon a time", max_tokens=32, temperature=0)
    print(answer.text, f"({1 / answer.tpot_s:.1f} tokens/s)")

    for piece in engine.stream("The little dog", max_tokens=32, stop=["."]):
        print(piece, end="", flush=True)

    messages = [{"role": "user", "content": "Tell me about a cat."}]
    answer = engine.chat(messages, max_tokens=32)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
    pieces = engine.chat(messages, stream=True, max_tokens=32)
    print("".join(pieces), pieces.generation.end)
```

For code built on llama-cpp-python, get a `Llama` placed by the plan:

```python
with placer.llama(plan, logits_all=True) as llama:
    llama.eval(llama.tokenize(b"Once upon a time"))
    print(llama.scores[: llama.n_tokens].shape)
```

The first plan of a model measures the machine, which takes seconds to minutes; later plans use the cache. A plan can
be saved as a file:

```python
from oallama import Plan

plan.save("plan.json")
assert Plan.load("plan.json") == plan

for row in placer.affinity(phase="decode")[:3]:
    print(row.rank, row.name, row.affinity, row.backend)
```

Failures raise an OallamaError with a one-sentence message:

```python
from oallama import OallamaError

try:
    Placer.load("model.gguf", vram=6)
except OallamaError as error:
    print(error)  # vram: '6' is 6 bytes; write the unit, e.g. 6GiB
```
"""

MEMBERS = {
    "Placer": "load profile affinity plan price run engine llama simulate",
    "Plan": "summary save load check fingerprint",
    "Engine": "generate stream chat embed tokenize prompt_tokens url api_key close",
    "Stream": "rest close",
    "Generation": "",
}
"""Members that are shown, by class, in the order of use."""


def document() -> str:
    """The whole page."""
    sys.path.insert(0, str(ROOT))
    import oallama
    from oallama.run.answer import Stream

    shown = (oallama.Placer, oallama.Plan, oallama.Engine, Stream, oallama.Generation)
    parts = [HEAD, *(line for one in shown for line in section(one)), "## Errors", ""]
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
    sys.exit(write_or_check(TARGET, document()))
