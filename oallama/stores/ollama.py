"""ollama's store, read only: manifests/HOST/NAMESPACE/MODEL/TAG names, by digest, a GGUF in blobs/.

Manifests are checked: an invalid digest, a missing or truncated blob, and a file outside of the store are faults of
that model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oallama.core.errors import ModelFileError
from oallama.core.files import user_path
from oallama.stores.stored import Fault, StoredModel, paths_in

STORE = "ollama"
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
MODEL_LAYER = "application/vnd.ollama.image.model"
MAX_MANIFEST_BYTES = 1 << 20

_SERVICE = Path("/usr/share/ollama/.ollama/models")  # folder of the user that ollama's installer creates on Linux
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


def ollama_stores() -> tuple[Path, ...]:
    """Return ollama's model folders: OLLAMA_MODELS, else the user's folder and the service's."""
    named = os.environ.get("OLLAMA_MODELS")
    return (user_path(named),) if named else (user_path("~/.ollama/models"), _SERVICE)


def ollama_models(store: Path) -> tuple[list[StoredModel], list[Fault]]:
    """Return every model of a store, and the unusable ones. Models without a GGUF are in neither."""
    stored, faults = [], []
    for name, manifest in _manifests(store):
        try:
            blob = _blob(store, name, manifest)
        except ModelFileError as error:
            faults.append(Fault(name, str(error)))
            continue
        if blob is not None:
            stored.append(StoredModel(name, STORE, (blob,)))
    return stored, faults


def find_in_ollama(text: str, store: Path) -> StoredModel | None:
    """Return the model of that name, in any case; None if the store has none. Raises ModelFileError for an unusable
    model."""
    wanted = full_name(text).lower()
    for name, manifest in _manifests(store):
        if full_name(name).lower() == wanted:
            blob = _blob(store, name, manifest)
            if blob is None:
                raise ModelFileError(f"{name} of ollama is not a GGUF; pull another model")
            return StoredModel(name, STORE, (blob,))
    return None


def full_name(text: str) -> str:
    """Return a name [HOST/][NAMESPACE/]MODEL[:TAG] with ollama's defaults for missing parts."""
    path = [*(HOST, NAMESPACE)[: max(0, 2 - text.count("/"))], text]
    return "/".join(path) + ("" if ":" in text.rpartition("/")[2] else f":{TAG}")


def _manifests(store: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name as ollama shortens it, manifest)."""
    root = store / "manifests"
    for path in paths_in(root, "*/*/*/*"):
        parts = path.relative_to(root).parts
        if all(_PART.fullmatch(part) for part in parts):
            name = "/".join(parts[:3]).removeprefix(f"{HOST}/").removeprefix(f"{NAMESPACE}/")
            yield f"{name}:{parts[3]}", path


def _blob(store: Path, name: str, manifest: Path) -> Path | None:
    """Return the GGUF in a manifest; None for a model without a GGUF. Raises ModelFileError."""
    again = f"run `ollama pull {name}` again"
    layers = [layer for layer in _layers(store, name, manifest, again) if layer.get("mediaType") == MODEL_LAYER]
    if not layers:
        return None
    if len(layers) > 1:
        raise ModelFileError(f"{name} of ollama is in {len(layers)} blobs, which llama.cpp cannot load")
    digest, size = layers[0].get("digest"), layers[0].get("size")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ModelFileError(f"{manifest}: the digest of {name} is invalid; {again}")
    blobs = (store / "blobs" / f"sha256{sign}{match[1]}" for sign in "-:")  # the second: old stores
    blob = next((blob for blob in blobs if _inside(store, blob)), None)
    if blob is None:
        raise ModelFileError(
            f"the blob sha256-{match[1]} of {name} is missing from {store}, or not a file in it; {again}"
        )
    if blob.stat().st_size != size:
        raise ModelFileError(f"{blob}: the blob of {name} has another size than its manifest says; {again}")
    return blob


def _layers(store: Path, name: str, manifest: Path, again: str) -> list[dict[str, Any]]:
    if not _inside(store, manifest):
        raise ModelFileError(f"{manifest}: the manifest of {name} is not a file in the store; {again}")
    try:
        with manifest.open("rb") as file:
            document = json.loads(file.read(MAX_MANIFEST_BYTES + 1))
        layers = document["layers"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ModelFileError(f"{manifest}: the manifest of {name} is broken; {again}") from None
    except OSError as error:
        raise ModelFileError(f"{manifest}: {error.strerror or error}") from None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ModelFileError(f"{manifest}: the manifest of {name} is broken; {again}")
    return layers


def _inside(store: Path, path: Path) -> bool:
    """Whether a path, after following links, is a regular file in the store."""
    try:
        return path.is_file() and path.resolve().is_relative_to(store.resolve())
    except OSError:
        return False
