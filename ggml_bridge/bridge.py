"""The bridge: everything Python asks of ggml, as one object that `load` makes once."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

from ggml_bridge.devices import Device, TypeInfo, list_devices, list_types
from ggml_bridge.ffi import Native, decode, encode, ffi
from ggml_bridge.library import Libraries, open_libraries
from ggml_bridge.timing import MulMatTimer

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

    def capture_log(self, to_stderr: bool = False) -> None:
        """Keeps ggml's log to itself (`log_tail` has the last lines), or prints it as well."""
        self.native.call("gb_log_capture", int(to_stderr))

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

    def devices(self) -> list[Device]:
        """Every device, memory figures fresh. For an RPC device this asks its server, which must be alive."""
        return list_devices(self.native)

    def device(self, name: str) -> Device:
        """The device of that name; raises ValueError."""
        devices = self.devices()
        for device in devices:
            if device.name.lower() == name.lower():
                return device
        raise ValueError(f"no ggml device is called {name}; there are: {', '.join(d.name for d in devices)}")

    def device_ptr(self, name: str) -> int:
        """ggml_backend_dev_t of that device, for llama_model_params.devices; raises ValueError."""
        return self.device(name).pointer

    def device_buft(self, device: str) -> int:
        """The device's own buffer type (ggml_backend_buffer_type_t), for tensor_buft_overrides."""
        return self.native.pointer("gb_device_buft", encode(device))

    def host_buft(self, device: str) -> int:
        """The device's pinned host buffer type; 0 if it has none."""
        return self.native.pointer("gb_host_buft", encode(device))

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
        params, _strings = self._mul_mat_params(
            device, layout, type, K, N, E, n_expert_used, n_tokens, working_set_bytes, n_threads
        )
        return MulMatTimer(self.native, params)

    def _mul_mat_params(
        self,
        device: str,
        layout: str | None,
        type: str,
        K: int,
        N: int,
        E: int,
        n_expert_used: int,
        n_tokens: int,
        working_set_bytes: int,
        n_threads: int,
    ) -> tuple[Any, list[Any]]:
        """The native parameters, and the strings they point to, which must live as long."""
        strings = [ffi.new("char[]", name.encode()) if name is not None else ffi.NULL for name in (device, layout)]
        fields = {
            "device": strings[0],
            "layout": strings[1],
            "type": self.type_info(type).number,
            "k": K,
            "n": N,
            "e": E,
            "n_expert_used": n_expert_used,
            "n_tokens": n_tokens,
            "working_set_bytes": working_set_bytes,
            "n_threads": n_threads,
        }
        return ffi.new("gb_mul_mat_params *", fields), strings
