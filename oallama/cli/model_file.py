"""MODEL of the command line as the path of a GGUF: a file, a downloaded model, or a model of the hub."""

from __future__ import annotations

import contextlib
import itertools
import os.path
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from oallama.cli.output import busy, log
from oallama.core.errors import DownloadError, UsageError
from oallama.core.units import format_bytes
from oallama.stores.hub_name import HubName, names_the_hub, parse_hub_name

if TYPE_CHECKING:
    from oallama.stores.stored import StoredModel


def is_file(word: str) -> bool:
    """Whether a word names an existing file or ends in .gguf."""
    return word.endswith(".gguf") or os.path.isfile(word)  # noqa: PTH113 - Path.is_file raises where a name is too long


def model_file(model: str) -> str:
    """Return the path of MODEL. A name means a downloaded model, else a model of the hub, which is then downloaded; a
    note says which. Raises UsageError for an unknown model, ModelFileError, DownloadError."""
    if is_file(model) or os.path.exists(model):  # noqa: PTH110 - as in is_file
        return model
    from oallama.stores.find import find_model

    stored = find_model(model)
    if stored is not None:
        log(f"note: {model} is {stored.name} of {stored.store}: {stored.path}")
        return str(stored.path)
    if names_the_hub(model):
        return str(pulled(hub_name(model)).path)
    raise UsageError(unknown_model(model))


def pulled(name: HubName) -> StoredModel:
    """Return a model of the hub, downloaded if needed; if the hub cannot be reached, the downloaded one.
    Raises UsageError, DownloadError."""
    from oallama.stores.find import find_model
    from oallama.stores.hub import download, endpoint, look_up

    try:
        with busy(f"asking {endpoint()}"):
            wanted = look_up(name)
    except DownloadError as error:
        if (stored := find_model(name.model)) is None:
            raise DownloadError(f"{name} is not downloaded: {error}") from None
        log(f"note: using the downloaded {stored.name}: {error}")
        return stored
    files = f", {len(wanted.sizes)} files" if len(wanted.sizes) > 1 else ""
    log(f"{wanted.name}: {format_bytes(wanted.n_bytes)}{files}")
    return download(wanted)


def hub_name(text: str) -> HubName:
    """Parse USER/REPO[:QUANT]. Raises UsageError."""
    try:
        return parse_hub_name(text)
    except ValueError as error:
        raise UsageError(str(error)) from None


#
# suggestions for a model that does not exist
#


FAMILIES = (
    "llama", "mistral", "mixtral", "qwen", "gemma", "phi", "deepseek", "falcon", "granite", "olmo", "starcoder",
    "codellama", "tinyllama", "smollm", "vicuna", "gpt-oss", "command-r", "nemotron",
)  # fmt: skip

MOST_FILES = 5  # that are named
LEAST_LETTERS = 4  # least length of a word that is taken for a model by a file's name
MOST_ENTRIES = 10_000  # of a folder that are looked at

_NAMED_LIKE_A_FILE = re.compile(r"[/\\]|\w[.:]\w|[a-z][-_]?\d|\d[-_]?b\b", re.IGNORECASE)
_OF_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(?::[\w.-]+)?", re.ASCII)
_OF_OLLAMA = re.compile(r"[\w-][\w.-]*(?::[\w.-]+)?", re.ASCII)  # as people write ollama's models
_OF_A_FAMILY = re.compile(rf"(?:{'|'.join(map(re.escape, FAMILIES))})(?:[-_].*)?", re.IGNORECASE)


def looks_like_model(word: str) -> bool:
    """Whether a word is more likely a model than a prompt: a path, a folder, a name with a dot, colon or number, a
    known family, or a prefix of a part of the name of a GGUF file near by."""
    if not word or any(character.isspace() for character in word) or not any(c.isalpha() for c in word):
        return False
    if _NAMED_LIKE_A_FILE.search(word) or _OF_A_FAMILY.fullmatch(word) or os.path.isdir(word):  # noqa: PTH112 - Path.is_dir raises where a name is too long
        return True
    parts = (part for path in _ggufs(word) for part in re.split(r"[-_.]", path.stem.lower()))
    return len(word) >= LEAST_LETTERS and any(part.startswith(word.lower()) for part in parts)


def near_models(word: str) -> tuple[str, ...]:
    """Return GGUF files near by: first those in the folder that the word names or is in, then by similarity of the
    name."""
    named = Path(word)
    near_folders = {named} | ({named.parent} if len(named.parts) > 1 else set())

    def order(path: Path) -> tuple[bool, float, str]:
        return path.parent not in near_folders, -_likeness(named.name.lower(), path.stem.lower()), str(path)

    return tuple(str(path) for path in sorted(_ggufs(word), key=order)[:MOST_FILES])


def unknown_model(word: str) -> str:
    """Return the error for an unknown model: how to get a model, and similar files and downloaded models."""
    from oallama.stores.find import no_such_model, stored_models

    parts = [no_such_model(word)]
    if _OF_THE_HUB.fullmatch(word):
        parts.append(f"-hf {word} downloads it from Hugging Face")
    elif _OF_OLLAMA.fullmatch(word):
        parts.append(f"`-hf USER/REPO` downloads a model from Hugging Face, `ollama pull {word}` from ollama")
    names = {model.name for model in stored_models()[0]}
    if names:
        nearest = sorted(names, key=lambda name: (-_likeness(word.lower(), name.lower()), name))
        parts.append(f"downloaded: {', '.join(nearest[:MOST_FILES])}")
    if files := near_models(word):
        parts.append(f"GGUF files nearby: {', '.join(files)}")
    return "; ".join(parts)


def _likeness(wanted: str, name: str) -> float:
    return (wanted in name) + SequenceMatcher(None, wanted, name).ratio()


def _ggufs(word: str) -> list[Path]:
    """Return the GGUF files in the folder that the word names or is in, in the current one, and in `models`."""
    paths: dict[Path, Path] = {}
    for folder in (Path(word), Path(word).parent, Path(), Path("models")):
        with contextlib.suppress(OSError, ValueError):  # missing, unreadable, or no name of a folder
            for path in itertools.islice(folder.iterdir(), MOST_ENTRIES):
                if path.name.lower().endswith(".gguf") and path.is_file():
                    paths.setdefault(path.resolve(), path)
    return list(paths.values())
