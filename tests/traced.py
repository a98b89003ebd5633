"""The operations of a real decode, read off llama.cpp's graph. `cb_eval` of the context shows every node twice: before
it is computed, when it is asked whether it wants the result, and after that."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oallama.bench.readback import check_tensor_layout, tensor_at


@contextlib.contextmanager
def traced(
    path: str | Path, on_node: Callable[[str, Any, bool], bool], n_ctx: int = 256, **fields: Any
) -> Iterator[Any]:
    """A llama_context on the CPU alone. on_node: gets the operation's name, the node (bench/readback.py) and whether it
    is only asked; returns whether it wants the result, or else whether computing may go on. fields: of
    llama_context_params. Raises ValueError where llama.cpp refuses the model."""
    import ggml_bridge
    from ggml_bridge.library import library_folder, soname
    from oallama.device.native_log import native_log

    api = ggml_bridge.load().libraries.llama_cpp.llama_cpp
    ggml = ctypes.CDLL(str(library_folder() / soname("ggml-base")))  # the file that libllama is linked with
    check_tensor_layout(ggml)
    ggml.ggml_op_desc.restype, ggml.ggml_op_desc.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

    def shown(node: int, ask: bool, _user_data: int) -> bool:
        return on_node(ggml.ggml_op_desc(node).decode(), tensor_at(node), ask)

    with native_log() as log:
        no_devices = (ctypes.c_void_p * 1)(None)
        model_params = api.llama_model_default_params()
        model_params.devices, model_params.n_gpu_layers = ctypes.cast(no_devices, ctypes.c_void_p), 0
        model_params.use_extra_bufts = False  # names and order are the same without repacking the weights
        model = api.llama_model_load_from_file(str(path).encode(), model_params)
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = n_ctx
        params.n_threads = params.n_threads_batch = 1
        params.offload_kqv = params.op_offload = False
        for name, value in fields.items():
            setattr(params, name, value)
        params.cb_eval = callback = api.ggml_backend_sched_eval_callback(shown)
        context = api.llama_init_from_model(model, params) if model else None
        if not context:
            raise ValueError(f"{path} cannot be loaded: {log.reason() or 'no reason given'}")
        try:
            yield context
        finally:
            api.llama_free(context)
            api.llama_model_free(model)
            del callback  # it has lived so long


def decode(context: Any, tokens: list[int]) -> None:
    """Decode the tokens behind those that were; an encoder encodes them first."""
    from llama_cpp import llama_cpp as api

    kept = (api.llama_token * len(tokens))(*tokens)  # the batch points to it
    batch = api.llama_batch_get_one(kept, len(tokens))
    model = api.llama_get_model(context)
    if api.llama_model_has_encoder(model) and api.llama_encode(context, batch):
        raise ValueError("llama.cpp refuses to encode a token")
    if api.llama_model_has_decoder(model) and api.llama_decode(context, batch):
        raise ValueError("llama.cpp refuses to decode a token")
