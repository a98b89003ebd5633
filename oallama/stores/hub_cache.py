"""Hugging Face's cache: models--USER--REPO/snapshots/COMMIT/FILE, as huggingface_hub and llama.cpp write it; and
llama.cpp's own cache, a folder of GGUF files called USER_REPO_FILE."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.core.files import user_path
from oallama.stores.hub_name import HubName, choose, models, parse_hub_name, quant_of
from oallama.stores.stored import StoredModel, paths_in

STORE, LLAMA_STORE = "Hugging Face", "llama.cpp"

_FOLDER = "models--"


def hub_cache() -> Path:
    """Return huggingface_hub's cache folder."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return user_path(os.path.expandvars(os.environ[variable]))
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return user_path(os.path.expandvars(home)) / "hub"


def cached_models(cache: Path) -> list[StoredModel]:
    """Return every complete model in a cache, by name. Of several commits the current one (refs/main) counts, then the
    newest."""
    return [
        StoredModel(str(HubName(repo, quant_of(files[0].name))), STORE, files)
        for repo, folder in sorted(_repositories(cache))
        for files in _whole(folder).values()
    ]


def find_cached(name: HubName, cache: Path) -> StoredModel | None:
    """Return the model that a name means among the downloaded ones of its repository; None if no model matches."""
    for repo, folder in _repositories(cache):
        if repo.lower() == name.repo.lower():
            whole = _whole(folder)
            with contextlib.suppress(UsageError):  # the repository has other models
                chosen = choose(name, [file for parts in whole for file in parts])
                return StoredModel(str(HubName(repo, quant_of(chosen[0]))), STORE, whole[chosen])
    return None


def _repositories(cache: Path) -> Iterator[tuple[str, Path]]:
    """Yield (USER/REPO, its folder)."""
    for folder in paths_in(cache, f"{_FOLDER}*"):
        repo = folder.name.removeprefix(_FOLDER).replace("--", "/")
        with contextlib.suppress(ValueError):
            parse_hub_name(repo)
            yield repo, folder


def _whole(folder: Path) -> dict[tuple[str, ...], tuple[Path, ...]]:
    """Return a repository's complete models by their files' names there."""
    current = ""
    main = folder / "refs" / "main"
    with contextlib.suppress(OSError, ValueError):
        current = main.read_text(encoding="utf-8").strip() if main.is_file() else ""  # reading a pipe would block
    snapshots = []
    for snapshot in paths_in(folder, "snapshots/*"):
        with contextlib.suppress(OSError):  # a dangling link, or removed meanwhile
            snapshots.append((snapshot.name != current, -snapshot.stat().st_mtime, snapshot))
    complete_models: dict[tuple[str, ...], tuple[Path, ...]] = {}
    for *_, snapshot in sorted(snapshots):
        for parts in models(_files(snapshot, "**/*")):
            complete_models.setdefault(parts, tuple(snapshot / part for part in parts))
    return complete_models


def _files(folder: Path, pattern: str) -> list[str]:
    """Return the names in a folder that match, of files that can be looked at."""
    files = (path for path in paths_in(folder, pattern) if os.path.isfile(path))  # noqa: PTH113 - Path.is_file raises
    return [path.relative_to(folder).as_posix() for path in files]


#
# llama.cpp's own cache
#


def llama_cache() -> Path:
    """Return llama.cpp's download folder."""
    if os.environ.get("LLAMA_CACHE"):
        return user_path(os.environ["LLAMA_CACHE"])
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llama.cpp"


def llama_models(cache: Path) -> list[StoredModel]:
    """Return every complete model in that folder, by its file's name without the ending."""
    found = models(_files(cache, "*"))
    return [StoredModel(parts[0][:-5], LLAMA_STORE, tuple(cache / part for part in parts)) for parts in found]
