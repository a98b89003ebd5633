"""Hugging Face's cache: models--USER--REPO/snapshots/COMMIT/FILE, as huggingface_hub and llama.cpp write it; and
llama.cpp's own cache, a folder of GGUF files called USER_REPO_FILE."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from oallama.core.errors import UsageError
from oallama.core.files import user_path
from oallama.stores.hub_name import HubName, choose, models, parse_hub_name, quant_of
from oallama.stores.stored import StoredModel

STORE, LLAMA_STORE = "Hugging Face", "llama.cpp"
MAX_ENTRIES = 100_000  # most entries of the cache that are read
MAX_REF_BYTES = 100  # of a file in refs, which contains a commit's hash

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
        for repo, snapshots in sorted(_repositories(cache))
        for files in _whole(snapshots).values()
    ]


def find_cached(name: HubName, cache: Path) -> StoredModel | None:
    """Return the model that a name means among the downloaded ones of its repository; None if no model matches."""
    for repo, snapshots in _repositories(cache):
        if repo.lower() == name.repo.lower():
            whole = _whole(snapshots)
            with contextlib.suppress(UsageError):  # the repository has other models
                chosen = choose(name, [file for parts in whole for file in parts])
                return StoredModel(str(HubName(repo, quant_of(chosen[0]))), STORE, whole[chosen])
    return None


def _repositories(cache: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield (USER/REPO, its snapshots, the current one first)."""
    for folder in _entries(cache):
        repo = folder.name.removeprefix(_FOLDER).replace("--", "/")
        if not folder.name.startswith(_FOLDER):
            continue
        with contextlib.suppress(OSError, ValueError):
            parse_hub_name(repo)
            newest_first = sorted(_entries(folder / "snapshots"), key=lambda snapshot: -snapshot.stat().st_mtime)
            current = _current(folder)
            yield repo, sorted(newest_first, key=lambda snapshot: snapshot.name != current)


def _current(folder: Path) -> str:
    file = folder / "refs" / "main"
    try:
        if not file.is_file():  # reading a pipe would block
            return ""
        with file.open("rb") as opened:
            return opened.read(MAX_REF_BYTES).decode().strip()
    except (OSError, ValueError):
        return ""


def _whole(snapshots: list[Path]) -> dict[tuple[str, ...], tuple[Path, ...]]:
    """Return complete models by their files' names in the repository."""
    complete_models: dict[tuple[str, ...], tuple[Path, ...]] = {}
    for snapshot in snapshots:
        names = [path.relative_to(snapshot).as_posix() for path in _ggufs(snapshot)]
        for parts in models(names):
            complete_models.setdefault(parts, tuple(snapshot / part for part in parts))
    return complete_models


def _ggufs(folder: Path) -> Iterator[Path]:
    """Yield the GGUF files in a folder and its subfolders, without following links to folders."""
    n_left, folders = MAX_ENTRIES, [folder]  # Path.rglob recurses
    while folders and n_left > 0:
        for path in _entries(folders.pop()):
            n_left -= 1
            with contextlib.suppress(OSError):  # its path is too long, or not ours to look at
                if path.is_dir() and not path.is_symlink():
                    folders.append(path)
                elif path.name.lower().endswith(".gguf") and path.is_file():
                    yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return list(itertools.islice(folder.iterdir(), MAX_ENTRIES))
    except OSError:  # not there, or not ours to read
        return []


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
    try:
        names = [path.name for path in itertools.islice(cache.iterdir(), MAX_ENTRIES) if path.is_file()]
    except OSError:  # not there, or not ours to read
        return []
    return [StoredModel(parts[0][:-5], LLAMA_STORE, tuple(cache / part for part in parts)) for parts in models(names)]
