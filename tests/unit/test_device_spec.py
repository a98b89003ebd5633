"""`--device` text parses into one record and back, and wrong text is refused with the accepted forms."""

from __future__ import annotations

import pytest

from oallama.core.errors import UsageError
from oallama.device.spec import DeviceSpec, parse_device


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (None, DeviceSpec("auto")),
        ("", DeviceSpec("auto")),
        ("auto", DeviceSpec("auto")),
        ("none", DeviceSpec("none")),
        ("cpu-pair", DeviceSpec("cpu-pair")),
        ("CPU", DeviceSpec("none")),
        ("cpu", DeviceSpec("none")),
        ("CUDA0", DeviceSpec("ggml", name="CUDA0")),
        (" Vulkan1 ", DeviceSpec("ggml", name="Vulkan1")),
        ("rpc://127.0.0.1:50052", DeviceSpec("rpc", endpoint="127.0.0.1:50052")),
        ("rpc://gpu-box.lan:9/", DeviceSpec("rpc", endpoint="gpu-box.lan:9")),
        ("rpc-worker", DeviceSpec("rpc-worker")),
        ("rpc-worker:2", DeviceSpec("rpc-worker", threads=2)),
        ("rpc-worker:1:1", DeviceSpec("rpc-worker", threads=1, cpus=(1,))),
        ("rpc-worker:4:0,2-3,7", DeviceSpec("rpc-worker", threads=4, cpus=(0, 2, 3, 7))),
        ("rpc-worker::1", DeviceSpec("rpc-worker", cpus=(1,))),
    ],
)
def test_text_parses(text: str | None, spec: DeviceSpec) -> None:
    assert parse_device(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "0CUDA",
        "CUDA0;x",
        "rpc://",
        "rpc://host:0",
        "rpc://host:1:2",
        "rpc-worker:0",
        "rpc-worker:²",
        "rpc-worker:1:3-1",
        "rpc-worker:1:1:1",
        "rpc-workerx:1",
    ],
)
def test_wrong_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    assert "\n" not in str(caught.value)
    assert "--device" in str(caught.value)
