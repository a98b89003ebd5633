"""llama.cpp's own --fit under a memory cap: `common_fit_params` of libllama-common, the C++ library beneath llama.cpp's
tools, called in a child process.

It keeps a margin of the device free; margin = free - cap makes it plan for the cap. It has no cap on the weights, so
with --gpu-weights it is called with less and less memory until its weights keep to that cap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from oallama.core.codec import from_json
from oallama.core.errors import BridgeError, DeviceError, ModelFileError, UsageError
from oallama.core.types import CPU_DEVICE, Operator, StockOptions
from oallama.core.units import MIB
from oallama.device.child import ask_child
from oallama.device.load_params import (
    BuftOverride,
    LoadSettings,
    ModelParams,
    apply_context,
    apply_draft_context,
    load_bridge,
)
from oallama.device.opening import device_pointers
from oallama.planner.policies.stock_devices import layers_by_share
from oallama.run.stock import Cap, StockPlacement, operator_bytes_on_device

FIT_PARAMS = (
    "_Z17common_fit_paramsPKcP18llama_model_paramsP20llama_context_paramsPfP32llama_model_tensor_buft_overridePm"
    "jPK22common_fit_extra_model14ggml_log_level"
)
"""The C++ function common_fit_params(char const *, llama_model_params *, llama_context_params *, float *,
llama_model_tensor_buft_override *, size_t *, uint32_t, common_fit_extra_model const *, ggml_log_level)."""

TIMEOUT_S = 900.0
MIN_CTX = 4096  # llama.cpp's -fitc; not used, as the context is always given

Fit = Callable[[int], StockPlacement]
"""Bytes that may be used on the device -> --fit's placement."""


@dataclass(frozen=True, slots=True)
class FitCall:
    """One call of --fit: its memory and its result."""

    offered_bytes: int
    n_gpu_layers: int
    n_overrides: int
    operator_bytes: int  # of operators' weights that it puts on the device


def fit_under(
    cap: Cap, operators: Sequence[Operator], settings: LoadSettings
) -> tuple[StockPlacement, tuple[FitCall, ...]]:
    """Return --fit's placement under the cap, and every call that it took.

    Raises ModelFileError, DeviceError if llama.cpp fails on the file or the device, BridgeError if this
    llama.cpp lacks the function.
    """

    def failed(reason: str) -> DeviceError:
        return DeviceError(f"llama.cpp's --fit failed on {settings.path}: {reason}; use another arm or policy")

    request = {"settings": asdict(settings), "cap": asdict(cap), "operators": [asdict(o) for o in operators]}
    answer = ask_child("oallama.run.fit", request, TIMEOUT_S, failed)
    placement = from_json(StockPlacement, answer["placement"], "the placement")
    return placement, tuple(FitCall(**step) for step in answer["steps"])


