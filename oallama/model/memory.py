"""The exact memory of a model on every device, computed by llama.cpp without allocating it.

llama.cpp loads with no_alloc, reserves its graphs for the worst case and reports the bytes of each buffer type. It runs
in a child process: native code sees the file here for the first time, and a crash or a hang of llama.cpp becomes an
error of ours instead of ending the caller.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from oallama.core.codec import from_json
from oallama.core.errors import DeviceError, ModelFileError, OallamaError
from oallama.core.types import CPU_DEVICE, SPLIT_LAYOUT
from oallama.core.units import MIB
from oallama.device.child import child_errors
from oallama.device.load_params import (
    LoadSettings,
    ModelParams,
    apply_context,
    apply_draft_context,
    load_bridge,
)
from oallama.device.native_abort import SOURCE_FOLDER
from oallama.device.spec import parse_device

if TYPE_CHECKING:
    from ggml_bridge import Bridge
    from ggml_bridge.child import Child
    from oallama.device.opening import OpenDevice


Part = Literal["model", "context", "compute"]
PARTS: tuple[Part, ...] = ("model", "context", "compute")

MODULE = "oallama.model.memory"
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


def held_bytes(buffers: Iterable[BufferBytes]) -> tuple[int, int]:
    """Bytes on the device, and in host memory. What maps the model file counts with the mapped range."""
    held = {True: 0, False: 0}
    for buffer in buffers:
        held[buffer.in_host_memory] += buffer.model + buffer.context + buffer.compute
    return held[False], held[True]


@dataclass(frozen=True, slots=True)
class NoAllocResult:
    """Memory that a load would take in llama.cpp. Weights of the split back end count as host memory with all their
    bytes: the plan knows their share on the device and the split back end's own buffers. free_of: free bytes of each
    of several devices by ggml name, in their order; {} with a single device."""

    buffers: tuple[BufferBytes, ...]
    n_splits_decode: int  # parts ggml's scheduler cuts the graph of one token into; -1: unknown
    device_free: int  # bytes free on the device before the load; 0 without one
    free_of: dict[str, int] = field(default_factory=dict)

    def on_device(self, part: Part, name: str | None = None) -> int:
        """Bytes of a part in device memory. name: of the device; None: of all devices."""
        buffers = [buffer for buffer in self.buffers if not buffer.in_host_memory]
        return sum(getattr(buffer, part) for buffer in buffers if name in (None, buffer.device))

    def on_host(self, part: Part) -> int:
        """Bytes of a part in host memory, pinned memory included."""
        return sum(getattr(buffer, part) for buffer in self.buffers if buffer.in_host_memory)


class NoAllocLoader:
    """A child process that answers no_alloc loads, one after another, for a `with` statement. It starts at once, so
    that llama.cpp is loaded before the first request; without `at_once`, it starts at the first request. Without a
    device, consecutive loads of the same file share the llama_model, whose vocabulary takes most of the time."""

    def __init__(self, at_once: bool = True) -> None:
        from ggml_bridge.child import Child

        self._child: Child | None = Child(MODULE) if at_once else None
        self._pending: list[LoadSettings] = []  # sent, not answered
        self._answers: dict[LoadSettings, NoAllocResult | OallamaError] = {}  # received, not taken

    def __enter__(self) -> NoAllocLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stop = signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM
        self._end(stop if kind or self._pending else None)

    def ask(self, request: LoadSettings) -> None:
        """Start a load without waiting for it."""
        from ggml_bridge.child import Child

        if request in self._answers or request in self._pending:
            return
        if self._child is None:
            self._child = Child(MODULE)
        self._child.send(asdict(request))
        self._pending.append(request)

    def answer(self, request: LoadSettings, timeout_s: float = TIMEOUT_S) -> NoAllocResult:
        """Return the result of a no_alloc load, once: a second call loads again. Raises as no_alloc_memory."""
        while request not in self._answers:
            self.ask(request)
            self._receive(timeout_s)
        result = self._answers.pop(request)
        if isinstance(result, OallamaError):
            raise result
        return result

    def _receive(self, timeout_s: float) -> None:
        """Note the next answer. If the process is lost, its other requests are forgotten."""
        from ggml_bridge import ChildDied, ChildTimeout

        request = self._pending.pop(0)
        assert self._child is not None  # it was asked
        try:
            with child_errors(partial(_failed, request)):
                try:
                    answer = self._child.answer(timeout_s=timeout_s)
                except (ChildDied, ChildTimeout):
                    self._end(signal.SIGTERM)
                    raise
            self._answers[request] = NoAllocResult(tuple(BufferBytes(**row) for row in answer.pop("buffers")), **answer)
        except OallamaError as error:
            self._answers[request] = error

    def _end(self, first: signal.Signals | None) -> None:
        if self._child is not None:
            self._child.end(first)
        self._child = None
        self._pending.clear()


def no_alloc_memory(request: LoadSettings, timeout_s: float = TIMEOUT_S) -> NoAllocResult:
    """Load without allocating, in a child process, and return the memory that the load would take.

    Raises ModelFileError if llama.cpp refuses the file, dies of it or hangs on it; DeviceError if the device
    cannot be opened, or where the child dies or hangs with a device in play; UsageError, BridgeError.
    """
    with NoAllocLoader() as no_alloc_loader:
        return no_alloc_loader.answer(request, timeout_s)


def _failed(request: LoadSettings, message: str) -> OallamaError:
    reason = SOURCE_FOLDER.sub("", message)
    if parse_device(request.device).is_none:
        return ModelFileError(f"cannot load {request.path}, llama.cpp fails: {reason}")
    return DeviceError(
        f"loading {request.path} for device {request.device} failed: {reason}; "
        "try --device none to see whether the device or the file is the cause"
    )


def memory_of(bridge: Bridge, context: Any, no_alloc_on: Sequence[str] | None = None) -> tuple[BufferBytes, ...]:
    """Return the memory of a live llama_context (its address), one record per buffer type. no_alloc_on: the model's
    devices if it was loaded with no_alloc."""
    from ggml_bridge.llama_context import memory_breakdown

    return tuple(
        BufferBytes(row.buft, row.device, row.is_host, row.model, row.context, row.compute)
        for row in memory_breakdown(bridge, context, no_alloc_on)
        if row.model or row.context or row.compute
    )


def graph_splits(log_lines: list[str]) -> int:
    """Return the splits of one token's graph, the last number in llama_context's log; -1 if it lacks them."""
    found = (match for line in reversed(log_lines) if (match := _SPLITS.search(line)))
    return next((int(match[1]) for match in found), -1)


_SPLITS = re.compile(r"graph.*\bsplits = (?:\d+ / )?(\d+)")


#
# the child's side
#


def load_refusal(path: str, device: OpenDevice | None, reason: str) -> OallamaError:
    """Return the error for a load that llama.cpp refused with `reason`, the first error in its log. device: None
    without a device."""
    if device is not None and device.info is not None and "allocate" in reason:
        return DeviceError(f"{device.with_free} has no room for the model: {reason}; use a smaller --vram, -c or -ub")
    return ModelFileError(f"cannot load {path}: {reason or 'llama.cpp gave no reason'}")


CACHE_IS_OFF = ("MoE cache is disabled", "they are not cached")
"""llama.cpp's warnings if it disables the expert cache, or has none for some layers (llama-moe-cache.cpp)."""


