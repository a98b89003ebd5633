"""A model as an arm loads it, in the arm's own process: by stock llama.cpp alone, or by the engine as a plan says.

Both give a llama_context to time on, and a `call` through which to use it: the engine's keeps a lost device from
taking the process along, stock llama.cpp has no such thing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from oallama.bench.records import ArmSpec, StockPlacement
from oallama.core.errors import BridgeError
from oallama.core.options import Options
from oallama.device.load_params import BuftOverride, LoadSettings, apply_context, load_bridge
from oallama.device.native_log import native_log
from oallama.device.opening import OpenDevice, device_pointer, list_devices, open_now
from oallama.device.spec import parse_device
from oallama.model.memory import BufferBytes, load_refusal, memory_of

T = TypeVar("T")

PLUGIN_PREFIX = "OALLAMA"
"""What our backend's name in ggml's registry begins with."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that a loaded model holds, by buffer type and in sum."""

    buffers: tuple[BufferBytes, ...]
    device_bytes: int
    host_bytes: int


class LoadedModel(Protocol):
    """What measuring needs of a loaded model. Addresses are those of llama.h's structs."""

    device: str  # ggml's name, "none" without one
    context: int
    model: int
    params: Any  # the llama_context_params that the context was made with
    n_gpu_layers: int
    warnings: tuple[str, ...]

    def call(self, function: Callable[[], T]) -> T: ...

    def memory(self) -> Held:
        """What it holds now: a split backend makes what it computes in when it first computes."""
        ...

    def device_share(self) -> dict[str, float]:
        """Operator -> share of its weight on the device, of those that the split backend holds."""
        ...

    def close(self) -> None: ...


class StockModel:
    """Loaded as llama-server would with the same options, and nothing else in the process' registry.

    Raises ModelFileError, DeviceError, BridgeError where a plugin is in the registry.
    """

    def __init__(self, settings: LoadSettings, placement: StockPlacement) -> None:
        self._settings = settings
        self._open: OpenDevice = open_now(parse_device(settings.device))
        self.device = self._open.name
        self.n_gpu_layers = placement.n_gpu_layers
        self.warnings: tuple[str, ...] = ()
        try:
            if found := plugins():
                raise BridgeError(f"the stock arm has {', '.join(found)} in ggml's registry; unset GGML_BACKEND_PATH")
            self._load(placement)
        except BaseException:
            self._open.close()
            raise

    def _load(self, placement: StockPlacement) -> None:
        from llama_cpp import llama_cpp as api

        settings = self._settings
        told = StockParams(placement, self.device)  # llama.cpp keeps pointers into it while it loads
        with native_log() as log:
            model = api.llama_model_load_from_file(settings.path.encode(), told.model_params)
            if not model:
                raise load_refusal(settings.path, self.device, log.reason())
            self.params = context_params(settings)
            context = api.llama_init_from_model(model, self.params)
            if not context:
                api.llama_model_free(model)
                raise load_refusal(settings.path, self.device, log.reason())
        self.model, self.context = model, context

    def call(self, function: Callable[[], T]) -> T:
        return function()

    def memory(self) -> Held:
        buffers = memory_of(load_bridge(), self.context)
        sums = [sum(b.model + b.context + b.compute for b in buffers if b.in_host_memory == host) for host in (0, 1)]
        return Held(buffers, *sums)

    def device_share(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        from llama_cpp import llama_cpp as api

        api.llama_free(self.context)
        api.llama_model_free(self.model)
        self._open.close()


class PlannedModel:
    """Loaded by the engine as a plan says, exactly as `oallama run --plan` would."""

    def __init__(self, spec: ArmSpec) -> None:
        from oallama.placer import Placer
        from oallama.plan.plan import Plan

        load = spec.setting.load
        assert spec.plan is not None
        plan = Plan.from_json(dict(spec.plan), f"the plan of arm {spec.name}")
        options = Options(
            device=load.device,
            threads=load.n_threads,
            n_ctx=load.n_ctx,
            n_batch=load.n_batch,  # the micro-batch is the plan's
            **asdict(load.attention),
        )
        self._engine = Placer.of_file(load.path, options).engine(plan, progress=False)
        self.device = self._engine.device
        self.n_gpu_layers = plan.n_gpu_layers
        self.warnings = self._engine.warnings
        llama = self._engine.llama
        self.context, self.model, self.params = llama.ctx, llama.model, llama.context_params

    def call(self, function: Callable[[], T]) -> T:
        return self._engine.call(function)

    def memory(self) -> Held:
        memory = self._engine.memory
        return Held(memory.buffers, memory.device_bytes, memory.host_bytes)

    def device_share(self) -> dict[str, float]:
        return {placement.name: placement.gg for placement in self._engine.plan.operators}

    def close(self) -> None:
        self._engine.close()


def load_arm(spec: ArmSpec) -> LoadedModel:
    """Load what the spec says. Raises what llama.cpp and the engine raise."""
    if spec.stock is not None:
        return StockModel(spec.setting.load, spec.stock)
    return PlannedModel(spec)


class StockParams:
    """llama_model_params as llama.cpp's command-line tools fill them for these options; owns what it points to."""

    def __init__(self, placement: StockPlacement, device: str) -> None:
        from llama_cpp import llama_cpp as api

        bridge = load_bridge()
        self.devices = (ctypes.c_void_p * 2)(device_pointer(device) or None, None)
        self.overrides = (BuftOverride * (len(placement.overrides) + 1))()
        for entry, (pattern, where) in zip(self.overrides, placement.overrides, strict=False):
            entry.pattern = pattern.encode()
            entry.buft = bridge.layout_buft("CPU") if where == "CPU" else bridge.device_buft(device)
        params = api.llama_model_default_params()
        params.devices = ctypes.cast(self.devices, ctypes.c_void_p)
        params.n_gpu_layers = placement.n_gpu_layers
        if placement.overrides:
            params.tensor_buft_overrides = ctypes.cast(self.overrides, ctypes.c_void_p)
        self.model_params = params


def context_params(settings: LoadSettings) -> Any:
    """llama_context_params: defaults but for what is asked for; no full-size SWA cache, as llama.cpp's tools do."""
    from llama_cpp import llama_cpp as api

    params = api.llama_context_default_params()
    apply_context(settings, settings.n_threads, params)
    params.swa_full = False
    return params


def plugins() -> tuple[str, ...]:
    """Our backend, where it is in ggml's registry."""
    return tuple(sorted({device.backend for device in list_devices() if device.backend.startswith(PLUGIN_PREFIX)}))
