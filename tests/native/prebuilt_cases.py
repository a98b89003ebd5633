"""A llama.cpp that was built elsewhere, with our plug-in in it or without, through libllama's C interface.

Nothing here knows the llama.cpp that is installed. Of libllama's parameters only the first are named; they are larger
than any version's, and passed in memory, of which the callee reads its part.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from ggml_bridge.child import child_main
from ggml_bridge.library import find_built, find_plugin

EMULATED = """
name Emulated0
description a device with the CPU's values
memory_bytes 1073741824
values real
bytes_per_s 1e11
flops_per_s 1e12
flops_float_per_s 1e12
pinned_bytes_per_s 1e10
pageable_bytes_per_s 1e10
"""


class Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("overrides", ctypes.POINTER(Override)),
        ("n_gpu_layers", ctypes.c_int32),
        ("rest", ctypes.c_char * 1004),
    )


class ContextParams(ctypes.Structure):
    _fields_ = (("n_ctx", ctypes.c_uint32), ("rest", ctypes.c_char * 1020))


class Batch(ctypes.Structure):
    _fields_ = (("n_tokens", ctypes.c_int32), ("rest", ctypes.c_void_p * 6))


def logits(request: dict[str, Any]) -> dict[str, Any]:
    """Logits of the last token of each batch, and the threads that there are behind it.

    folder: of the libraries; model; batches: tokens; plan: the file that the plug-in reads, None: no plug-in.
    """
    folder = Path(request["folder"])
    base, ggml, llama = (opened(folder, name) for name in ("ggml-base", "ggml", "llama"))
    base.ggml_version.restype = ctypes.c_char_p
    ggml.ggml_backend_load_all_from_path(os.fsencode(folder))
    emulated = ctypes.CDLL(str(find_built("ggml-emulated")))
    emulated.emulated_last_error.restype = ctypes.c_char_p
    if emulated.emulated_register(EMULATED.encode()) != 0:
        raise RuntimeError(emulated.emulated_last_error().decode())

    for function in ("ggml_backend_dev_by_name", "ggml_backend_load"):
        getattr(ggml, function).restype = ctypes.c_void_p
    base.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    base.ggml_backend_dev_buffer_type.argtypes = (ctypes.c_void_p,)
    overrides = (Override * 2)()
    if request["plan"] is not None:
        os.environ["OALLAMA_PLAN"] = request["plan"]
        plugin = ctypes.CDLL(str(find_plugin()))
        plugin.oallama_last_error.restype = ctypes.c_char_p
        if ggml.ggml_backend_load(os.fsencode(find_plugin())) is None:
            raise RuntimeError(plugin.oallama_last_error().decode())
        device = ggml.ggml_backend_dev_by_name(b"OALLAMA_Split")
        overrides[0] = Override(b"ffn_(gate|up|down)", base.ggml_backend_dev_buffer_type(device))

    llama.llama_model_default_params.restype = ModelParams
    llama.llama_context_default_params.restype = ContextParams
    llama.llama_model_load_from_file.restype = llama.llama_init_from_model.restype = ctypes.c_void_p
    llama.llama_model_load_from_file.argtypes = (ctypes.c_char_p, ModelParams)
    llama.llama_init_from_model.argtypes = (ctypes.c_void_p, ContextParams)
    llama.llama_batch_get_one.restype = Batch
    llama.llama_decode.argtypes = (ctypes.c_void_p, Batch)
    for function in ("llama_model_get_vocab", "llama_get_logits"):
        getattr(llama, function).restype, getattr(llama, function).argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    llama.llama_vocab_n_tokens.argtypes = (ctypes.c_void_p,)

    model_params = llama.llama_model_default_params()
    model_params.overrides, model_params.n_gpu_layers = overrides, 0
    model = llama.llama_model_load_from_file(os.fsencode(request["model"]), model_params)
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    context_params = llama.llama_context_default_params()
    context_params.n_ctx = 256
    context = llama.llama_init_from_model(model, context_params)
    found: list[list[float]] = []
    threads: list[list[str]] = []
    for tokens in request["batches"]:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")
        found.append(list((ctypes.c_float * n_vocab).from_address(llama.llama_get_logits(context))))
        threads.append(sorted(task.name for task in Path("/proc/self/task").iterdir()))
    stats = taken(request)
    n_graphs = ctypes.c_int64.from_buffer(stats).value if stats else 0
    return {"version": base.ggml_version().decode(), "logits": found, "n_graphs": n_graphs, "threads": threads}


def taken(request: dict[str, Any]) -> ctypes.Array[ctypes.c_char] | None:
    """oallama_stats, of which n_graphs is the first."""
    if request["plan"] is None:
        return None
    stats = (ctypes.c_char * 1024)()
    ctypes.CDLL(str(find_plugin())).oallama_get_stats(stats)
    return stats


def opened(folder: Path, name: str) -> ctypes.CDLL:
    """lib{name}, whatever version is in the name of its file."""
    (path,) = (p for p in folder.glob(f"lib{name}.*so*") if p.name.startswith(f"lib{name}."))
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    child_main(lambda request, progress: logits(request))
