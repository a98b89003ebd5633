"""What a device is asked, by whom, and what of the answer counts. No native code here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ggml_bridge
from ggml_bridge import BridgeError as NativeError
from ggml_bridge import ChildDied, ChildTimeout
from ggml_bridge.child import ChildError
from oallama.core.errors import BridgeError, DeviceError, OallamaError, UsageError
from oallama.core.types import DeviceInfo
from oallama.core.units import GIB, MIB
from oallama.device.identity import KnownDevice, driver_files, identity_of, known_device, known_of
from oallama.device.opening import OpenDevice
from oallama.device.spec import DeviceSpec, parse_device

CARD = DeviceInfo("CUDA0", "Test Card 12GB", "CUDA", "GPU", 12 * GIB, 11 * GIB, True, True, True)


def opened(spec: str, info: DeviceInfo | None) -> OpenDevice:
    return OpenDevice(info.name if info else "none", info, parse_device(spec))


def test_what_tells_a_device_from_another_of_its_name() -> None:
    known = identity_of(CARD, ["libcuda.so.1 5"])
    assert json.loads(json.dumps(known)) == known
    for change in ({"description": "other"}, {"backend": "Vulkan"}, {"type": "IGPU"}, {"memory_total": 8 * GIB}):
        assert identity_of(replace(CARD, **change), ["libcuda.so.1 5"]) != known
    assert identity_of(CARD, ["libcuda.so.1 6"]) != known
    for change in ({"memory_free": 1}, {"name": "CUDA1"}, {"events": False}, {"memory_total": 12 * GIB - 9 * MIB}):
        assert identity_of(replace(CARD, **change), ["libcuda.so.1 5"]) == known


def test_driver_libraries_are_known_by_name_and_size(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.999.1").write_bytes(b"12345")
    (tmp_path / "libvulkan_radeon.so").write_bytes(b"123")
    (tmp_path / "libc.so.6").write_bytes(b"1")
    row = "7f00-7f01 r--p 00000000 08:01 42                         "
    names = ("libcuda.so.999.1", "libcuda.so.999.1", "libc.so.6", "libvulkan_radeon.so", "libvulkan_gone.so")
    maps = "\n".join([*(row + str(tmp_path / name) for name in names), "7ffe-7fff rw-p 00000000 00:00 0"])
    assert driver_files(maps) == ["libcuda.so.999.1 5", "libvulkan_gone.so 0", "libvulkan_radeon.so 3"]
    assert driver_files("") == []


@pytest.mark.parametrize("spec", ["auto", "CUDA0", "cuda0"])
def test_every_way_to_ask_for_a_device_of_ggml_is_the_same_device(spec: str) -> None:
    assert known_of(opened(spec, CARD), "") == KnownDevice(DeviceSpec("ggml", name="CUDA0"), identity_of(CARD, []))


def test_this_machine_s_driver_is_not_the_server_s() -> None:
    maps = "7f00-7f01 r--p 00000000 08:01 42 /lib/libcuda.so.1"
    far = known_of(opened("rpc://box:50052", replace(CARD, name="RPC0", backend="RPC")), maps)
    assert str(far.spec) == "rpc://box:50052" and far.identity is not None and far.identity["driver_files"] == []
    assert known_of(opened("CUDA0", CARD), maps).identity == identity_of(CARD, ["libcuda.so.1 0"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """Requests to the child, which answers as for CARD."""
    requests: list[Mapping[str, Any]] = []

    def run_in_child(module: str, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        requests.append(request)
        return {"spec": "CUDA0", "identity": identity_of(CARD, [])}

    monkeypatch.setattr("ggml_bridge.child.run_in_child", run_in_child)
    return requests


def libraries(folder: Path, *names: str) -> None:
    for name in ("base", "cpu", "rpc", *names):
        (folder / f"libggml-{name}.so.0").touch()
    (folder / "libggml.so.0").touch()


def test_auto_asks_only_where_there_is_a_back_end_for_gpus(
    asked: list[Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.delenv("GGML_BACKEND_PATH", raising=False)
    libraries(tmp_path, "cpu-haswell", "blas")
    monkeypatch.setattr("ggml_bridge.library.soname", lambda name: f"lib{name}.so.0")
    assert known_device("auto") == known_device(None) == KnownDevice(DeviceSpec("none")) and asked == []
    monkeypatch.setenv("GGML_BACKEND_PATH", "/somewhere/libggml-cuda.so")
    assert known_device("auto").identity and len(asked) == 1
    monkeypatch.delenv("GGML_BACKEND_PATH")
    libraries(tmp_path, "vulkan")
    assert known_device("auto").spec == DeviceSpec("ggml", name="CUDA0")
    assert asked == [{"device": "auto"}] * 2


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ChildError("DeviceError", "there is no device 'CUDA0' here"), DeviceError),
        (ChildError("UsageError", "not a CUDA0"), UsageError),
        (ChildError("KeyError", "CUDA0"), DeviceError),
        (NativeError("no library for CUDA0"), BridgeError),
        (ChildDied("oallama.device.identity", -11), DeviceError),
        (ChildTimeout("no answer"), DeviceError),
    ],
)
def test_a_device_that_cannot_be_asked_is_an_error(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[OallamaError]
) -> None:
    def fails(*_: object, **__: object) -> dict[str, Any]:
        raise raised

    monkeypatch.setattr("ggml_bridge.child.run_in_child", fails)
    with pytest.raises(kind) as error:
        known_device("CUDA0")
    assert type(error.value) is kind
    if isinstance(raised, ggml_bridge.ChildDied | ggml_bridge.ChildTimeout):
        assert "--device none" in str(error.value)
