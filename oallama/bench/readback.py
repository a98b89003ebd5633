"""Read-back of a loaded arm: where each operator's weight really is, its buffers, and its parameters.

A second, tiny context of the same model decodes one token; the scheduler's callback gets every mul-mat with the buffer
of its weight (weights belong to the model, so they are the same for both contexts). The timed context has no callback,
which would make the scheduler wait after every split.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from oallama.bench.loaded import PLUGIN_PREFIX, LoadedModel, plugins
from oallama.bench.records import LoadReport
from oallama.core.errors import BridgeError
from oallama.core.types import CPU_DEVICE
from oallama.device.load_params import load_bridge
from oallama.device.native_log import native_log
from oallama.device.opening import list_devices

_CONTEXT_TOKENS = 32
_MUL_MATS = ("MUL_MAT", "MUL_MAT_ID")


@dataclass(frozen=True, slots=True)
class SeenGraph:
    """A graph as it ran. weights: name -> (buffer type, its device or "", whether host memory)."""

    weights: dict[str, tuple[str, str, bool]]
    flash_attn: bool


def load_report(loaded: LoadedModel, operators: Collection[str]) -> LoadReport:
    graph = seen_graph(loaded.model, loaded.params, frozenset(operators))
    device_bytes, host_bytes = loaded.held_bytes()
    shares = {name: _share(loaded, name, *where) for name, where in graph.weights.items()}
    by_memory: dict[str, tuple[int, int, int]] = {}
    several = "," in loaded.device
    for row in loaded.buffers():
        name = row.buft if row.in_host_memory else f"device {row.device}" if several else "device"
        total = by_memory.get(name, (0, 0, 0))
        by_memory[name] = (total[0] + row.model, total[1] + row.context, total[2] + row.compute)
    params = loaded.params
    return LoadReport(
        device=loaded.device,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        shares=shares,
        layouts={name: where[0] for name, where in graph.weights.items() if shares[name] < 1},
        buffers=by_memory,
        n_batch=int(params.n_batch),
        n_ubatch=int(params.n_ubatch),
        n_threads=int(params.n_threads),
        flash_attn=graph.flash_attn,
        plugins=plugins(),
        facts=bench_facts(loaded),
        warnings=loaded.warnings,
    )


def seen_graph(model: Any, like: Any, operators: Collection[str]) -> SeenGraph:
    """Decode one token with a small context made like `like` (llama_context_params) and look at its mul-mats."""
    from llama_cpp import llama_cpp as api

    from ggml_bridge.library import library_folder, soname

    ggml = ctypes.CDLL(str(library_folder() / soname("ggml-base")))
    check_tensor_layout(ggml)
    where = buffer_place(ggml)
    weights: dict[str, tuple[str, str, bool]] = {}
    flash_attn = False

    def on_node(node: int, ask: bool, _user_data: int) -> bool:
        nonlocal flash_attn
        tensor = tensor_at(node)
        op = ggml.ggml_op_name(tensor.op).decode()
        if op == "FLASH_ATTN_EXT":
            flash_attn = True
        elif ask and op in _MUL_MATS:
            weight = weight_of(tensor)
            name = weight.name.decode("utf-8", "replace")
            if name in operators and weight.buffer:
                weights[name] = where(weight.buffer)
        return False  # never stop at a node

    params = type(like).from_buffer_copy(like)
    params.n_ctx = params.n_batch = params.n_ubatch = _CONTEXT_TOKENS
    if hasattr(type(like), "moe_cache_size"):
        params.moe_cache_size = 0  # the device may have no room for a second one
    callback = api.ggml_backend_sched_eval_callback(on_node)
    params.cb_eval = callback
    with native_log():
        context = api.llama_init_from_model(model, params)
        if not context:
            return SeenGraph({}, False)  # no room for it: what is where stays unknown, and the caller says so
        token = (api.llama_token * 1)(0)
        if not api.llama_model_has_encoder(model):
            api.llama_decode(context, api.llama_batch_get_one(token, 1))
        api.llama_synchronize(context)
        api.llama_free(context)
    return SeenGraph(weights, flash_attn)


def buffer_place(ggml: Any) -> Callable[[int], tuple[str, str, bool]]:
    """Make a function that returns (buffer type, its device or "", whether host memory) of a ggml_backend_buffer_t."""

    def function(name: str, result: type) -> Any:
        symbol = ggml[name]
        symbol.argtypes, symbol.restype = [ctypes.c_void_p], result
        return symbol

    type_of = function("ggml_backend_buffer_get_type", ctypes.c_void_p)
    name_of = function("ggml_backend_buft_name", ctypes.c_char_p)
    is_host = function("ggml_backend_buft_is_host", ctypes.c_bool)
    device_of = function("ggml_backend_buft_get_device", ctypes.c_void_p)
    device_name = function("ggml_backend_dev_name", ctypes.c_char_p)

    def where(buffer: int) -> tuple[str, str, bool]:
        buft = type_of(buffer)
        device = device_of(buft)
        return name_of(buft).decode(), device_name(device).decode() if device else "", bool(is_host(buft))

    return where


def _share(loaded: LoadedModel, name: str, buft: str, device: str, is_host: bool) -> float:
    """The share of an operator's weight on the device: by its buffer, or of a split operator as it was loaded."""
    if buft.upper().startswith(PLUGIN_PREFIX):
        return loaded.device_share[name]
    return float(not is_host and device not in ("", CPU_DEVICE))


