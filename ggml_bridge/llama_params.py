"""The layout of llama.h's parameters in the library that is loaded, proved by what it returns, and llama_cpp's bindings
made to fit it.

llama.cpp tells neither a version of its interface nor the size of its structures, and a structure that is too small is
memory corruption at the first call. llama-cpp-python 0.3.36 knows the llama.h of b11312. By b11549 llama_context_params
had gained one field, `moe_cache_size`, behind `type_v`, and no other structure had changed.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

from ggml_bridge.errors import VersionMismatch

MOE_CACHE_SIZE = "moe_cache_size"
_MOST_BYTES = 4096
_CONTEXT_DEFAULTS = {
    "yarn_ext_factor": -1.0, "yarn_beta_slow": -1.0, "cb_eval_user_data": None, "type_k": 1, "type_v": 1,
    "abort_callback_data": None, "embeddings": False, "offload_kqv": True, "op_offload": True, "n_samplers": 0,
    "ctx_other": None,
}  # fmt: skip
_MODEL_DEFAULTS = {
    "progress_callback_user_data": None, "vocab_only": False, "check_tensors": False, "use_extra_bufts": True,
    "no_host": False, "no_alloc": False,
}  # fmt: skip
"""Defaults that no release has changed since the fields exist: by them a field is known to be where it should be."""


def fit_bindings(api: ModuleType) -> None:
    """Make `llama_cpp.llama_cpp` pass llama_context_params as its library reads them: with `moe_cache_size` where the
    library has that field. Before anything calls the library. Raises VersionMismatch for a layout that is not known."""
    model, context = api.llama_model_params, api.llama_context_params
    if not _agrees(api._lib, "llama_model_default_params", model, _MODEL_DEFAULTS):
        raise VersionMismatch(_unknown(api, "llama_model_params"))
    if _agrees(api._lib, "llama_context_default_params", context, _CONTEXT_DEFAULTS):
        return
    extended = with_moe_cache(context)
    if not _agrees(api._lib, "llama_context_default_params", extended, _CONTEXT_DEFAULTS):
        raise VersionMismatch(_unknown(api, "llama_context_params"))
    api.llama_context_params = extended  # type: ignore[attr-defined]
    api._lib.llama_context_default_params.restype = extended
    for function in (api._lib.llama_init_from_model, api._lib.llama_new_context_with_model):
        function.argtypes = [function.argtypes[0], extended]


def with_moe_cache(context: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """llama_context_params with `moe_cache_size`, bytes of the device for experts that the host keeps; 0: no cache."""
    fields: list[Any] = list(context._fields_)
    behind = [name for name, *_ in fields].index("type_v") + 1
    fields.insert(behind, (MOE_CACHE_SIZE, ctypes.c_size_t))
    return type(context.__name__, (ctypes.Structure,), {"_fields_": fields, "__doc__": context.__doc__})


def _agrees(library: ctypes.CDLL, function: str, structure: type[ctypes.Structure], defaults: dict[str, Any]) -> bool:
    """Whether a function returns a structure of this size with these values."""
    written, size = _written(library, function), ctypes.sizeof(structure)
    if not size - ctypes.alignment(structure) < len(written) <= size:  # padding at the end may stay unwritten
        return False
    found = structure.from_buffer_copy(written.ljust(size, b"\0"))
    return all(getattr(found, name) == value for name, value in defaults.items())


def _written(library: ctypes.CDLL, function: str) -> bytes:
    """The bytes of the structure that a function returns, up to the last that it writes.

    On x86-64 (System V) the caller passes the address of a structure of more than 16 bytes as a first argument. So the
    memory is ours, larger than any structure, and a byte that stays as it was filled was not written.
    """
    found = []
    for fill in (0x5A, 0xA5):
        memory = (ctypes.c_uint8 * _MOST_BYTES)(*([fill] * _MOST_BYTES))
        call = library[function]  # a function object of our own: llama_cpp's are not changed
        call.argtypes, call.restype = [ctypes.c_void_p], ctypes.c_void_p
        call(memory)
        found.append(bytes(memory))
    return found[0][: max((i + 1 for i in range(_MOST_BYTES) if found[0][i] == found[1][i]), default=0)]


def _unknown(api: ModuleType, structure: str) -> str:
    return f"the llama.cpp in {api._lib._name} has an unknown {structure}"
