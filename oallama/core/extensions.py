"""Extensions of oallama by entry points of other packages. Each is imported when its name is requested, so a broken
package affects nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from runpy import run_path
from typing import Any

from oallama.core.errors import UsageError


def extension_names(group: str) -> list[str]:
    """The names of a group's entry points, in order; nothing is imported."""
    return sorted(entry_points(group=group).names)


def load_extension(group: str, name: str) -> Any:
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


@cache
def test_devices() -> Mapping[str, Callable[[str], str]]:
    """Devices of the tests (in a checkout with OALLAMA_TEST_DEVICES=1): first word of a device's text -> function that
    returns the text of a real device."""
    file = Path(__file__).parents[2] / "tests" / "devices.py"
    if os.environ.get("OALLAMA_TEST_DEVICES") != "1" or not file.is_file():
        return {}
    devices: Mapping[str, Callable[[str], str]] = run_path(str(file))["DEVICES"]
    return devices
