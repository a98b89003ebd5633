"""Names of models on the Hugging Face hub, and the files of a repository that a name means. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from oallama.core.errors import UsageError

HOSTS = ("hf.co", "huggingface.co")
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
"""Preferred QUANTs for a name without one, in order; without any of them, the first model is taken (llama.cpp's
find_best_model)."""

_ACCESSORIES = ("mmproj", "imatrix", "mtp-")  # in names of GGUF files that are no models (llama.cpp)
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?::({_WORD}))?")
_HOST = re.compile(rf"(?:https?://)?(?:{'|'.join(map(re.escape, HOSTS))})/", re.IGNORECASE)
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_QUANT = re.compile(r"[-.]([A-Z0-9_]+)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """A name USER/REPO[:QUANT]. quant "": not named."""

    repo: str
    quant: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.quant}" if self.quant else self.repo

    @property
    def model(self) -> str:
        """The name as a MODEL of the command line."""
        return f"{HOSTS[0]}/{self}"


def parse_hub_name(text: str) -> HubName:
    """Parse `USER/REPO[:QUANT]`, with or without hf.co/ before it. Raises ValueError."""
    match = _NAME.fullmatch(_HOST.sub("", text.strip(), count=1))
    if match is None or "--" in match[1] or ".." in match[1]:  # which the hub does not allow
        raise ValueError(f"{text!r} is not a hub model; write USER/REPO or USER/REPO:Q4_K_M")
    return HubName(match[1], match[2] or "")


def names_the_hub(text: str) -> bool:
    """Whether a MODEL explicitly names the hub: hf.co/…"""
    return _HOST.match(text) is not None


def quant_of(file: str) -> str:
    """Return the quantisation at the end of a file's name, in capitals; "" without one."""
    part = _PART.fullmatch(file)
    match = _QUANT.search(part[1] if part else file.removesuffix(".gguf"))
    return match[1].upper() if match else ""


def models(files: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the models among a repository's files, in order: each as its file, or all of its parts. Skips models that
    lack a part, and names that lead out of the repository or have unprintable characters."""
    names = {file for file in files if _is_model(file)}
    file_groups: list[tuple[str, ...]] = []
    for name in sorted(names):
        part = _PART.fullmatch(name)
        if part is None:
            file_groups.append((name,))
        elif int(part[2]) == 1 and int(part[3]) <= len(names):
            parts = tuple(f"{part[1]}-{i:05d}-of-{part[3]}{part[4]}" for i in range(1, int(part[3]) + 1))
            if parts and names.issuperset(parts):
                file_groups.append(parts)
    return file_groups


def choose(name: HubName, files: Iterable[str]) -> tuple[str, ...]:
    """Return the files of the model that a name means, by llama.cpp's rule: the first whose path has QUANT before a dot
    or a dash, in any case. Raises UsageError if no model matches."""
    candidates = models(files)
    if not candidates:
        raise UsageError(f"{name.repo} has no GGUF model; name a repository with one, e.g. one that ends in -GGUF")
    for quant in [name.quant] if name.quant else DEFAULT_QUANTS:
        pattern = re.compile(rf"{re.escape(quant)}[.-]", re.IGNORECASE)
        for model in candidates:
            if pattern.search(model[0]):
                return model
    if not name.quant:
        return candidates[0]
    quants = ", ".join(dict.fromkeys(filter(None, (quant_of(model[0]) for model in candidates)))) or "the default"
    raise UsageError(f"{name.repo} has no {name.quant}; choose from {quants}")


def _is_model(file: str) -> bool:
    path = PurePosixPath(file)
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in file and "\0" not in file
    is_gguf = path.name.lower().endswith(".gguf")
    return inside and is_gguf and file.isprintable() and not any(word in path.name for word in _ACCESSORIES)
