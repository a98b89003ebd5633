"""Placement of large language models over CPU and GPU, operator by operator, for unmodified llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oallama.core.types import Profile
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

_EXPORTS = {"Placer": "oallama.placer", "Plan": "oallama.plan.plan", "Profile": "oallama.core.types"}

__all__ = ["Placer", "Plan", "Profile", "__version__"]


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used, so that `import oallama` costs nothing."""
    if name in _EXPORTS:
        from importlib import import_module

        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'oallama' has no attribute {name!r}")
