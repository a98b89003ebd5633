"""Record of a model in a store: names, files, and the facts that `oallama list` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oallama.core.errors import ModelFileError
from oallama.model.gguf_file import GgufFile
from oallama.model.gguf_header import read_header


@dataclass(frozen=True, slots=True)
class StoredModel:
    """name: usable as MODEL. store: the program that downloaded it. files: the GGUF, or its parts in order."""

    name: str
    store: str
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The file to load: the first part."""
        return self.files[0]

    @property
    def n_bytes(self) -> int:
        """Raises OSError."""
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True)
class Fault:
    """An unusable model of a store, and why, as a sentence."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model of a store, its bytes, and its quantisation."""

    model: StoredModel
    n_bytes: int
    quantisation: str


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """Return the paths in a folder that match, in order; none if it is missing, unreadable or nested too deeply."""
    try:
        return sorted(folder.glob(pattern))
    except (OSError, RecursionError):
        return []


def described(models: Iterable[StoredModel], faults: Iterable[Fault]) -> tuple[list[DescribedModel], list[Fault]]:
    """Return the models with facts from their headers, and all faults, including those of headers."""
    described_models, all_faults = [], list(faults)
    for model in models:
        try:
            described_models.append(DescribedModel(model, model.n_bytes, quantisation(model.path)))
        except ModelFileError as error:
            all_faults.append(Fault(model.name, str(error)))
        except OSError as error:  # gone meanwhile
            all_faults.append(Fault(model.name, f"{model.path}: {error.strerror or error}"))
    return described_models, all_faults


def quantisation(path: Path) -> str:
    """Quantisation that the header states (general.file_type), else the type of most of its bytes. Raises
    ModelFileError."""
    gguf = read_header(str(path))
    return _named(gguf) or _of_most_bytes(gguf)


def _named(gguf: GgufFile) -> str:
    from gguf import LlamaFileType

    number = gguf.metadata.get("general.file_type")
    try:
        name: str = LlamaFileType(number).name
    except ValueError:  # missing, a later one, or no number
        return ""
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _of_most_bytes(gguf: GgufFile) -> str:
    n_bytes: Counter[str] = Counter()
    for tensor in gguf.tensors:
        n_bytes[tensor.type] += tensor.n_bytes
    if not n_bytes:
        raise ModelFileError(f"{gguf.path}: no tensors")
    return n_bytes.most_common(1)[0][0]
