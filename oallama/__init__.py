"""Placement of large language models over CPU and GPU, operator by operator, for unmodified llama.cpp.

    from oallama import Placer

    placer = Placer.load("model.gguf", vram="6GiB")          # or a name, as on the command line
    print(placer.run("Why is the sky blue?").text)           # plan, load, answer, free

    with placer.engine(placer.plan("auto")) as engine:       # keep the model loaded
        print(engine.generate("Once upon a time", max_tokens=64).text)

    for row in placer.affinity(phase="decode")[:3]:          # what goes where, and why
        print(row.rank, row.name, row.affinity, row.backend)

Placer, Plan, Profile, Engine and Generation are described below. Errors derive from OallamaError: UsageError,
ModelFileError, DoesNotFit, PlanError, ProfileError, DeviceError, BridgeError and others, all of them in this module too
(help(oallama.errors)).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    # isort: off
    from oallama.core.errors import (
        BridgeError as BridgeError,
        DeviceError as DeviceError,
        DoesNotFit as DoesNotFit,
        DownloadError as DownloadError,
        DraftDoesNotFit as DraftDoesNotFit,
        ModelFileError as ModelFileError,
        OallamaError as OallamaError,
        OutOfTime as OutOfTime,
        PlanError as PlanError,
        ProfileError as ProfileError,
        UnknownDevice as UnknownDevice,
        UsageError as UsageError,
    )

    # isort: on
    from oallama.core.profile import Profile
    from oallama.placer import Placer
    from oallama.plan.plan import Plan
    from oallama.run.answer import Generation
    from oallama.run.engine import Engine

_OF = {
    "Engine": "oallama.run.engine", "Generation": "oallama.run.answer", "Placer": "oallama.placer",
    "Plan": "oallama.plan.plan", "Profile": "oallama.core.profile",
}  # fmt: skip
"""The modules of public names other than errors."""

ERRORS = (
    "BridgeError", "DeviceError", "DoesNotFit", "DownloadError", "DraftDoesNotFit", "ModelFileError", "OallamaError",
    "OutOfTime", "PlanError", "ProfileError", "UnknownDevice", "UsageError",
)  # fmt: skip
"""Also public, but not at the start of help(oallama)."""

__all__ = ["Engine", "Generation", "Placer", "Plan", "Profile", "__version__"]


def __getattr__(name: str) -> Any:
    """Load public names at their first use, so that `import oallama` costs nothing."""
    from importlib import import_module

    errors = import_module("oallama.core.errors")
    if name == "errors" or name in _OF or name in ERRORS:
        return errors if name == "errors" else getattr(import_module(_OF[name]) if name in _OF else errors, name)
    raise AttributeError(f"module 'oallama' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *ERRORS, "errors"})
