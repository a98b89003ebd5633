"""Placement of large language models over CPU and GPU, operator by operator, for unmodified llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from oallama.core.errors import (
        BridgeError,
        DeviceError,
        DoesNotFit,
        DownloadError,
        ModelFileError,
        OallamaError,
        OutOfTime,
        PlanError,
        ProfileError,
        UnknownDevice,
        UsageError,
    )
    from oallama.core.profile import Profile
    from oallama.placer import Placer
    from oallama.plan.plan import Plan

__all__ = [
    "BridgeError",
    "DeviceError",
    "DoesNotFit",
    "DownloadError",
    "ModelFileError",
    "OallamaError",
    "OutOfTime",
    "Placer",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "UnknownDevice",
    "UsageError",
    "__version__",
]

_OF = {"Placer": "oallama.placer", "Plan": "oallama.plan.plan", "Profile": "oallama.core.profile"}
"""The modules of public names that are no errors."""


def __getattr__(name: str) -> Any:
    """Public names are loaded when they are first used, so that `import oallama` costs nothing. Who uses one writes
    Python, so that messages name its arguments from there on."""
    from importlib import import_module

    errors = import_module("oallama.core.errors")
    if name == "errors" or name in __all__:
        errors.OallamaError.speaks_python = True
        return errors if name == "errors" else getattr(import_module(_OF[name]) if name in _OF else errors, name)
    raise AttributeError(f"module 'oallama' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "errors"})
