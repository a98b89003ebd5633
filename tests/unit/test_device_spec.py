"""`--device` text parses into one record and back, and wrong text is refused with the accepted forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.core.errors import UsageError
from oallama.core.units import format_ranges
from oallama.device.spec import DeviceSpec, parse_cpus, parse_device


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
        "CUDA 0",
        "CUDA0;x",
        "rpc://",
        "rpc://host",
        "rpc://host:0",
        "rpc://host:65536",
        "rpc://host:1:2",
        "rpc://[::1]:5",
        "rpc-worker:0",
        "rpc-worker:-1",
        "rpc-worker:two",
        "rpc-worker:²",
        "rpc-worker:1:a",
        "rpc-worker:1:3-1",
        "rpc-worker:1:0-99999",
        "rpc-worker:1:1:1",
        "rpc-workerx:1",
    ],
)
def test_wrong_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    assert "\n" not in str(caught.value)
    assert "--device" in str(caught.value)


workers = st.builds(
    DeviceSpec,
    st.just("rpc-worker"),
    threads=st.none() | st.integers(1, 1024),
    cpus=st.lists(st.integers(0, 300), max_size=12).map(lambda cpus: tuple(sorted(set(cpus)))),
)
others = st.sampled_from(
    [DeviceSpec("auto"), DeviceSpec("none"), DeviceSpec("cpu-pair"), DeviceSpec("ggml", name="CUDA0"),
     DeviceSpec("rpc", endpoint="10.0.0.1:50052")]
)  # fmt: skip


@given(workers | others)
def test_str_gives_the_text_back(spec: DeviceSpec) -> None:
    assert parse_device(str(spec)) == spec


@given(st.lists(st.integers(0, 300), min_size=1).map(lambda cpus: tuple(sorted(set(cpus)))))
def test_cpu_lists_round_trip(cpus: tuple[int, ...]) -> None:
    assert parse_cpus(format_ranges(cpus)) == cpus


def test_only_rpc_devices_are_remote() -> None:
    assert parse_device("rpc-worker").is_remote
    assert parse_device("rpc://a:1").is_remote
    assert not parse_device("CUDA0").is_remote
    assert not parse_device("none").is_remote
