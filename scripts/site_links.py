"""A hook of mkdocs: links out of docs/, and to folders, name the file instead, as the site has no page for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+|[^)#\s:]+/)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`[text](../file)` as text and the file's path. Raises PluginError if there is no such file."""
    folder = (DOCS / page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        if target.is_relative_to(DOCS) and not target.is_dir():
            return link[0]
        path = f"`{target.relative_to(ROOT)}`"
        return path if link[1].strip("`") in link[2] else f"{link[1]} ({path})"

    return LINK.sub(named, markdown)
