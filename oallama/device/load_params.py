"""Load parameters of llama.cpp: fills its structs from plain values and keeps their memory alive.

no_alloc loads and loads into this process both use this module, so what was verified is what is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oallama.core.errors import BridgeError
from oallama.core.options import DEFAULT_ATTENTION, DEFAULT_BATCH, DEFAULT_UBATCH, FLASH_ATTENTION, cache_type
from oallama.core.types import CPU_DEVICE, PLAIN_LAYOUT, SPLIT_LAYOUT, Attention, StockOptions, Workload
from oallama.device.cpu import default_threads
from oallama.device.user_backend import load_user_backend

if TYPE_CHECKING:
    from ggml_bridge import Bridge


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of one load of llama.cpp: model, context and placement. Hashable; counts are tokens.

    host_patterns: (regular expression, CPU buffer type or None) for weights in host memory; a device's name for weights
    that --fit puts there; SPLIT_LAYOUT for weights of the split back end (plan/patterns.py). split_texts: the split
    weights of each device, for a load without their plan (plan/plugin_text.py). n_threads 0: one per physical core.
    no_repack: weights that match no pattern stay plain, as with --no-repack. n_outputs: the most logits of one batch,
    for which llama.cpp reserves memory; 0: all. n_slots: parallel requests. n_drafts: drafts for each slot by the
    model's MTP layer, in a second context; 0: that block is not loaded. stock: options of a stock
    configuration; llama.cpp then gets the device even without layers on it, as in its own programs, and computes large
    batches there. device_layers: how many of the n_gpu_layers each of several devices has; (): a single device has all.
    """

    path: str
    device: str = "none"  # --device text
    n_ctx: int = 512
    n_batch: int = DEFAULT_BATCH
    n_ubatch: int = DEFAULT_UBATCH
    n_gpu_layers: int = 0  # counted as llama.cpp does: the output is one layer behind the last
    host_patterns: tuple[tuple[str, str | None], ...] = ()
    split_texts: tuple[str, ...] = ()
    attention: Attention = DEFAULT_ATTENTION
    n_threads: int = 0
    no_repack: bool = False
    stock: StockOptions | None = None
    n_outputs: int = 1
    n_slots: int = 1
    n_drafts: int = 0
    device_layers: tuple[int, ...] = ()

    def of(self, workload: Workload) -> LoadSettings:
        """These settings with the outputs, slots and drafts of a workload."""
        step = workload.step
        n_drafts = step.n_draft if step.mtp else 0
        return replace(self, n_outputs=workload.n_outputs_max, n_slots=step.n_slots, n_drafts=n_drafts)