def bench_facts(loaded: LoadedModel) -> dict[str, Any]:
    """llama-bench's fields that only this process knows."""
    from llama_cpp import llama_cpp as api

    description = ctypes.create_string_buffer(256)
    api.llama_model_desc(loaded.model, description, len(description))
    commit, number = llama_build()
    devices = {info.name: info for info in list_devices()}
    used = [devices[name] for name in loaded.device.split(",") if name in devices]
    return {
        "build_commit": commit,
        "build_number": number,
        "cpu_info": devices[CPU_DEVICE].description,
        "gpu_info": ", ".join(info.description for info in used),
        "backends": used[0].backend if used else "CPU",
        "model_type": description.value.decode("utf-8", "replace"),
        "model_size": int(api.llama_model_size(loaded.model)),
        "model_n_params": int(api.llama_model_n_params(loaded.model)),
        "flash_attn": int(loaded.params.flash_attn_type),
    }


def llama_build() -> tuple[str, int]:
    """llama.cpp's commit and build number, as llama-bench prints them; "unknown" and 0 if not reported."""
    from oallama.run.fit import open_common

    load_bridge()
    library = open_common()
    if library is None:
        return "unknown", 0
    commit = ctypes.c_char_p.in_dll(library, "LLAMA_COMMIT").value or b"unknown"
    return commit.decode(), ctypes.c_int.in_dll(library, "LLAMA_BUILD_NUMBER").value


#
# struct ggml_tensor
#


_MAX_DIMS, _MAX_SRC, _MAX_OP_PARAMS, _MAX_NAME = 4, 10, 64, 64


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor of ggml 0.26.0, up to its name; `check_tensor_layout` proves it before it is used."""


GgmlTensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * _MAX_DIMS),
    ("nb", ctypes.c_size_t * _MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * (_MAX_OP_PARAMS // 4)),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(GgmlTensor) * _MAX_SRC),
    ("view_src", ctypes.POINTER(GgmlTensor)),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * _MAX_NAME),
]


def tensor_at(address: int) -> GgmlTensor:
    """The tensor at an address, not copied."""
    tensor: GgmlTensor = ctypes.cast(address, ctypes.POINTER(GgmlTensor)).contents
    return tensor


def weight_of(node: GgmlTensor) -> GgmlTensor:
    """The tensor that a node reads as its first source: of a reshaped or transposed weight, that weight."""
    weight = node.src[0].contents
    while weight.view_src:
        weight = weight.view_src.contents
    root: GgmlTensor = weight
    return root


def check_tensor_layout(ggml: Any) -> None:
    """Prove `GgmlTensor` against tensors that ggml itself makes; BridgeError if the library has another layout.

    ggml: the opened ggml-base library; declares the functions it calls."""

    class InitParams(ctypes.Structure):
        _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

    tensor = ctypes.POINTER(GgmlTensor)
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
        raise BridgeError("this llama.cpp has another tensor layout; run `oallama setup`")
