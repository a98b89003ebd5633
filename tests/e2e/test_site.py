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


def test_a_broken_link_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[there](nowhere.md)\n")
    wanted = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(wanted.replace("hooks: [scripts/site_links.py]\n", ""))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and "nowhere.md" in done.stderr


def test_files_outside_of_the_site_are_named() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import site_links
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    from types import SimpleNamespace

    from mkdocs.exceptions import PluginError

    page = SimpleNamespace(file=SimpleNamespace(src_uri="serve.md"))
    said = "[card](../models/README.md), [here](run.md)"
    assert site_links.on_page_markdown(said, page) == "card (`models/README.md`), [here](run.md)"
    with pytest.raises(PluginError, match="not there"):
        site_links.on_page_markdown("[x](../gone.md)", page)