class ModelParams:
    """Fields of `llama_model_params` (devices, tensor split, buffer type overrides, load mode) and the memory they
    point to.

    devices: ggml_backend_dev_t of the usable devices. llama.cpp gets them only if they hold layers or for a stock
    configuration: the split back end opens its device itself, and llama.cpp would reserve an unused compute buffer on
    it. split_buft: the split plan's buffer type; 0: plain host memory, which llama.cpp would stream to a device that
    takes large batches. Raises BridgeError for a layout that this CPU lacks.
    """

    def __init__(self, settings: LoadSettings, devices: Sequence[int], bridge: Bridge, split_buft: int = 0) -> None:
        self.n_gpu_layers = settings.n_gpu_layers if devices else 0
        self._is_told = bool(devices) and (self.n_gpu_layers != 0 or settings.stock is not None)
        self._no_host = settings.stock is not None and settings.stock.no_host
        self._devices = (ctypes.c_void_p * (len(devices) + 1))(*(devices if self._is_told else ()))
        # llama.cpp always reads llama_max_devices() shares
        shares = bridge.libraries.llama_cpp.llama_cpp.llama_max_devices()
        self._shares = (ctypes.c_float * shares)(*settings.device_layers) if settings.device_layers else None
        self._overrides = _overrides(settings.host_patterns, bridge, split_buft)
        self._load_mode = load_mode(settings, bridge)
        self._load_mtp = settings.n_drafts > 0
        self.use_extra_bufts = chooses_layouts(settings.host_patterns) and not settings.no_repack

    def devices(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the devices that llama.cpp gets: all or none."""
        return names if self._is_told else ()

    def apply(self, params: Any) -> None:
        """Fill a llama_model_params; this object must live until the model is loaded."""
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if self._shares is not None:
            params.tensor_split = self._shares
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p) if self._overrides else None
        params.n_gpu_layers = self.n_gpu_layers
        params.use_extra_bufts = self.use_extra_bufts
        params.no_host = self._no_host
        params.load_mode = self._load_mode
        params.load_mtp = self._load_mtp


def chooses_layouts(host_patterns: Sequence[tuple[str, str | None]]) -> bool:
    """Whether llama.cpp chooses the CPU's layout of a weight itself. Not for a plan that needs plain memory for some
    weight: such a plan names the layout of every other weight."""
    return all(layout != PLAIN_LAYOUT for _, layout in host_patterns)


def reads_file(host_patterns: Sequence[tuple[str, str | None]]) -> bool:
    """Whether the file is read tensor by tensor, not mapped as is llama.cpp's default: with split weights, which
    llama.cpp would copy out of the mapping, whose pages stay resident: twice the file's size at the peak."""
    return any(layout == SPLIT_LAYOUT for _, layout in host_patterns)


def load_mode(settings: LoadSettings, bridge: Bridge) -> int:
    """Return the enum llama_load_mode. With an expert cache the file is read too: copies of experts from pinned memory
    are twice as fast."""
    api = bridge.libraries.llama_cpp.llama_cpp
    cached = settings.stock is not None and settings.stock.moe_cache_bytes > 0
    reads = cached or reads_file(settings.host_patterns)
    return int(api.LLAMA_LOAD_MODE_NONE if reads else api.LLAMA_LOAD_MODE_AUTO)


class BuftOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def _overrides(patterns: Sequence[tuple[str, str | None]], bridge: Bridge, split_buft: int) -> Any:
    """A NULL-terminated array; None without patterns."""
    if not patterns:
        return None
    array = (BuftOverride * (len(patterns) + 1))()
    devices = {device.name for device in bridge.devices(ask_servers=False)} - {CPU_DEVICE}
    for entry, (pattern, layout) in zip(array, patterns, strict=False):
        entry.pattern = pattern.encode()
        if layout == SPLIT_LAYOUT:
            entry.buft = split_buft or bridge.buft(CPU_DEVICE, PLAIN_LAYOUT)
            continue
        if layout in devices:
            entry.buft = bridge.buft(layout)
            continue
        try:
            entry.buft = bridge.buft(CPU_DEVICE, layout or PLAIN_LAYOUT)
        except ValueError as error:
            raise BridgeError(f"the plan uses a layout that this CPU lacks: {error}; make a new plan") from None
    return array


def apply_context(settings: LoadSettings, params: Any) -> None:
    """Fill a llama_context_params. Raises UsageError for an unknown cache type, BridgeError for an expert cache that
    this llama.cpp lacks."""
    params.n_ctx = settings.n_ctx
    params.n_batch = min(settings.n_batch, settings.n_ctx) if settings.n_ctx else settings.n_batch
    params.n_ubatch = min(settings.n_ubatch, params.n_batch)
    params.n_threads = params.n_threads_batch = settings.n_threads or default_threads()
    params.n_seq_max, params.kv_unified = settings.n_slots, settings.n_slots > 1
    params.n_outputs_max = min(settings.n_outputs, params.n_batch)
    params.n_rs_seq = settings.n_drafts  # snapshots of recurrent state, to roll back refused drafts
    attention = settings.attention
    params.flash_attn_type = FLASH_ATTENTION[attention.flash_attn]
    params.type_k, params.type_v = cache_type(attention.type_k), cache_type(attention.type_v)
    if settings.stock is not None and settings.stock.moe_cache_bytes:
        if not hasattr(type(params), "moe_cache_size"):
            raise BridgeError("this llama.cpp has no expert cache (--moe-cache-mib); run `oallama setup`")
        params.moe_cache_size = settings.stock.moe_cache_bytes


def apply_draft_context(settings: LoadSettings, params: Any, context: int | None) -> None:
    """Fill the llama_context_params of the context in which the MTP layer drafts. context: address of the
    target context; None before it exists."""
    api = load_bridge().libraries.llama_cpp.llama_cpp
    apply_context(replace(settings, attention=Attention(settings.attention.flash_attn)), params)
    params.ctx_type, params.ctx_other = api.LLAMA_CONTEXT_TYPE_MTP, context
    params.n_rs_seq, params.n_outputs_max = 0, settings.n_slots
    if settings.stock is not None and settings.stock.moe_cache_bytes:
        params.moe_cache_size = 0


def load_bridge() -> Bridge:
    """Return the native bridge, with the user's back end in ggml's registry. Raises oallama's BridgeError, UsageError
    for a back end that cannot be loaded."""
    import ggml_bridge

    try:
        bridge = ggml_bridge.load()
    except ggml_bridge.BridgeError as error:
        raise BridgeError(str(error)) from None
    load_user_backend(bridge)
    return bridge
