#!/usr/bin/env python3
"""Write the list of files in docs/structure.md: the first sentence of each module's docstring or header's comment.

usage: python scripts/gen_structure.py [--check]     --check: change nothing, exit 1 where the page is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import ROOT, write_or_check

TARGET = ROOT / "docs" / "structure.md"
MARK = "<!-- made by scripts/gen_structure.py from the files themselves; change those and run it again -->\n"
SOURCES = {"oallama": (".py",), "contrib/oallama_contrib": (".py",), "ggml_bridge": (".py", ".h", ".cpp")}


def opening(path: Path) -> str:
    """Return the text that a file opens with: a module's docstring, or the comment lines at the top of C++."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    comment = re.match(r"(?://[^\n]*\n)*", text)
    return re.sub(r"^// ?", "", comment[0] if comment else "", flags=re.MULTILINE)


def sentence(path: Path) -> str:
    """Return the first sentence of a file's opening."""
    first = " ".join(opening(path).split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])(?<!Eq\.)\s", first)[0]


def files() -> Iterator[Path]:
    """Source files, by folder; a .cpp beside the .h of its name is described there."""
    for folder, suffixes in SOURCES.items():
        found = [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes and p.stat().st_size]
        for path in sorted(found, key=lambda p: (p.parent, p.name != "__init__.py", p.name)):
            implements = path.suffix == ".cpp" and path.with_suffix(".h").is_file()
            if not implements and "build" not in path.relative_to(ROOT).parts:
                yield path


def document() -> str:
    """Return the list; a package's own sentence stands beside its name."""
    lines, folder = ["\n"], None
    for path in files():
        if path.parent != folder:
            folder = path.parent
            package = folder / "__init__.py"
            said = f": {sentence(package)}" if package.is_file() and package.stat().st_size else ""
            lines.append(f"- **{folder.relative_to(ROOT).as_posix()}**{said}\n")
        if path.name != "__init__.py":
            lines.append(f"    - `{path.name}`: {sentence(path)}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, MARK, document()))