def check_cache(settings: LoadSettings, log: Sequence[str]) -> None:
    """Raise DeviceError if llama.cpp disabled a requested expert cache. log: its lines."""
    if settings.stock is None or not settings.stock.moe_cache_bytes:
        return
    if said := next((line for line in log if any(words in line for words in CACHE_IS_OFF)), None):
        mib = settings.stock.moe_cache_bytes // MIB
        raise DeviceError(f"llama.cpp disabled the expert cache of {mib} MiB: {said}; use another arm or plan")


class _Loader:
    """Makes the loads of one child process. Keeps the model for the next load if no device holds any of it."""

    def __init__(self) -> None:
        self._kept: tuple[LoadSettings, int] | None = None  # settings of the model alone, llama_model

    def __call__(self, request: dict[str, Any], progress: Any) -> dict[str, Any]:
        from oallama.device.native_log import native_log
        from oallama.device.opening import device_pointers, open_device

        settings = from_json(LoadSettings, request, "the load")
        bridge = load_bridge()
        from llama_cpp import llama_cpp as api  # after load_bridge, which reports a missing llama.cpp

        with (
            open_device(settings.device) as device,
            bridge.split().plan(_plan_text(settings, device)) if settings.split_texts else nullcontext() as split,
            native_log() as log,
        ):
            placement = ModelParams(settings, device_pointers(device.names), bridge, split.buft if split else 0)
            model = self._model(settings, placement, lambda: load_refusal(settings.path, device, log.reason()))
            context_params = api.llama_context_default_params()
            apply_context(settings, context_params)
            context = api.llama_init_from_model(model, context_params)
            if not context:
                raise load_refusal(settings.path, device, log.reason())
            check_cache(settings, log.texts())
            n_splits = graph_splits(log.texts())
            devices = placement.devices(device.names)
            buffers = memory_of(bridge, context, devices)
            if settings.n_drafts:
                draft_params = api.llama_context_default_params()
                apply_draft_context(settings, draft_params, context)
                drafting = api.llama_init_from_model(model, draft_params)
                if not drafting:
                    raise load_refusal(settings.path, device, log.reason())
                # the same weights
                buffers += tuple(replace(row, model=0) for row in memory_of(bridge, drafting, devices))
                api.llama_free(drafting)
            result = {
                "buffers": [asdict(_as_host(row)) for row in buffers],
                "n_splits_decode": n_splits,
                "device_free": device.info.memory_free if device.info else 0,
                "free_of": {info.name: info.memory_free for info in device.infos if device.others},
            }
            api.llama_free(context)
            if device.info is not None or split is not None:
                self._free()
        return result

    def _model(self, settings: LoadSettings, placement: ModelParams, refusal: Callable[[], OallamaError]) -> int:
        """Return the llama_model of these settings, without its weights."""
        from llama_cpp import llama_cpp as api

        of_model = LoadSettings(
            settings.path,
            settings.device,
            n_gpu_layers=settings.n_gpu_layers,
            host_patterns=settings.host_patterns,
            no_repack=settings.no_repack,
            stock=settings.stock,
            n_drafts=min(settings.n_drafts, 1),
            device_layers=settings.device_layers,
        )
        if self._kept is None or self._kept[0] != of_model:
            self._free()
            params = api.llama_model_default_params()
            placement.apply(params)
            params.no_alloc = True
            params.load_mode = api.LLAMA_LOAD_MODE_NONE
            model = api.llama_model_load_from_file(settings.path.encode(), params)
            if not model:
                raise refusal()
            self._kept = of_model, model
        return self._kept[1]

    def _free(self) -> None:
        from llama_cpp import llama_cpp as api

        if self._kept is not None:
            api.llama_model_free(self._kept[1])
        self._kept = None


def _prepare() -> None:
    """Load the libraries, which takes most of the time before a model is loaded."""
    import oallama.device.opening  # noqa: F401
    from ggml_bridge.library import import_interface_only

    import_interface_only()
    load_bridge()


def _plan_text(settings: LoadSettings, device: OpenDevice) -> str:
    """Return the split back end's plan text, with the names of its further devices."""
    first, *others = settings.split_texts
    if not device.names:
        return "".join((first, *others))
    further_texts = (f"device {name}\n{text}" for name, text in zip(device.names[1:], others, strict=False))
    return "".join((first, f"device {device.name}\n", *further_texts))


def _as_host(row: BufferBytes) -> BufferBytes:
    return replace(row, device="", is_host=True) if row.buft == SPLIT_LAYOUT else row


if __name__ == "__main__":
    from ggml_bridge.child import child_main

    child_main(_Loader(), _prepare)
