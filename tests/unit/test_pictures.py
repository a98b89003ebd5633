"""Pictures of pages are no older than what they show."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from picture import FOLDER, PICTURES, known


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_the_page_as_it_is(name):
    assert (FOLDER / name).is_file()
    assert known().get(name) == PICTURES[name].digest(), (
        f"{name}: look at the page, and take it anew: scripts/picture.py"
    )
