"""Lists the downloaded models of all stores, and finds the model that a name means."""

from __future__ import annotations

import os.path

from oallama.core.errors import ModelFileError
from oallama.stores.hub_cache import cached_models, find_cached, hub_cache, llama_cache, llama_models
from oallama.stores.hub_name import names_the_hub, parse_hub_name
from oallama.stores.ollama import find_in_ollama, ollama_models, ollama_stores
from oallama.stores.stored import Fault, StoredModel


def stored_models() -> tuple[list[StoredModel], list[Fault]]:
    """List all downloaded models, store by store, and the unusable models of ollama."""
    stored = [*cached_models(hub_cache()), *llama_models(llama_cache())]
    if llama_cache() != hub_cache():
        stored += cached_models(llama_cache())  # later versions of llama.cpp use this layout under LLAMA_CACHE
    faults: list[Fault] = []
    for store in ollama_stores():
        models, broken = ollama_models(store)
        stored += models
        faults += broken
    return stored, faults


def no_such_model(text: str) -> str:
    """Return the error for a text that names no model on this machine."""
    return f"{text} is neither a GGUF file nor a downloaded model"


def model_path(text: str) -> str:
    """Return the path of the model that a text names: a file, a downloaded model, or a model of the hub (hf.co/…),
    downloaded if needed; the path of a missing .gguf file is returned unchanged. Raises ModelFileError, UsageError,
    DownloadError."""
    if os.path.exists(text):  # noqa: PTH110 - Path.exists raises where a name is too long
        return text
    model = find_model(text)
    if model is None and names_the_hub(text):
        from oallama.stores.hub import download, look_up

        model = download(look_up(parse_hub_name(text)))
    if model is None and not text.endswith(".gguf"):
        raise ModelFileError(
            f"{no_such_model(text)}; hf.co/USER/REPO downloads one from Hugging Face, `ollama pull` one from ollama"
        )
    return text if model is None else str(model.path)


def find_model(text: str) -> StoredModel | None:
    """Return the downloaded model of that name: USER/REPO[:QUANT] of Hugging Face (with or without hf.co/), the name of
    a file in llama.cpp's cache, or its name in ollama. None if no model has it.

    Raises ModelFileError for an unusable model of ollama.
    """
    try:
        name = parse_hub_name(text)
    except ValueError:
        pass
    else:
        for cache in dict.fromkeys((hub_cache(), llama_cache())):
            stored = find_cached(name, cache)
            if stored is not None:
                return stored
    for model in llama_models(llama_cache()):
        if model.name == text:
            return model
    for store in ollama_stores():
        stored = find_in_ollama(text, store)
        if stored is not None:
            return stored
    return None
