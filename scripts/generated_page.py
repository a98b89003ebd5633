"""The part of a page of docs that a script makes: written, or with --check compared with what it would write."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_check(page: Path, mark: str, text: str) -> int:
    """Write the text below the page's mark, all above which is written by hand, and return 0; with --check change
    nothing, and return 1 where it is out of date."""
    before = page.read_text(encoding="utf-8")
    after = before.partition(mark)[0] + mark + text
    if sys.argv[1:] != ["--check"]:
        page.write_text(after, encoding="utf-8")
        return 0
    if before == after:
        return 0
    name, script = page.relative_to(ROOT), Path(sys.argv[0]).name
    print(f"{name} is out of date: run python scripts/{script}", file=sys.stderr)
    return 1


def escape(text: str) -> str:
    """Text that Markdown leaves alone, also inside a table; code spans stay code."""
    pieces = text.split("`")
    for i in range(0, len(pieces), 2):
        pieces[i] = re.sub(r"([\\*<\[\]])", r"\\\1", pieces[i])
    return "`".join(pieces).replace("|", "\\|")
