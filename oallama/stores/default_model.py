"""The built-in model, used if no model is given."""

from __future__ import annotations

from pathlib import Path

import oallama
from oallama.core.errors import UsageError

FILE = "oallama-stories-q4_0.gguf"


def default_model() -> str:
    """Return the path of the default model: in `models/` of the checkout, or inside the installed package. Raises
    UsageError if it is missing."""
    package = Path(oallama.__file__).resolve().parent
    for folder in (package.parent / "models", package / "models"):
        if (folder / FILE).is_file():
            return str(folder / FILE)
    raise UsageError(f"the default model, {FILE}, is not installed; name a GGUF file as MODEL")
