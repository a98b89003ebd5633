"""What is installed beside oallama, and found by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def contributed(group: str) -> list[Any]:
    """What the entry points of a group name, in the order of their names."""
    return [entry.load() for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)]
