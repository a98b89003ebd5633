"""The device step: what copies, computing and both at once take on the device, and what slices and pinned memory cost.
ggml's public functions and the bridge's timers only, so it runs on any device that ggml has."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

REPEATS = 5
SLICE_SHARES = (1.0, 0.5, 0.25, 0.125, 0.03125)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The few functions of libggml that are needed, with their types."""

    def __init__(self, folder: Path) -> None:
        from ggml_bridge.library import soname

        self._libraries = [ctypes.CDLL(str(folder / soname(name))) for name in ("ggml-base", "ggml")]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in (
            ("ggml_init", pointer, (_InitParams,)),
            ("ggml_free", None, (pointer,)),
            ("ggml_new_tensor_2d", pointer, (pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)),
            ("ggml_mul_mat", pointer, (pointer, pointer, pointer)),
            ("ggml_new_graph", pointer, (pointer,)),
            ("ggml_build_forward_expand", None, (pointer, pointer)),
            ("ggml_backend_dev_init", pointer, (pointer, ctypes.c_char_p)),
            ("ggml_backend_free", None, (pointer,)),
            ("ggml_backend_buft_alloc_buffer", pointer, (pointer, size)),
            ("ggml_backend_buffer_get_base", pointer, (pointer,)),
            ("ggml_backend_buffer_free", None, (pointer,)),
            ("ggml_backend_alloc_ctx_tensors_from_buft", pointer, (pointer, pointer)),
            ("ggml_backend_tensor_set_async", None, (pointer, pointer, pointer, size, size)),
            ("ggml_backend_tensor_get_async", None, (pointer, pointer, pointer, size, size)),
            ("ggml_backend_graph_compute_async", ctypes.c_int, (pointer, pointer)),
            ("ggml_backend_synchronize", None, (pointer,)),
        ):
            function = self._find(name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise SystemExit(f"this ggml has no {name}")

    def __getattr__(self, name: str) -> Any:  # set in __init__
        raise AttributeError(name)


def median_of(run: Callable[[], None]) -> dict[str, Any]:
    """Median and samples of REPEATS runs after one more."""
    run()
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return {"seconds": statistics.median(samples), "samples": samples}


def overlap(
    bridge: Any, device: str, ffn: tuple[int, int], n_bytes: int, n_tokens: int, pinned: bool
) -> dict[str, Any]:
    """A copy to the device on one stream, mul-mats on another, each alone and both at once, the graph repeated until it
    takes about as long as the copy. hidden: the share of the shorter one that the other covered; 1: it cost nothing."""
    ggml = Ggml(bridge.libraries.folder)
    handle = bridge.device_ptr(device)
    host_buft = bridge.host_buft(device) if pinned else bridge.layout_buft("CPU")
    if not host_buft:
        return {"what": "overlap", "pinned": pinned, "missing": "this device has no pinned host memory"}
    copier, computer = ggml.ggml_backend_dev_init(handle, None), ggml.ggml_backend_dev_init(handle, None)
    context = ggml.ggml_init(_InitParams(1 << 20, None, True))
    k, n = ffn
    f16, f32 = (bridge.type_info(name).number for name in ("F16", "F32"))
    weight = ggml.ggml_new_tensor_2d(context, f16, k, n)
    values = ggml.ggml_new_tensor_2d(context, f32, k, n_tokens)
    target = ggml.ggml_new_tensor_2d(context, f16, 1024, max(1, n_bytes // 2048))
    graph = ggml.ggml_new_graph(context)
    product = ggml.ggml_mul_mat(context, weight, values)
    ggml.ggml_build_forward_expand(graph, product)
    there = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, bridge.device_buft(device))
    source = ggml.ggml_backend_buft_alloc_buffer(host_buft, n_bytes)
    if not there or not source:
        raise SystemExit(f"{device} has no room for {n_bytes} bytes")
    base = ggml.ggml_backend_buffer_get_base(source)
    ctypes.memset(base, 1, n_bytes)  # its pages are there before anything is timed

    def copy() -> None:
        ggml.ggml_backend_tensor_set_async(copier, target, base, 0, n_bytes)

    def compute() -> None:
        for _ in range(repeats):
            ggml.ggml_backend_graph_compute_async(computer, graph)

    answer = (ctypes.c_char * 8)()

    def timed(*starts: Callable[[], None]) -> dict[str, Any]:
        """Until the last byte of what was started is read back: over RPC only an answer proves that it was done."""

        def run() -> None:
            for start in starts:
                start()
            for start in starts:
                backend, tensor = (copier, target) if start is copy else (computer, product)
                ggml.ggml_backend_tensor_get_async(backend, tensor, ctypes.addressof(answer), 0, 4)
                ggml.ggml_backend_synchronize(backend)

        return median_of(run)

    try:
        repeats = 8
        copied, some = timed(copy), timed(compute)
        repeats = max(1, min(4000, round(8 * copied["seconds"] / max(some["seconds"], 1e-9))))
        computed = timed(compute)
        both = timed(compute, copy)
        copy_first = timed(copy, compute)
    finally:
        ggml.ggml_backend_buffer_free(source)
        ggml.ggml_backend_buffer_free(there)
        ggml.ggml_free(context)
        for backend in (copier, computer):
            ggml.ggml_backend_free(backend)
    shorter = min(copied["seconds"], computed["seconds"])
    hidden = (copied["seconds"] + computed["seconds"] - both["seconds"]) / shorter
    return {
        "what": "overlap", "pinned": pinned, "n_bytes": n_bytes, "mul_mats": repeats, "copy": copied,
        "compute": computed, "both": both, "both_copy_first": copy_first, "hidden": hidden,
        "copy_gb_per_s": n_bytes / copied["seconds"] / 1e9,
    }  # fmt: skip


def slices(
    bridge: Any, device: str, ffn: tuple[int, int], share: float, n_tokens: int, type_name: str
) -> dict[str, Any]:
    """One mul-mat over a slice of the rows of gate, [K, N] = ffn. On CUDA quantised types take MMQ, F16 cuBLAS."""
    k, n = ffn
    rows = max(32, round(n * share / 32) * 32)
    timer = bridge.mul_mat(device, None, type_name, k, rows, n_tokens=n_tokens, working_set_bytes=0)
    try:
        timer.run(2)
        samples = timer.run(REPEATS)
    finally:
        timer.close()
    seconds = statistics.median(samples)
    return {"what": "slice", "type": type_name, "k": k, "rows": rows, "n_tokens": n_tokens, "seconds": seconds,
            "gflops": 2 * k * rows * n_tokens / seconds / 1e9, "samples": samples}  # fmt: skip


def pinned_memory(bridge: Any, device: str, n_bytes: int) -> dict[str, Any]:
    """What it takes to get pinned memory of that size, beside plain memory whose pages are touched."""
    ggml = Ggml(bridge.libraries.folder)

    def allocate(buft: int) -> float:
        start = time.perf_counter()
        buffer = ggml.ggml_backend_buft_alloc_buffer(buft, n_bytes)
        if not buffer:
            return -1.0
        ctypes.memset(ggml.ggml_backend_buffer_get_base(buffer), 1, n_bytes)
        taken = time.perf_counter() - start
        ggml.ggml_backend_buffer_free(buffer)
        return taken

    pinned = bridge.host_buft(device)
    return {"what": "pinned", "n_bytes": n_bytes, "pinned_s": allocate(pinned) if pinned else None,
            "plain_s": allocate(bridge.layout_buft("CPU"))}  # fmt: skip


def rows(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a measurement. settings: device, n_bytes to copy, n_tokens, ffn (K and N of a gate)."""
    from oallama.device.load_params import load_bridge
    from oallama.device.native_log import native_log
    from oallama.device.opening import open_device

    n_bytes, n_tokens, (k, n) = settings["n_bytes"], settings["n_tokens"], settings["ffn"]
    with native_log(), open_device(settings["device"]) as device:
        bridge, name = load_bridge(), device.name
        measured: list[Callable[[], dict[str, Any]]] = [
            *(partial(overlap, bridge, name, (k, n), n_bytes, n_tokens, pinned) for pinned in (True, False)),
            *(partial(pinned_memory, bridge, name, size) for size in (n_bytes // 4, n_bytes, 4 * n_bytes)),
            *(partial(slices, bridge, name, (k, n), share, tokens, kind)
              for kind in ("Q4_0", "F16") for tokens in (1, 32, n_tokens) for share in SLICE_SHARES),
        ]  # fmt: skip
        for measure in measured:
            try:
                yield measure()
            except Exception as error:  # what this device lacks is a finding; the rest is still measured
                yield {"what": "error", "error": f"{type(error).__name__}: {error}"[:300]}
