"""The user's ggml back end: the library in GGML_BACKEND_PATH, which the wheel's ggml ignores.

`--backend` sets this variable for all processes of oallama.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from oallama.core.errors import UsageError

if TYPE_CHECKING:
    from ggml_bridge import Bridge

VARIABLE = "GGML_BACKEND_PATH"

_loaded: set[str] = set()


def user_backend(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the user's back end; None without one. oallama's plugin does not count: llama.cpp's programs
    load it by the same variable, and the bridge loads it when it needs it."""
    path = environment.get(VARIABLE)
    return None if not path or Path(path).name.startswith("libggml-oallama.") else path


def use_backend(path: str) -> None:
    """Make this process and its children load that library. Raises UsageError if there is no such file."""
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises where a name is too long
        raise UsageError(f"--backend {repr(path)[:200]}: no such file; name a ggml back end library")
    os.environ[VARIABLE] = str(Path(path).resolve())


def load_user_backend(bridge: Bridge) -> None:
    """Load the user's back end, once per process. Raises UsageError for an invalid library, or another ggml's."""
    path = user_backend()
    if path is None or path in _loaded:
        return
    try:
        bridge.load_backend(path)
    except ValueError as error:
        raise UsageError(f"--backend (or {VARIABLE}): {error}; name a back end built for this ggml") from None
    _loaded.add(path)
