"""docs/structure.md against the tree: each source file has one line there, and no line names a file that is not."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "structure.md"
SOURCES = {"oallama": (".py",), "ggml_bridge": (".py", ".cpp", ".c", ".h")}
LINE = re.compile(r"^\s*[-*|]\s*`([^`\s]+\.(?:py|cpp|c|h))`\s*[:|]\s*(.*)$")
"""A list item, "- `oallama/placer.py`: what it is for.", or such a row of a table."""

LONGEST = 160  # characters of a sentence


def described():
    """(path, sentence) of every line that describes a file."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    return [(match[1], match[2].strip(" |")) for match in map(LINE.match, lines) if match]


def sources():
    """Source files with something in them, as paths from the root."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder, suffixes in SOURCES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and path.stat().st_size and "build" not in path.relative_to(ROOT).parts
    }


def test_every_source_file_has_a_line():
    assert sources() - {path for path, _ in described()} == set()


def test_no_line_names_a_file_that_is_not_there():
    assert {path for path, _ in described()} - sources() == set()


def test_no_file_has_two_lines():
    paths = [path for path, _ in described()]
    assert sorted(paths) == sorted(set(paths))


def test_each_line_is_one_short_sentence():
    wrong = [path for path, sentence in described() if not 10 <= len(sentence) <= LONGEST or ". " in sentence]
    assert wrong == []
