"""Reports are what tests/golden/report has; reports.py says how to write these files anew."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from golden.reports import FOLDER, MADE

pytestmark = pytest.mark.usefixtures("small_cards")


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_reports_are_as_they_were(made: Callable[[], Iterator[tuple[str, str]]]) -> None:
    for name, text in made():
        assert text == (FOLDER / name).read_text(encoding="utf-8"), f"{name}: meant? golden/reports.py writes it anew"
        if name.endswith(".txt") and name.startswith(("affinity-dense", "affinity-moe", "affinity-run", "what-if")):
            assert max(map(len, text.splitlines())) <= 80, name


def test_no_report_is_of_nothing() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {name for made in MADE for name, _ in made()}
