#!/usr/bin/env python3
"""Takes the pictures of docs/pictures that show pages, in headless Chromium, and notes what a page was made of.

    .venv/bin/oallama affinity-report MODEL -o report.html
    .venv/bin/python scripts/picture.py report.png file://$PWD/report.html
    .venv/bin/python scripts/picture.py placement.png http://127.0.0.1:PORT/   # the placement page of `oallama serve`

tests/unit/test_pictures.py fails where a source has changed since its picture was taken: look at the page, and take it
anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
NOTES = FOLDER / "sources.json"
REPORT, TEMPLATES = "oallama/report", "oallama/report/templates"


@dataclass(frozen=True)
class Picture:
    """width, height: of the window; scheme: of its colours. sources: what the page looks like follows from."""

    width: int
    height: int
    scheme: Literal["light", "dark"]
    sources: tuple[str, ...]

    def digest(self) -> str:
        texts = [(ROOT / source).read_bytes() for source in self.sources]
        return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


_PAGE = (
    *(f"{TEMPLATES}/{name}" for name in ("page.html.j2", "table.html.j2", "scale.css", "affinity.css", "affinity.js")),
    *(f"{REPORT}/{name}.py" for name in ("layout", "page")),
)
_REPORT = (*_PAGE, f"{TEMPLATES}/affinity.html.j2", f"{REPORT}/html.py")
_PLACEMENT = (*_PAGE, *(f"{TEMPLATES}/placement.{end}" for end in ("html.j2", "js")), f"{REPORT}/placement_page.py")

PICTURES = {
    "report.png": Picture(1280, 1500, "light", _REPORT),
    "placement.png": Picture(1280, 1000, "light", _PLACEMENT),
    "placement-narrow.png": Picture(420, 1180, "dark", _PLACEMENT),
}


def known() -> dict[str, str]:
    """The sources' digest of each picture, when it was taken."""
    notes: dict[str, str] = json.loads(NOTES.read_text(encoding="utf-8")) if NOTES.exists() else {}
    return notes


def take(name: str, url: str) -> None:
    """Photograph a page, and note its sources. Raises SystemExit if there is no Chromium."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium on PATH: install it, e.g. with `apt-get install chromium`")
    picture = PICTURES[name]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": picture.width, "height": picture.height}
        page = browser.new_context(viewport=size, color_scheme=picture.scheme).new_page()
        page.goto(url)
        page.wait_for_timeout(2500)  # the placement page asks its server once a second
        page.screenshot(path=FOLDER / name)
        browser.close()
    NOTES.write_text(json.dumps(known() | {name: picture.digest()}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PICTURES:
        raise SystemExit(f"usage: picture.py {'|'.join(PICTURES)} URL")
    take(*sys.argv[1:])
