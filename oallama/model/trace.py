"""The operators a real decode runs, read off llama.cpp's graph: the truth that operators.py must agree with.

`cb_eval` of the context shows every node before it is computed (DESIGN 2.12). The decode happens in a child process
(`python -m oallama.model.trace MODEL` prints JSON), because llama.cpp aborts on some files that no check foresees.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from oallama.core.errors import BridgeError, ModelFileError
from oallama.core.types import Shape
from oallama.model.gguf_reader import read_gguf

_MAX_DIMS, _MAX_SRC, _MAX_OP_PARAMS, _MAX_NAME = 4, 10, 64, 64
_MUL_MATS = ("MUL_MAT", "MUL_MAT_ID")


@dataclass(frozen=True, slots=True)
class TracedOperator:
    """A mul-mat node of the graph: the weight it reads, ggml's name of the op, the weight's [K, N, E]."""

    name: str
    op: str
    shape: Shape


class _Tensor(ctypes.Structure):
    """struct ggml_tensor of ggml 0.25.3, up to its name; `_check_layout` proves it before it is used."""


_Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * _MAX_DIMS),
    ("nb", ctypes.c_size_t * _MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * (_MAX_OP_PARAMS // 4)),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(_Tensor) * _MAX_SRC),
    ("view_src", ctypes.POINTER(_Tensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * _MAX_NAME),
]


def trace_operators(path: str, timeout_s: float = 600.0) -> tuple[TracedOperator, ...]:
    """Every weight-bearing mul-mat of a one-token decode of the model at `path` on the CPU, in graph order.

    Raises ModelFileError if the file is no good, or kills, stalls or is refused by llama.cpp.
    """
    path = read_gguf(path).path
    command = [sys.executable, "-m", "oallama.model.trace", path]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ModelFileError(
            f"{path}: llama.cpp did not decode a token within {timeout_s:.0f} s; try a smaller model"
        ) from None
    if child.returncode == 0:
        return tuple(TracedOperator(r["name"], r["op"], tuple(r["shape"])) for r in json.loads(child.stdout))
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else "it said nothing"
    if child.returncode < 0:
        how = f"llama.cpp was killed by {signal.Signals(-child.returncode).name} while running it"
    else:
        how = "llama.cpp cannot run it"
    raise ModelFileError(f"{path}: {how} ({reason}); convert the model again, or use another file")


def _check_layout(ggml: Any) -> None:
    """Prove `_Tensor` against tensors that ggml itself makes; BridgeError if the library has another layout."""

    class InitParams(ctypes.Structure):
        _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

    tensor = ctypes.POINTER(_Tensor)
    for function, result, *arguments in (
        (ggml.ggml_init, ctypes.c_void_p, InitParams),
        (ggml.ggml_free, None, ctypes.c_void_p),
        (ggml.ggml_new_tensor_2d, tensor, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        (ggml.ggml_mul_mat, tensor, ctypes.c_void_p, tensor, tensor),
        (ggml.ggml_view_1d, tensor, ctypes.c_void_p, tensor, ctypes.c_int64, ctypes.c_size_t),
        (ggml.ggml_set_name, tensor, tensor, ctypes.c_char_p),
        (ggml.ggml_op_name, ctypes.c_char_p, ctypes.c_int),
    ):
        function.restype, function.argtypes = result, arguments
    context = ggml.ggml_init(InitParams(1 << 20, None, True))
    a = ggml.ggml_new_tensor_2d(context, 0, 8, 3)
    b = ggml.ggml_new_tensor_2d(context, 0, 8, 5)
    ggml.ggml_set_name(a, b"weight")
    product = ggml.ggml_mul_mat(context, a, b).contents
    view = ggml.ggml_view_1d(context, a, 4, 0).contents

    def address(pointer: Any) -> int | None:
        return ctypes.cast(pointer, ctypes.c_void_p).value

    agrees = (
        tuple(product.ne) == (3, 5, 1, 1)
        and ggml.ggml_op_name(product.op) == b"MUL_MAT"
        and (address(product.src[0]), address(product.src[1])) == (address(a), address(b))
        and address(view.view_src) == address(a)
        and a.contents.name == b"weight"
    )
    ggml.ggml_free(context)
    if not agrees:
        raise BridgeError("this llama.cpp lays its tensors out differently; install llama-cpp-python==0.3.36")


def _decode_traced(path: str) -> list[TracedOperator]:
    """Decode one token on the CPU and note every mul-mat that reads a weight. Runs in the child."""
    import llama_cpp
    from llama_cpp.llama_cpp import _lib as ggml  # a handle on libllama reaches the ggml libraries it is linked with

    _check_layout(ggml)
    weights = frozenset(tensor.name for tensor in read_gguf(path).tensors)
    traced: list[TracedOperator] = []

    def on_node(node: int, ask: bool, user_data: int) -> bool:
        tensor = ctypes.cast(node, ctypes.POINTER(_Tensor)).contents
        op = ggml.ggml_op_name(tensor.op).decode()
        if ask and op in _MUL_MATS:
            weight = tensor.src[0].contents
            while weight.view_src:  # a reshaped or transposed weight still reads that weight
                weight = weight.view_src.contents
            name = weight.name.decode("ascii", "replace")
            if name in weights:
                traced.append(TracedOperator(name, op, (weight.ne[0], weight.ne[1], weight.ne[2])))
        return False  # never stop at a node

    def on_log(level: int, text: bytes, user_data: int) -> None:
        if level >= 4:  # errors and their continuations
            sys.stderr.write(text.decode("utf-8", "replace"))

    log_callback = llama_cpp.llama_log_callback(on_log)
    llama_cpp.llama_log_set(log_callback, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False  # names and order are the same without repacking the weights
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    if not model:
        raise SystemExit("llama.cpp refuses the file")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 32, 32, 32
    params.n_threads = params.n_threads_batch = 1
    params.offload_kqv, params.op_offload = False, False
    params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(on_node)
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp cannot make a context for it")
    batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(0), 1)
    if llama_cpp.llama_model_has_encoder(model) and llama_cpp.llama_encode(context, batch):
        raise SystemExit("llama.cpp cannot encode a token")
    if llama_cpp.llama_model_has_decoder(model) and llama_cpp.llama_decode(context, batch):
        raise SystemExit("llama.cpp cannot decode a token")
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return traced


if __name__ == "__main__":
    print(json.dumps([asdict(operator) for operator in _decode_traced(sys.argv[1])]))
