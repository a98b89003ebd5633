"""docs/structure.md lists every source file, in the file's own words."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
HOW_IT_WORKS = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")


def test_the_page_is_current():
    command = [sys.executable, "scripts/gen_structure.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_file_opens_with_a_sentence():
    listed = re.findall(r"^ *- `([^`]+)`: ?(.*)$", PAGE, re.MULTILINE)
    assert [(name, text) for name, text in listed if len(text) < 10] == []


def test_what_the_table_of_equations_names_is_in_its_file():
    rows = re.findall(r"^\|[^|]*\| (`\S+\.py` `\w+`.*) \|$", HOW_IT_WORKS, re.MULTILINE)
    for row in rows:
        file, *names = re.findall(r"`([^`]+)`", row)
        source = (ROOT / "oallama" / file).read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"\bdef {name}\b", source)] == [], file
    assert len(rows) > 4


def test_the_files_of_the_walk_exist():
    by_hand = PAGE.split("\n## Files\n")[0]
    named = [path for path in re.findall(r"`([\w./]+\.(?:py|cpp|h))`", by_hand) if "/" in path]
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "oallama" / path).exists()] == []
