"""The bridge: everything Python asks of ggml, as one object that `load` makes once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from ggml_bridge.devices import Device, TypeInfo, device_at, list_devices, list_types
from ggml_bridge.emulated import EmulatedDevice
from ggml_bridge.ffi import Native, decode, encode, ffi, record
from ggml_bridge.library import Libraries, find_emulated, find_plugin, open_libraries
from ggml_bridge.llama_context import MemoryRow, RoutingRecorder, memory_breakdown
from ggml_bridge.rpc import probe
from ggml_bridge.split import SplitBackend
from ggml_bridge.timing import (
    BoundaryTimer,
    CopyBeside,
    LayerRestTimer,
    MulMatCase,
    MulMatTimer,
    Sharing,
    Timer,
)

NAME_BYTES = 128
WORKING_SET_BYTES = 256 << 20
"""Default set of weights a timer rotates through: beyond the last-level cache of common machines."""

_lock = threading.Lock()
_bridge: Bridge | None = None


def load() -> Bridge:
    """The bridge of this process. The first call imports llama_cpp and opens the native libraries (about a second).

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
        native.call("gb_log_capture", 0)
        native.call("gb_check")

    #
    # library
    #

    def ggml_version(self) -> str:
        return decode(self.native.lib.gb_ggml_version())

    def ggml_commit(self) -> str:
        """The commit ggml was built from, as its build recorded it: `unknown` or `…-dirty` say nothing."""
        return decode(self.native.lib.gb_ggml_commit())

    def log_tail(self) -> list[str]:
        """The last lines that ggml logged."""
        return self.native.lines("gb_log_tail")

    #
    # types
    #

    @cached_property
    def _types(self) -> dict[str, TypeInfo]:
        return list_types(self.native)

    def types(self) -> list[TypeInfo]:
        """Every tensor type of the loaded ggml."""
        return list(self._types.values())

    def type_info(self, name: str) -> TypeInfo:
        """The type of that name, as in GGUF (`Q4_K`; capitals do not matter); raises ValueError."""
        try:
            return self._types[name.upper()]
        except KeyError:
            raise ValueError(f"ggml has no tensor type {name}; it has: {', '.join(self._types)}") from None

    #
    # devices, buffer types, layouts
    #

    def devices(self, ask_servers: bool = True) -> list[Device]:
        """Every device, memory figures fresh. For an RPC device this asks its server, which must be alive; where
        ask_servers is False, it has only name, backend, type and pointer."""
        return list_devices(self.native, ask_servers)

    def device(self, name: str) -> Device:
        """The device of that name, memory figures fresh: an RPC device's server is asked. Raises ValueError."""
        devices = self.devices(ask_servers=False)
        for index, device in enumerate(devices):
            if device.name.lower() == name.lower():
                return device_at(self.native, index, ask_server=True)
        raise ValueError(f"no ggml device is called {name}; there are: {', '.join(d.name for d in devices)}")

    def device_buft(self, device: str) -> int:
        """The device's own buffer type (ggml_backend_buffer_type_t), for tensor_buft_overrides."""
        return self.native.pointer("gb_device_buft", encode(device))

    def host_buft(self, device: str) -> int:
        """The device's pinned host buffer type; 0 if it has none."""
        return self.native.pointer("gb_host_buft", encode(device))

    def pins(self, device: str, n_bytes: int) -> bool:
        """Whether the device has so many bytes of pinned host memory. Its buffer type gives plain memory where not."""
        pinned = ffi.new("int32_t *")
        self.native.call("gb_pins", encode(device), n_bytes, pinned)
        return bool(pinned[0])

    def takes_residents(self, device: str) -> bool:
        """Whether blocks of the split back end can live on the device: it takes a buffer type that is its own in all
        but its address."""
        taken = ffi.new("int32_t *")
        self.native.call("gb_takes_residents", encode(device), taken)
        return bool(taken[0])

    def cpu_features(self) -> list[str]:
        """What the CPU backend was compiled for and found: AVX2, AVX512, OPENMP, REPACK, ..."""
        return self.native.lines("gb_cpu_features")

    def cpu_layouts(self) -> list[str]:
        """Layouts the CPU keeps weights in, best first: its extra buffer types, then plain `CPU`."""
        return self.native.lines("gb_cpu_layouts")

    def layout_buft(self, layout: str) -> int:
        """The buffer type of a CPU layout, for tensor_buft_overrides; raises ValueError."""
        return self.native.pointer("gb_layout_buft", encode(layout))

    def layout_supports(self, layout: str, type: str, K: int, N: int, E: int = 1, n_expert_used: int = 0) -> bool:
        """Whether llama.cpp would keep a weight [K, N, E] of this type in that layout.

        n_expert_used 0: it is used by MUL_MAT (also with E > 1); else by MUL_MAT_ID. Raises ValueError, Unsupported.
        """
        supported = ffi.new("int32_t *")
        number = self.type_info(type).number
        self.native.call("gb_layout_supports", encode(layout), number, K, N, E, n_expert_used, supported)
        return bool(supported[0])

    def load_backend(self, path: str) -> str:
        """Loads a ggml back end from a library of the user's, for the rest of the process; the name of its registry.

        Raises ValueError for what is no such library, or is of another ggml.
        """
        name = ffi.new("char[]", NAME_BYTES)
        self.native.call("gb_backend_load", encode(path), name, NAME_BYTES)
        return decode(name)

    def rpc_add(self, endpoint: str, timeout_s: float = 5.0) -> list[str]:
        """Connects to the ggml RPC server at host:port; returns the names of its devices, new or known.

        Makes the handshake by itself first, since ggml aborts the process when a server does not answer it. Raises
        ValueError, Unsupported (ggml was built without RPC) or BridgeError.
        """
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
    ) -> MulMatTimer:
        """A timer for weight [K, N, E] times n_tokens tokens; one sample: seconds of a single mul-mat.

        layout: a CPU layout, or None for the device's own buffer type. n_expert_used 0: MUL_MAT over all E matrices;
        else MUL_MAT_ID, each token using so many distinct experts chosen at random. The timed graph holds mul-mats over
        as many copies of the weight as fill working_set_bytes (0: one copy), sharing one src1 and computed one after
        another; the graph's time less an empty launch is divided by their number. Memory: working_set_bytes and up to
        two more copies while it is made. Raises ValueError, Unsupported, OutOfMemory, BridgeError.
        """
        return MulMatTimer(
            self.native,
            self._case(device, layout, type, K, N, E, n_expert_used, n_tokens, working_set_bytes, n_threads),
        )

    def mul_mat_case(
        self,
        device: str,
        layout: str | None,
        type: str,
        K: int,
        N: int,
        n_tokens: int = 1,
        working_set_bytes: int = WORKING_SET_BYTES,
        n_threads: int = 1,
    ) -> MulMatCase:
        """Mul-mats for `share_link` and `share_compute`, as in `mul_mat`."""
        return self._case(device, layout, type, K, N, 1, 0, n_tokens, working_set_bytes, n_threads)

    def _case(self, device: str, layout: str | None, type: str, *numbers: int) -> MulMatCase:
        return MulMatCase(device, layout, self.type_info(type).number, *numbers)

    def transfer(self, device: str, direction: Literal["h2d", "d2h"], pinned: bool, n_bytes: int) -> Timer:
        """A timer for copies of n_bytes between host memory and the device, on a stream of its own.

        One sample: h2d: what the copy adds to a stream whose last byte is read back (the read's own time is taken off,
        and at least 1 ns is left); only an answer proves arrival over RPC. d2h: the whole time. Host memory is cycled
        through 128 MiB, so that it comes from DRAM. Raises Unsupported where there is no pinned memory.
        """
        if direction not in ("h2d", "d2h"):
            raise ValueError(f"a transfer goes h2d or d2h, not {direction}")
        return Timer(self.native, "gb_transfer_new", encode(device), int(direction == "h2d"), int(pinned), n_bytes)

    def issue(self, device: str, pinned: bool, n_bytes: int) -> Timer:
        """A timer for how long a copy of n_bytes to the device holds up the thread that asks for it; one sample:
        seconds until the asynchronous call returns, the device being idle. Raises Unsupported where there is no pinned
        memory."""
        return Timer(self.native, "gb_issue_new", encode(device), int(pinned), n_bytes)

    def launch(self, device: str, n_threads: int = 1) -> Timer:
        """A timer for an empty launch: a graph of one tiny operation, until its result is on the host."""
        return Timer(self.native, "gb_launch_new", encode(device), n_threads)

    def launch_issue(self, device: str) -> Timer:
        """A timer for what queueing a graph of an FFN's operations, of no size, takes of its thread's time: how much
        later fixed work is done that begins with the call."""
        return Timer(self.native, "gb_launch_issue_new", encode(device))

    def boundary(
        self, device: str, n_bytes: int, n_excursions: int, n_threads: int = 1, on_cpu: bool = False
    ) -> BoundaryTimer:
        """A timer for a graph whose activation of n_bytes goes CPU -> device -> CPU n_excursions times, run by a real
        ggml_backend_sched over [device, CPU]; one sample: seconds of the whole graph.

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
        n_embd: int,
        n_head: int,
        n_head_kv: int,
        head_dim_k: int,
        head_dim_v: int,
        n_ff: int,
        n_layers_in_graph: int = 4,
        n_threads: int = 1,
        flash_attn: bool = True,
        type_k: str = "F16",
        type_v: str = "F16",
    ) -> LayerRestTimer:
        """A timer for everything of a Llama block that is no weight mul-mat: two rms_norms with their weights, rope on
        q and k, the KV write, attention over n_kv positions (causal mask, the batch being the last n_tokens of them;
        padded to 256 as llama.cpp does), swiglu (n_ff 0: none), two residual additions. type_k, type_v: of the KV
        cache, names as in type_info; quantised V needs flash_attn. One sample: seconds per layer, an empty launch taken
        off.

        Raises ValueError, OutOfMemory, and Unsupported where the device lacks an operation (try flash_attn=False).
        """
        return LayerRestTimer(
            self.native,
            device,
            n_tokens=n_tokens,
            n_kv=n_kv,
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim_k=head_dim_k,
            head_dim_v=head_dim_v,
            n_ff=n_ff,
            n_layers=n_layers_in_graph,
            type_k=self.type_info(type_k).number,
            type_v=self.type_info(type_v).number,
            flash_attn=int(flash_attn),
            n_threads=n_threads,
        )

    def share_link(self, first: MulMatCase, device: str, chunk_bytes: int = 4 << 20, seconds: float = 0.5) -> Sharing:
        """How mul-mats (of the CPU or of the device: `mul_mat_case`) and copies of chunk_bytes to the device (from
        pinned memory if it has any) slow each other down; takes three times `seconds`."""
        params, _strings = first.params()
        return self._sharing("gb_share_link", params, encode(device), chunk_bytes, seconds)

    def share_compute(self, first: MulMatCase, second: MulMatCase, seconds: float = 0.5) -> Sharing:
        """How mul-mats in two places slow each other down; takes three times `seconds`."""
        params, _strings = first.params()
        other, _other_strings = second.params()
        return self._sharing("gb_share_compute", params, other, seconds)

    def _sharing(self, function: str, *arguments: Any) -> Sharing:
        result = ffi.new("gb_sharing_result *")
        self.native.call(function, *arguments, result)
        return record(Sharing, result)

    def copy_wait(self, device: str, pinned: bool, n_bytes: int) -> float:
        """Share of a copy of n_bytes under way on one stream of the device that a result of another stream waits for,
        0 to 1: 1 where all streams share one queue. Raises Unsupported where there is no pinned memory."""
        share = ffi.new("double *")
        self.native.call("gb_copy_wait", encode(device), int(pinned), n_bytes, share)
        return float(share[0])

    def copy_beside(
        self, device: str, pinned: bool, large_bytes: int, piece_bytes: int, small_bytes: int, n: int
    ) -> list[CopyBeside]:
        """n samples of a copy of small_bytes to the device while one of large_bytes, queued in pieces of piece_bytes,
        is under way on another stream; large_bytes 0: alone. The closing read is taken off, as of `transfer`. Raises
        Unsupported where there is no pinned memory."""
        samples = ffi.new("gb_copy_beside_sample[]", max(n, 1))
        arguments = (encode(device), int(pinned), large_bytes, piece_bytes, small_bytes, n, samples)
        self.native.call("gb_copy_beside", *arguments)
        return [record(CopyBeside, samples[i]) for i in range(n)]

    #
    # memory
    #

    def memory_breakdown(self, context: int, no_alloc_on: Sequence[str] | None = None) -> list[MemoryRow]:
        """What the llama_context at that address holds in each buffer type, exactly.

        no_alloc_on: the devices that the model was given, where it was loaded with no_alloc: of such contexts llama.cpp
        counts a compute buffer once for each backend that uses it (plain host memory is an accelerator's as well as
        the CPU's), which is put right. Raises ValueError for a device that there is not.
        """
        return memory_breakdown(self.native, self.libraries.llama_cpp, context, no_alloc_on)

    #
    # routing
    #

    def routing(self) -> RoutingRecorder:
        """A recorder of the experts that the routers of one llama_context choose."""
        return RoutingRecorder(self.native)

    #
    # the split backend
    #

    def split(self) -> SplitBackend:
        """The split backend, loaded and registered with ggml by the first call, for the rest of the process.

        Raises VersionMismatch, BridgeError where libggml-oallama is missing or does not fit this ggml.
        """
        with _lock:
            if self._split is None:
                self._split = SplitBackend(find_plugin(), lambda name: self.type_info(name).number)
            return self._split

    #
    # the emulated device
    #

    def emulated(self) -> EmulatedDevice:
        """The emulated device, loaded by the first call, not yet registered. Raises VersionMismatch, BridgeError where
        libggml-emulated is missing."""
        with _lock:
            if self._emulated is None:
                self._emulated = EmulatedDevice(find_emulated())
            return self._emulated
