"""llama.cpp's own cache: GGUF files side by side, called USER_REPO_FILE (later versions use Hugging Face's)."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from oallama.stores.hub_cache import MAX_ENTRIES
from oallama.stores.hub_name import models
from oallama.stores.stored import StoredModel

STORE = "llama.cpp"


def llama_cache() -> Path:
    """Where llama.cpp keeps what it downloads."""
    if os.environ.get("LLAMA_CACHE"):
        return Path(os.environ["LLAMA_CACHE"]).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llama.cpp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama.cpp"


def llama_models(cache: Path) -> list[StoredModel]:
    """Every whole model in that folder, by its file's name without the ending."""
    try:
        names = [path.name for path in itertools.islice(cache.iterdir(), MAX_ENTRIES) if path.is_file()]
    except OSError:  # not there, or not ours to read
        return []
    return [StoredModel(parts[0][:-5], STORE, tuple(cache / part for part in parts)) for parts in models(names)]
