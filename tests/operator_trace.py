"""The operators a real decode runs, read off llama.cpp's graph: what oallama/model/operators.py must agree with.

`cb_eval` of the context shows every node before it is computed. The decode happens in a child process,
because llama.cpp aborts on some files that no check foresees.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oallama.bench.readback import check_tensor_layout, tensor_at, weight_of
from oallama.core.types import Shape
from oallama.model.gguf_reader import read_gguf

Traced = tuple[str, str, Shape]
"""A mul-mat of the graph: the weight it reads, ggml's name of the op, the weight's [K, N, E]."""


@contextlib.contextmanager
def tracing() -> Iterator[Callable[[Path], list[Traced]]]:
    """Give a function that lists the mul-mats of a one-token decode on the CPU that read a weight, in graph order. One
    child process decodes all models, of which none may kill llama.cpp."""
    from ggml_bridge.child import Child

    child = Child("operator_trace", {"PYTHONPATH": str(Path(__file__).parent)})

    def trace(path: Path) -> list[Traced]:
        rows = child.ask({"path": str(path)}, timeout_s=600.0)["operators"]
        return [(name, op, tuple(shape)) for name, op, shape in rows]

    try:
        yield trace
    finally:
        child.end()


def _decode_traced(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    """The child's side. ValueError where llama.cpp refuses."""
    from llama_cpp import llama_cpp as api

    from ggml_bridge.library import check_installed_version, library_folder, soname
    from oallama.device.native_log import native_log

    check_installed_version()
    ggml = ctypes.CDLL(str(library_folder() / soname("ggml-base")))  # the file that libllama is linked with
    check_tensor_layout(ggml)
    path = str(request["path"])
    weights = frozenset(tensor.name for tensor in read_gguf(path).tensors)
    traced: list[Traced] = []

    def on_node(node: int, ask: bool, _user_data: int) -> bool:
        tensor = tensor_at(node)
        op = ggml.ggml_op_name(tensor.op).decode()
        if ask and op in ("MUL_MAT", "MUL_MAT_ID"):
            weight = weight_of(tensor)
            name = weight.name.decode("ascii", "replace")
            if name in weights:
                traced.append((name, op, (weight.ne[0], weight.ne[1], weight.ne[2])))
        return False  # never stop at a node

    with native_log() as log:

        def accepted(value: Any) -> Any:
            if not value:
                raise ValueError(f"llama.cpp refuses to decode {path}: {log.reason() or 'no reason given'}")
            return value

        no_devices = (ctypes.c_void_p * 1)(None)
        model_params = api.llama_model_default_params()
        model_params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = False  # names and order are the same without repacking the weights
        model = accepted(api.llama_model_load_from_file(path.encode(), model_params))
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 32
        params.n_threads = params.n_threads_batch = 1
        params.offload_kqv = params.op_offload = False
        params.cb_eval = api.ggml_backend_sched_eval_callback(on_node)
        context = accepted(api.llama_init_from_model(model, params))
        token = (api.llama_token * 1)(0)  # the batch points to it
        batch = api.llama_batch_get_one(token, 1)
        if api.llama_model_has_encoder(model):
            accepted(api.llama_encode(context, batch) == 0)
        if api.llama_model_has_decoder(model):
            accepted(api.llama_decode(context, batch) == 0)
        api.llama_free(context)
        api.llama_model_free(model)
    return {"operators": traced}


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    child_main(_decode_traced)
