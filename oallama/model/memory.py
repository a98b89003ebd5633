"""Exactly what a model would occupy on every device, found without allocating it.

llama.cpp loads with no_alloc, reserves its graphs for the worst case and says how many bytes each buffer type would
hold. This happens in a child process: it is also the first time native code sees the file, and whatever kills or
stalls llama.cpp there becomes an error here instead of taking the caller down.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from oallama.core.codec import from_json
from oallama.core.errors import DeviceError, ModelFileError, OallamaError
from oallama.core.types import CPU_DEVICE, SPLIT_LAYOUT
from oallama.device.child import ask_child
from oallama.device.load_params import (
    LoadSettings,
    ModelParams,
    apply_context,
    load_bridge,
)
from oallama.device.spec import parse_device

if TYPE_CHECKING:
    from ggml_bridge import Bridge


Part = Literal["model", "context", "compute"]

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class BufferBytes:
    """Bytes that one buffer type holds: weights, KV cache (and other context state), compute buffers."""

    buft: str
    device: str  # ggml device name; "" where the buffer type names none
    is_host: bool
    model: int
    context: int
    compute: int

    @property
    def in_host_memory(self) -> bool:
        """Repacked layouts are no "host" buffers to ggml, as nothing else can read them, but are the host's memory."""
        return self.is_host or self.device in ("", CPU_DEVICE)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a load would take of llama.cpp. Weights of the split backend count as host memory with all their bytes: what
    of them lies on the device is for the plan to say, and so is what the backend computes in."""

    buffers: tuple[BufferBytes, ...]
    n_splits_prefill: int  # parts ggml's scheduler cuts the graph of a full micro-batch into; -1: unknown
    n_splits_decode: int  # and the graph of one token
    device_total: int  # bytes of the device; 0 without one
    device_free: int  # bytes free there before the load

    def on_device(self, part: Part) -> int:
        """Bytes of that part in memory that is not the host's."""
        return sum(getattr(buffer, part) for buffer in self.buffers if not buffer.in_host_memory)

    def on_host(self, part: Part) -> int:
        """Bytes of that part in host memory, pinned memory included."""
        return sum(getattr(buffer, part) for buffer in self.buffers if buffer.in_host_memory)


def probe_memory(request: LoadSettings, timeout_s: float = TIMEOUT_S) -> ProbeResult:
    """Load without allocating, in a child process, and report what the load would take.

    Raises ModelFileError where llama.cpp refuses the file, dies of it or hangs on it; DeviceError where the device
    cannot be opened, or where the child dies or hangs with a device in play; UsageError, BridgeError.
    """

    def failed(message: str) -> OallamaError:
        reason = _SOURCE_FOLDER.sub("", message)
        if parse_device(request.device).is_none:
            return ModelFileError(f"{request.path} cannot be loaded, llama.cpp fails on it: {reason}")
        return DeviceError(
            f"loading {request.path} for device {request.device} failed: {reason}; "
            "try --device none to learn whether the device or the file is the cause"
        )

    answer = ask_child("oallama.model.memory", asdict(request), timeout_s, failed)
    return ProbeResult(tuple(BufferBytes(**row) for row in answer.pop("buffers")), **answer)


_SOURCE_FOLDER = re.compile(r"\S*/(?=[^/\s]+\.(?:c|cpp|h|hpp|cu):\d+)")  # before file:line of an assertion


def memory_of(bridge: Bridge, context: Any, no_alloc_on: Sequence[str] | None = None) -> tuple[BufferBytes, ...]:
    """What a live llama_context (its address) holds, one record per buffer type. no_alloc_on: the model's devices where
    it was loaded with no_alloc."""
    return tuple(
        BufferBytes(row.buft, row.device, row.is_host, row.model, row.context, row.compute)
        for row in bridge.memory_breakdown(context, no_alloc_on)
        if row.model or row.context or row.compute
    )


def graph_splits(log_lines: list[str]) -> tuple[int, int]:
    """(splits of a full micro-batch, splits of one token) as llama_context reports them; -1 where it does not."""
    for line in reversed(log_lines):
        match = _SPLITS.search(line)
        if match:
            prefill = int(match[1])
            return prefill, int(match[2]) if match[2] else prefill
    return -1, -1


_SPLITS = re.compile(r"graph.*\bsplits = (\d+)(?: / (\d+))?")


#
# the child's side
#


def load_refusal(path: str, device: str, reason: str) -> OallamaError:
    """The error for a load that llama.cpp turned down with `reason`, the first error it logged."""
    if device != "none" and "allocate" in reason:
        return DeviceError(f"{device} has no room for the model: {reason}; use a smaller --vram, -c or -ub")
    return ModelFileError(f"{path} cannot be loaded: {reason or 'llama.cpp refused it without a reason'}")


def _probe(request: dict[str, Any], progress: Any) -> dict[str, Any]:
    from llama_cpp import llama_cpp as api

    from oallama.device.cpu import default_threads
    from oallama.device.native_log import native_log
    from oallama.device.opening import device_pointer, open_device

    settings = from_json(LoadSettings, request, "the load")
    bridge = load_bridge()
    with (
        open_device(parse_device(settings.device)) as device,
        bridge.split().plan(settings.split_text) if settings.split_text else nullcontext() as split,
        native_log() as log,
    ):
        placement = ModelParams(settings, device_pointer(device.name), bridge, split.buft if split else 0)
        model_params = api.llama_model_default_params()
        placement.apply(model_params)
        model_params.no_alloc = True
        model_params.load_mode = api.LLAMA_LOAD_MODE_NONE
        model = api.llama_model_load_from_file(settings.path.encode(), model_params)
        if not model:
            raise load_refusal(settings.path, device.name, log.reason())
        context_params = api.llama_context_default_params()
        apply_context(settings, settings.n_threads or default_threads(), context_params)
        context = api.llama_init_from_model(model, context_params)
        if not context:
            raise load_refusal(settings.path, device.name, log.reason())
        prefill, decode = graph_splits(log.texts())
        result = {
            "buffers": [asdict(_as_host(row)) for row in memory_of(bridge, context, placement.devices(device.name))],
            "n_splits_prefill": prefill,
            "n_splits_decode": decode,
            "device_total": device.info.memory_total if device.info else 0,
            "device_free": device.info.memory_free if device.info else 0,
        }
        api.llama_free(context)
        api.llama_model_free(model)
    return result


def _as_host(row: BufferBytes) -> BufferBytes:
    return replace(row, device="", is_host=True) if row.buft == SPLIT_LAYOUT else row


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    child_main(_probe)
