"""The device step: what copies and mul-mats leave each other of their speed, what slices and pinned memory cost. By the
bridge, so on any device that ggml has."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

REPEATS = 5
SLICE_SHARES = (1.0, 0.5, 0.25, 0.125, 0.03125)


def sharing(bridge: Any, device: str, ffn: tuple[int, int], n_bytes: int, n_tokens: int) -> dict[str, Any]:
    """Mul-mats on one stream and copies to the device on another, each alone and both at once: bytes of weights
    multiplied, and of copies, a second."""
    case = bridge.mul_mat_case(device, None, "F16", *ffn, n_tokens=n_tokens, working_set_bytes=0)
    found = bridge.share_link(case, device, chunk_bytes=n_bytes)
    return {"what": "sharing", "n_bytes": n_bytes, "n_tokens": n_tokens, "pinned": bool(bridge.host_buft(device)),
            **asdict(found)}  # fmt: skip


def slices(
    bridge: Any, device: str, ffn: tuple[int, int], share: float, n_tokens: int, type_name: str
) -> dict[str, Any]:
    """One mul-mat over a slice of the rows of gate, [K, N] = ffn. On CUDA quantised types take MMQ, F16 cuBLAS."""
    k, n = ffn
    rows = max(32, round(n * share / 32) * 32)
    with bridge.mul_mat(device, None, type_name, k, rows, n_tokens=n_tokens, working_set_bytes=0) as timer:
        timer.run(2)
        samples = timer.run(REPEATS)
    seconds = statistics.median(samples)
    return {"what": "slice", "type": type_name, "k": k, "rows": rows, "n_tokens": n_tokens, "seconds": seconds,
            "gflops": 2 * k * rows * n_tokens / seconds / 1e9, "samples": samples}  # fmt: skip


def pinned_memory(bridge: Any, device: str, n_bytes: int) -> dict[str, Any]:
    """What it takes to get pinned memory of that size, beside plain memory whose pages are touched."""
    from ggml_bridge.library import soname

    ggml = ctypes.CDLL(str(bridge.libraries.folder / soname("ggml-base")))
    allocate, base_of, free = (
        getattr(ggml, f"ggml_backend_{name}") for name in ("buft_alloc_buffer", "buffer_get_base", "buffer_free")
    )
    allocate.restype = base_of.restype = ctypes.c_void_p
    allocate.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    base_of.argtypes = free.argtypes = (ctypes.c_void_p,)

    def seconds(buft: int) -> float:
        start = time.perf_counter()
        buffer = allocate(buft, n_bytes)
        if not buffer:
            return -1.0
        ctypes.memset(base_of(buffer), 1, n_bytes)
        taken = time.perf_counter() - start
        free(buffer)
        return taken

    pinned = bridge.host_buft(device)
    return {"what": "pinned", "n_bytes": n_bytes, "pinned_s": seconds(pinned) if pinned else None,
            "plain_s": seconds(bridge.layout_buft("CPU"))}  # fmt: skip


def rows(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a measurement. settings: device, n_bytes to copy, n_tokens, ffn (K and N of a gate)."""
    from oallama.device.load_params import load_bridge
    from oallama.device.native_log import native_log
    from oallama.device.opening import open_device

    n_bytes, n_tokens, (k, n) = settings["n_bytes"], settings["n_tokens"], settings["ffn"]
    with native_log(), open_device(settings["device"]) as device:
        bridge, name = load_bridge(), device.name
        measured: list[Callable[[], dict[str, Any]]] = [
            *(partial(sharing, bridge, name, (k, n), n_bytes, tokens) for tokens in (1, n_tokens)),
            *(partial(pinned_memory, bridge, name, size) for size in (n_bytes // 4, n_bytes, 4 * n_bytes)),
            *(partial(slices, bridge, name, (k, n), share, tokens, kind)
              for kind in ("Q4_0", "F16") for tokens in (1, 32, n_tokens) for share in SLICE_SHARES),
        ]  # fmt: skip
        for measure in measured:
            try:
                yield measure()
            except Exception as error:  # what this device lacks is a finding; the rest is still measured
                yield {"what": "error", "error": f"{type(error).__name__}: {error}"[:300]}
