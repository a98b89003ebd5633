"""The documentation as a site: built by mkdocs, where a broken link is an error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
pytest.importorskip("material", reason="mkdocs-material is not installed (extra docs)")

ROOT = Path(__file__).resolve().parents[2]


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_every_page_is_built_and_no_link_is_broken(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    made = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}
    assert pages <= made
    start = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    assert not re.findall(r"""<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)=["']?https?://""", start)
