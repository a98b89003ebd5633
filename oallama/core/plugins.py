"""Extensions: what other installed packages offer oallama by entry points. One is imported when it is asked for by its
name, so that a package that is broken costs nothing else."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from oallama.core.errors import UsageError


def offered(group: str) -> list[str]:
    """The names of a group's entry points, in order; nothing is imported."""
    return sorted(entry_points(group=group).names)


def load_offered(group: str, name: str) -> Any:
    """Import and return what the entry point of this name is; None if there is none. Raises UsageError if its package
    cannot be imported, whatever it raises."""
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else entry.value
            raise UsageError(
                f"{name} is of the package {package}, which cannot be imported ({type(error).__name__}: {error}); "
                "repair or uninstall it"
            ) from error
    return None
