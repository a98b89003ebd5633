"""Everything Python asks of ggml, as one object that `load` makes once."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ggml_bridge.emulated import EmulatedDevice
from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import Native, decode, encode, ffi, record
from ggml_bridge.layouts import fault_name, layout_faults, mul_mat_kind
from ggml_bridge.library import Libraries, find_built, find_plugin, open_libraries
from ggml_bridge.rpc import probe
from ggml_bridge.split import SplitBackend
from ggml_bridge.timing import (
    WHOLE,
    WORKING_SET_BYTES,
    BoundaryTimer,
    ConcurrentRates,
    LayerRestTimer,
    MulMatCase,
    MulMatTimer,
    Timer,
    Transfer,
)

NAME_BYTES = 128
_ISSUE = 2  # gb_transfer_kind


@dataclass(frozen=True, slots=True)
class Device:
    """One ggml device. Memory in bytes; `pointer` is its ggml_backend_dev_t, for llama_model_params.devices."""

    name: str  # CPU, CUDA0, Vulkan0, RPC0, ...
    description: str
    backend: str  # registry name: CPU, CUDA, Vulkan, RPC, ...
    type: str  # CPU, GPU, IGPU, ACCEL, META
    memory_total: int
    memory_free: int
    asynchronous: bool
    host_buffer: bool  # offers pinned host memory
    events: bool
    takes_residents: bool  # blocks of the split back end can live there
    pointer: int


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """A tensor type as the loaded ggml knows it: `block_elements` values are stored in `block_bytes` bytes."""

    name: str  # as in GGUF: F16, Q4_K, IQ2_XXS, ...
    number: int  # ggml_type
    block_elements: int
    block_bytes: int
    quantized: bool
    mul_mat: bool  # ggml's CPU has a kernel for weights of this type


_lock = threading.Lock()
_bridge: Bridge | None = None


def load() -> Bridge:
    """Return the bridge of this process. The first call imports llama_cpp and opens the native libraries (a second).

    Raises VersionMismatch when the ggml found is not the one expected, BridgeError when something is missing.
    """
    global _bridge
    with _lock:
        if _bridge is None:
            libraries = open_libraries()
            _bridge = Bridge(libraries, Native(libraries.bridge_path))
        return _bridge


class Bridge:
    """ggml's devices, types and layouts, and timers for its kernels. Get it from `load`."""

    def __init__(self, libraries: Libraries, native: Native) -> None:
        self.libraries = libraries
        self.native = native
        self._split: SplitBackend | None = None
        self._emulated: EmulatedDevice | None = None
        native.call("gb_open")

    #
    # library
    #

    def ggml_version(self) -> str:
        return decode(self.native.lib.gb_ggml_version())

    def ggml_commit(self) -> str:
        """Return the commit that ggml's build recorded: `unknown` or `…-dirty` say nothing."""
        return decode(self.native.lib.gb_ggml_commit())

    #
    # types
    #

    @cached_property
    def _types(self) -> dict[str, TypeInfo]:
        types = {}
        for number in range(self.native.lib.gb_type_count()):
            info = self.native.value("gb_type_info", "gb_get_type_info", number)
            if decode(info.name):
                types[decode(info.name)] = record(TypeInfo, info)
        if not types:
            raise BridgeError("the loaded ggml has no tensor types; run `oallama setup --refresh`")
        return types

    def types(self) -> list[TypeInfo]:
        """List every tensor type of the loaded ggml."""
        return list(self._types.values())

    def type_info(self, name: str) -> TypeInfo:
        """Return the type of a name as in GGUF (`Q4_K`; capitals do not matter); raises ValueError."""
        try:
            return self._types[name.upper()]
        except KeyError:
            raise ValueError(f"unknown tensor type {name}; choose from {', '.join(self._types)}") from None

    #
    # devices, buffer types, layouts
    #

    def devices(self, ask_servers: bool = True) -> list[Device]:
        """List every device, memory figures fresh. For an RPC device this asks its server, which must be alive; where
        ask_servers is False, it has only name, backend, type and pointer."""
        return [self._device(index, ask_servers) for index in range(self.native.lib.gb_device_count())]

    def device(self, name: str) -> Device:
        """Return the device of a name, memory figures fresh: an RPC device's server is asked. Raises ValueError."""
        devices = self.devices(ask_servers=False)
        for index, device in enumerate(devices):
            if device.name.lower() == name.lower():
                return self._device(index, ask_server=True)
        raise ValueError(f"unknown ggml device {name}; choose from {', '.join(d.name for d in devices)}")

    def _device(self, index: int, ask_server: bool) -> Device:
        return record(Device, self.native.value("gb_device_info", "gb_get_device_info", index, int(ask_server)))

    def buft(self, device: str, layout: str | None = None) -> int:
        """Return the buffer type (ggml_backend_buffer_type_t) of a layout of the CPU, or the device's own, for
        tensor_buft_overrides. Raises ValueError."""
        return self.native.pointer("gb_buft", encode(device), encode(layout))

    def pins(self, device: str, n_bytes: int) -> bool:
        """True if the device has so many bytes of pinned host memory. Its buffer type gives plain memory where
        not."""
        return bool(self.native.value("int32_t", "gb_pins", encode(device), n_bytes))

    def cpu_features(self) -> list[str]:
        """List features that the CPU back end was compiled for and found: AVX2, AVX512, OPENMP, REPACK, ..."""
        return self.native.lines("gb_cpu_features")

    def cpu_layouts(self) -> list[str]:
        """List layouts that the CPU keeps weights in, best first: its extra buffer types, then plain `CPU`."""
        return self.native.lines("gb_cpu_layouts")

    def layout_supports(self, layout: str, type: str, K: int, N: int, E: int = 1, n_expert_used: int = 0) -> bool:
        """True if a weight [K, N, E] of this type may be kept in that layout: llama.cpp would, and the product is
        right.

        n_expert_used 0: it is used by MUL_MAT (also with E > 1); else by MUL_MAT_ID. Raises ValueError, Unsupported.
        """
        if fault_name(layout, mul_mat_kind(E, n_expert_used)) in self.layout_faults:
            return False
        return self._layout_takes(layout, type, K, N, E, n_expert_used, sound=True)

    def layout_takes(self, layout: str, type: str, K: int, N: int, E: int = 1, n_expert_used: int = 0) -> bool:
        """True if stock llama.cpp would keep such a weight in that layout, be the product right or wrong. As
        layout_supports."""
        return self._layout_takes(layout, type, K, N, E, n_expert_used, sound=False)

    def _layout_takes(self, layout: str, type: str, K: int, N: int, E: int, n_expert_used: int, *, sound: bool) -> bool:
        case = (encode(layout), self.type_info(type).number, K, N, E, n_expert_used, int(sound))
        return bool(self.native.value("int32_t", "gb_layout_supports", *case))

    @cached_property
    def layout_faults(self) -> Mapping[str, str]:
        """What set-up's self-test found wrong with layouts of this build: see ggml_bridge.layouts."""
        return layout_faults(self.libraries.folder)

    def load_backend(self, path: str) -> str:
        """Load a ggml back end from a library of the user's, for the rest of the process; returns the name of its
        registry. Raises ValueError for a file that is no such library, or is of another ggml."""
        name = ffi.new("char[]", NAME_BYTES)
        self.native.call("gb_backend_load", encode(path), name, NAME_BYTES)
        return decode(name)

    def rpc_add(self, endpoint: str, timeout_s: float = 5.0) -> list[str]:
        """Connect to the ggml RPC server at host:port; returns the names of its devices, new or known. Raises
        ValueError, Unsupported (ggml was built without RPC) or BridgeError."""
        probe(endpoint, timeout_s)
        return self.native.lines("gb_rpc_add", encode(endpoint))

    #
    # timers
    #

    def mul_mat(
        self,
        device: str,
        layout: str | None,
        type: str,
        K: int,
        N: int,
        E: int = 1,
        n_expert_used: int = 0,
        n_tokens: int = 1,
        working_set_bytes: int = WORKING_SET_BYTES,
        n_threads: int = 1,
        input_f32: bool = False,
    ) -> MulMatTimer:
        """Make a timer for weight [K, N, E] times n_tokens tokens; one sample: seconds of a single mul-mat.

        layout: a CPU layout, or None for the device's own buffer type. n_expert_used 0: MUL_MAT over all E matrices;
        else MUL_MAT_ID, each token using so many distinct experts chosen at random. input_f32: the device must read the
        input in F32 (ggml_prec_set_src), which not every one can. The timed graph holds mul-mats over
        as many copies of the weight as fill working_set_bytes (0: one copy), sharing one src1 and computed one after
        another; the graph's time less an empty launch is divided by their number. Memory: working_set_bytes and up to
        two more copies while it is made. Raises ValueError, Unsupported, OutOfMemory, BridgeError.
        """
        case = MulMatCase(
            device, layout, type, K, N, E, n_expert_used, n_tokens, working_set_bytes, n_threads, input_f32
        )
        return MulMatTimer(self.native, case, self.type_info(type).number)

    def transfer(
        self, device: str, direction: Literal["h2d", "d2h"], pinned: bool, n_bytes: int, piece_bytes: int = WHOLE
    ) -> Transfer:
        """Make a timer for copies of n_bytes between host memory and the device, on a stream of its own, each queued
        in pieces of piece_bytes.

        One sample: h2d: what the copy adds to a stream whose last byte is read back (the read's own time is taken off,
        and at least 1 ns is left); only an answer proves arrival over RPC. d2h: the whole time. Host memory is cycled
        through 128 MiB, so that it comes from DRAM. Raises Unsupported if there is no pinned memory.
        """
        kind = ("h2d", "d2h").index(direction)
        return Transfer(self.native, "gb_transfer_new", encode(device), kind, int(pinned), n_bytes, piece_bytes)

    def issue(self, device: str, pinned: bool, n_bytes: int) -> Timer:
        """Make a timer for how long a copy of n_bytes to the device holds up the thread that asks for it; one sample:
        seconds until the asynchronous call returns, the device being idle. Raises Unsupported if there is no pinned
        memory."""
        return Timer(self.native, "gb_transfer_new", encode(device), _ISSUE, int(pinned), n_bytes, WHOLE)

    def launch(self, device: str, n_threads: int = 1) -> Timer:
        """Make a timer for an empty launch: a graph of one tiny operation, until its result is on the host."""
        return Timer(self.native, "gb_launch_new", encode(device), n_threads)

    def launch_issue(self, device: str) -> Timer:
        """Make a timer for the share of queueing a graph that its thread pays: how much later fixed work is done that
        begins with the call. The graph has an FFN's operations, of no size."""
        return Timer(self.native, "gb_launch_issue_new", encode(device))

    def boundary(
        self, device: str, n_bytes: int, n_excursions: int, n_threads: int = 1, on_cpu: bool = False
    ) -> BoundaryTimer:
        """Make a timer for a graph whose activation of n_bytes goes CPU -> device -> CPU n_excursions times, run by a
        real ggml_backend_sched over [device, CPU]; one sample: seconds of the whole graph.

        on_cpu: the same graph all on the CPU. (with - without) / n_excursions is the cost of one excursion: two copies,
        a launch on the device, and waking threads again that went to sleep while the CPU worked: between two excursions
        it does, for up to some tenths of a millisecond. At most 256 excursions.
        """
        return BoundaryTimer(self.native, device, n_bytes, n_excursions, on_cpu, n_threads)

    def layer_rest(
        self,
        device: str,
        n_tokens: int,
        n_kv: int,
        n_layers: int = 4,
        n_threads: int = 1,
        flash_attn: bool = True,
        type_k: str = "F16",
        type_v: str = "F16",
        **shape: int,
    ) -> LayerRestTimer:
        """Make a timer for everything of a Llama block that is no weight mul-mat: two rms_norms with their weights,
        rope on q and k, the KV write, attention over n_kv positions (causal mask, the batch being the last n_tokens of
        them; padded to 256 as llama.cpp does), swiglu (n_ff 0: none), two residual additions.

        shape: n_embd, n_head, n_head_kv, head_dim_k, head_dim_v, n_ff. type_k, type_v: of the KV cache, names as in
        type_info; quantised V needs flash_attn. One sample: seconds per layer, of n_layers in one graph, an empty
        launch taken off. Raises ValueError, OutOfMemory, and Unsupported where the device lacks an operation (try
        flash_attn=False).
        """
        types = {"type_k": self.type_info(type_k).number, "type_v": self.type_info(type_v).number}
        numbers = {"n_tokens": n_tokens, "n_kv": n_kv, "n_layers": n_layers, "n_threads": n_threads}
        return LayerRestTimer(self.native, device, flash_attn=int(flash_attn), **types, **numbers, **shape)

    def link_contention(
        self, first: MulMatCase, device: str, chunk_bytes: int = 4 << 20, seconds: float = 0.5
    ) -> ConcurrentRates:
        """Measure how mul-mats (of the CPU or of the device) and copies of chunk_bytes to the device (from pinned
        memory if it has any) slow each other down; takes three times `seconds`."""
        params, _strings = first.params(self.type_info(first.type).number)
        found = self.native.value("gb_contention", "gb_link_contention", params, encode(device), chunk_bytes, seconds)
        return record(ConcurrentRates, found)

    def compute_contention(self, first: MulMatCase, second: MulMatCase, seconds: float = 0.5) -> ConcurrentRates:
        """Measure how mul-mats in two places slow each other down; takes three times `seconds`."""
        params, _strings = first.params(self.type_info(first.type).number)
        other, _other_strings = second.params(self.type_info(second.type).number)
        return record(
            ConcurrentRates, self.native.value("gb_contention", "gb_compute_contention", params, other, seconds)
        )

    def copy_wait(self, device: str, pinned: bool, n_bytes: int) -> float:
        """Measure the share of a copy of n_bytes under way on one stream of the device that a result of another stream
        waits for: 0 to 1, which is all streams in one queue. Raises Unsupported if there is no pinned memory."""
        return float(self.native.value("double", "gb_copy_wait", encode(device), int(pinned), n_bytes))

    #
    # the split back end
    #

    def split(self) -> SplitBackend:
        """Return the split back end, loaded and registered with ggml by the first call, for the rest of the process.

        Raises VersionMismatch, BridgeError if libggml-oallama is missing or does not fit this ggml.
        """
        with _lock:
            if self._split is None:
                self._split = SplitBackend(find_plugin())
            return self._split

    #
    # the emulated device
    #

    def emulated(self) -> EmulatedDevice:
        """Return the emulated device, loaded by the first call, not yet registered. Raises VersionMismatch, BridgeError
        if libggml-emulated is missing."""
        with _lock:
            if self._emulated is None:
                self._emulated = EmulatedDevice(find_built("ggml-emulated"))
            return self._emulated
