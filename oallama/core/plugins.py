"""Extensions: what other installed packages offer oallama by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def contributed(group: str) -> list[Any]:
    """Load and return what the entry points of a group name, ordered by their names."""
    return [entry.load() for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)]
