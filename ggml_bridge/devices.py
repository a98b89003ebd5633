"""Records of what ggml offers: devices and tensor types."""

from __future__ import annotations

from dataclasses import dataclass

from ggml_bridge.errors import BridgeError
from ggml_bridge.ffi import Native, decode, ffi, record


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


def list_devices(native: Native, ask_servers: bool) -> list[Device]:
    """Every registered device, in ggml's order; without asking servers, of an RPC one only name, backend and type."""
    return [device_at(native, index, ask_servers) for index in range(native.lib.gb_device_count())]


def device_at(native: Native, index: int, ask_server: bool) -> Device:
    """The device at that place of ggml's order."""
    info = ffi.new("gb_device_info *")
    native.call("gb_get_device_info", index, int(ask_server), info)
    return record(Device, info)


def list_types(native: Native) -> dict[str, TypeInfo]:
    """Every tensor type in use, by its name in capitals."""
    types = {}
    for number in range(native.lib.gb_type_count()):
        info = ffi.new("gb_type_info *")
        native.call("gb_get_type_info", number, info)
        if decode(info.name):
            types[decode(info.name)] = record(TypeInfo, info)
    if not types:
        raise BridgeError("the loaded ggml names no tensor type; run `oallama setup --refresh`")
    return types