def shrink_until_fits(
    fit: Fit, cap: Cap, free: int, operators: Sequence[Operator], n_layer: int
) -> tuple[StockPlacement, tuple[FitCall, ...]]:
    """Call `fit` with the cap; if the operators' weights exceed their own cap, search a smaller memory: from the cap on
    weights, doubled until it is too much, then by bisection, down to a third of the smallest layer, as --fit places
    whole layers."""
    steps: list[FitCall] = []

    def call(offered: int) -> tuple[StockPlacement, int]:
        placement = fit(offered)
        used = operator_bytes_on_device(operators, n_layer, placement)
        steps.append(FitCall(offered, placement.n_gpu_layers, len(placement.overrides), used))
        return placement, used

    offered = free if cap.device_bytes is None else min(cap.device_bytes, free)
    placement, used = call(offered)
    if cap.operator_bytes is None or used <= cap.operator_bytes:
        return placement, tuple(steps)
    by_layer: dict[int | None, int] = {}
    for operator in operators:
        by_layer[operator.layer] = by_layer.get(operator.layer, 0) + operator.bytes
    fine_enough = max(min(by_layer.values()) // 3, 1)
    low, high = min(cap.operator_bytes, offered), offered
    best, _ = call(low)
    step = max(low, fine_enough)
    while high - low > fine_enough:
        middle = low + step if low + step < high else (low + high) // 2
        placement, used = call(middle)
        if used <= cap.operator_bytes:
            best, low = placement, middle
        else:
            high = middle
        step *= 2
    return best, tuple(steps)


#
# the child's side
#


def _handle(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    from oallama.device.native_log import native_log
    from oallama.device.opening import open_device
    from oallama.model.gguf_reader import read_gguf
    from oallama.model.hyperparameters import model_info

    settings = from_json(LoadSettings, request["settings"], "the load")
    operators = tuple(from_json(Operator, row, "the operator") for row in request["operators"])
    load_bridge()
    library = open_common()
    if library is None or not hasattr(library, FIT_PARAMS):
        raise BridgeError("this build of llama.cpp has no common_fit_params; use another arm or policy")
    with open_device(settings.device) as device, native_log() as log:
        if device.info is None:
            raise UsageError("stock-fit needs a device; choose one with --device")
        free = [info.memory_free for info in device.infos]
        cap = from_json(Cap, request["cap"], "the cap")
        n_layer = model_info(read_gguf(settings.path)).n_layer

        def fit(offered: int) -> StockPlacement:
            budgets = cap.of_each or (offered,)
            margins = [free_bytes - n_bytes for free_bytes, n_bytes in zip(free, budgets, strict=True)]
            placement = _common_fit(library, settings, device.names, margins, log)
            if len(free) == 1 or placement.device_layers:
                return placement
            # everything fits: llama.cpp would divide layers by free memory, which may differ in another load
            return replace(placement, device_layers=layers_by_share(n_layer + 1, free))

        placement, steps = shrink_until_fits(fit, cap, sum(free), operators, n_layer)
    return {"placement": asdict(placement), "steps": [asdict(step) for step in steps]}


def stock_params(settings: LoadSettings, devices: Sequence[str]) -> tuple[Any, ModelParams]:
    """llama_model_params as llama.cpp's own programs fill them, and what owns the memory that they point to. devices:
    ggml's names of them."""
    from llama_cpp import llama_cpp as api

    owner = ModelParams(settings, device_pointers(devices), load_bridge())
    params = api.llama_model_default_params()
    owner.apply(params)
    return params, owner


def context_params(settings: LoadSettings) -> Any:
    """llama_context_params with defaults for all other fields; no full-size SWA cache, as in llama.cpp's tools."""
    from llama_cpp import llama_cpp as api

    params = api.llama_context_default_params()
    apply_context(settings, params)
    params.swa_full = False
    return params


class ExtraModel(ctypes.Structure):
    """struct common_fit_extra_model: a further context that takes memory, and may share the model's weights."""

    _fields_ = [
        ("path_model", ctypes.c_char_p),
        ("mparams", ctypes.c_void_p),
        ("cparams", ctypes.c_void_p),
        ("shares_model", ctypes.c_bool),
    ]


def open_common() -> ctypes.CDLL | None:
    """The library, or None if this build of llama.cpp has none.

    The bridge must be loaded: what libllama-common is linked with is then found by SONAME, so that it works on the
    same llama and ggml as llama_cpp. A library that brought its own copies is refused (None).
    """
    from llama_cpp import llama_cpp as api

    from ggml_bridge.library import library_folder, soname

    folder = library_folder()
    for place in (folder, folder.parent.parent / "lib"):
        path = place / soname("llama-common")
        if path.is_file():
            with suppress(OSError):
                library = ctypes.CDLL(str(path))
                if _address(library) == _address(api._lib):
                    return library
    return None


def _address(library: ctypes.CDLL) -> int | None:
    """Address of a function of libllama as code in `library` finds it."""
    return ctypes.cast(library["llama_model_default_params"], ctypes.c_void_p).value


def _common_fit(
    library: Any, settings: LoadSettings, devices: Sequence[str], margins: Sequence[int], log: Any
) -> StockPlacement:
    """One call. The structs are llama_cpp's own ctypes; their layout is proven by their defaults coming back right."""
    from llama_cpp import llama_cpp as api

    log_error = 4  # GGML_LOG_LEVEL_ERROR
    options = settings.stock or StockOptions()
    model_params, _owner = stock_params(StockPlacement(-1, options=options).load(settings), devices)
    context = context_params(settings)
    defaults = api.llama_context_default_params()
    if (defaults.n_seq_max, defaults.op_offload, defaults.offload_kqv, model_params.no_alloc) != (1, True, True, False):
        raise BridgeError("this llama.cpp has another parameter layout; run `oallama setup`")
    drafting = api.llama_context_default_params()  # of the model's MTP layer, as llama-server tells --fit of it
    apply_draft_context(settings, drafting, None)
    addresses = (ctypes.addressof(params) for params in (model_params, drafting))
    extra = ExtraModel(settings.path.encode(), *addresses, True)
    n_overrides = api.llama_max_tensor_buft_overrides()
    overrides = (BuftOverride * (n_overrides + 1))()
    split = (ctypes.c_float * api.llama_max_devices())()
    left_free = (ctypes.c_size_t * api.llama_max_devices())(*margins)
    function = library[FIT_PARAMS]
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int,
    ]  # fmt: skip
    status = function(
        settings.path.encode(), ctypes.byref(model_params), ctypes.byref(context), split, overrides, left_free,
        MIN_CTX, ctypes.byref(extra) if settings.n_drafts else None, log_error,
    )  # fmt: skip
    if status == 2:  # COMMON_PARAMS_FIT_STATUS_ERROR
        raise ModelFileError(f"llama.cpp's --fit cannot load {settings.path}: {log.reason() or 'no reason given'}")
    if status != 0:
        raise DeviceError(f"llama.cpp's --fit finds no placement for {settings.path}: {log.reason() or 'no reason'}")
    tensor_devices, names = [], {load_bridge().buft(name): name for name in devices}
    if model_params.tensor_buft_overrides:
        for entry in overrides:
            if not entry.pattern:
                break
            tensor_devices.append((entry.pattern.decode(), names.get(entry.buft, CPU_DEVICE)))
    return StockPlacement(
        n_gpu_layers=int(model_params.n_gpu_layers),
        overrides=tuple(tensor_devices),
        options=options,
        fit_target_mib=max(*margins, 0) // MIB,
        device_layers=tuple(int(n) for n in split[: len(devices)]) if len(devices) > 1 and any(split) else (),
    )


if __name__ == "__main__":
    from ggml_bridge.child import child_main
    from ggml_bridge.library import import_interface_only

    child_main(_handle, import_interface_only)
