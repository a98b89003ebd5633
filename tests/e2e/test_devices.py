"""Devices open, are pinned, end with whoever opened them, and say in one sentence why they cannot be opened."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from pathlib import Path

import pytest
from e2e.stock_plans import MODEL, split_plan
from e2e.stub import stub_program
from processes import here
from rpc_server import RpcServer

from ggml_bridge.bridge import Bridge
from ggml_bridge.errors import BridgeError
from ggml_bridge.rpc import probe
from oallama.core.errors import DeviceError, PlanError
from oallama.device.cpu import default_threads
from oallama.device.identity import known_device
from oallama.device.load_params import load_bridge
from oallama.device.opening import SPLIT_BACKEND, list_devices, open_device
from oallama.placer import Placer
from oallama.plan.plan import Plan
from oallama.profile.child import device_details


def test_the_cpu_is_listed_with_its_memory() -> None:
    """Beside devices that another file's tests have registered in this process."""
    cpus = [device for device in list_devices() if device.type == "CPU" and device.backend != SPLIT_BACKEND]
    assert [cpu.name for cpu in cpus] == ["CPU"]
    assert cpus[0].memory_total > 0


@pytest.mark.parametrize(
    ("device", "pins", "takes_residents"),
    [
        ("emulated:vram=1GiB,scale=1,values=real", True, True),
        ("emulated:vram=1GiB,scale=1,values=real,pinned=64MiB", False, True),
        ("emulated:vram=1GiB,scale=1,values=real,buffers=address", True, False),
        ("none", None, None),
    ],
)
def test_a_profile_knows_what_a_device_pins_and_whether_blocks_live_there(
    device: str, pins: bool | None, takes_residents: bool | None
) -> None:
    with open_device(device) as opened:
        found = device_details(load_bridge(), opened)["fingerprint"]
    assert (found["device_pins"], found["device_takes_residents"]) == (pins, takes_residents)


def test_auto_is_known_by_the_device_it_stands_for() -> None:
    gpus = [device.name for device in list_devices() if device.type in ("GPU", "IGPU")]
    known = known_device("auto")
    assert str(known.spec) == (gpus[0] if gpus else "none")
    assert known == known_device(str(known.spec).lower())


def test_a_device_that_is_not_there_has_no_identity() -> None:
    with pytest.raises(DeviceError, match=r"CUDA77.*emulated.*none"):
        known_device("CUDA77")
    with pytest.raises(DeviceError, match=r"127\.0\.0\.1:1"):
        known_device("rpc://127.0.0.1:1")


def test_a_server_is_asked_and_left_free_for_the_next() -> None:
    server = RpcServer(1)
    try:
        known = known_device(f"rpc://{server.endpoint}")
        assert known.identity is not None and known.identity["backend"] == "RPC" and known.identity["memory_bytes"] > 0
        assert known_device(f"rpc://{server.endpoint}") == known
    finally:
        server.close()


def test_a_device_is_listed_until_it_is_closed() -> None:
    with open_device("rpc-worker:1") as device:
        assert device.info is not None and device.info.memory_total > 0
        assert (device.info.backend, device.info.type) == ("RPC", "GPU")
        assert device.name in [listed.name for listed in list_devices()]
    assert device.name not in [listed.name for listed in list_devices()], "a dead device would abort who lists devices"


def test_nobody_takes_our_place_at_a_server_between_calls() -> None:
    with RpcServer() as server:
        with open_device(f"rpc://{server.endpoint}"), pytest.raises(BridgeError, match="one client"):
            probe(server.endpoint, timeout_s=0.5)
        probe(server.endpoint)


def test_a_ctrl_c_while_it_is_connected_to_leaves_the_server_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server has one client at a time, and one that nobody knows of would stay."""
    add = Bridge.rpc_add

    def interrupted(bridge: Bridge, endpoint: str) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        return add(bridge, endpoint)

    with RpcServer() as server:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Bridge, "rpc_add", interrupted)
            with open_device(f"rpc://{server.endpoint}"):
                pass
        probe(server.endpoint)
        with open_device(f"rpc://{server.endpoint}") as device:
            assert device.info is not None


def test_the_collector_may_close_a_device_while_another_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as first, RpcServer() as left, RpcServer() as server:
        first.enter_context(open_device(f"rpc://{left.endpoint}"))
        add = Bridge.rpc_add

        def collected(bridge: Bridge, endpoint: str) -> list[str]:
            names = add(bridge, endpoint)
            first.close()
            return names

        with monkeypatch.context() as patched:
            patched.setattr(Bridge, "rpc_add", collected)
            device = first.enter_context(open_device(f"rpc://{server.endpoint}"))
        assert [known.name for known in list_devices() if known.backend == "RPC"] == [device.name]
        with open_device(f"rpc://{left.endpoint}"):  # it has no other client
            pass


def test_a_server_with_another_client_is_reported_and_not_waited_for() -> None:
    with RpcServer() as server:
        host, _, port = server.endpoint.partition(":")
        with (
            socket.create_connection((host, int(port))),
            pytest.raises(DeviceError, match="one client"),
            open_device(f"rpc://{server.endpoint}"),
        ):
            pass


def test_threads_are_physical_cores_within_affinity_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 5})
    assert default_threads(tmp_path) == 4, "nothing is known of cores"
    for cpu in (0, 1, 4, 5):
        siblings = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings.parent.mkdir(parents=True)
        siblings.write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert default_threads(tmp_path) == 2
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for quota, n_threads in (("max 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("nonsense", 2)):
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")
        assert default_threads(tmp_path) == n_threads


def plan_for(endpoint: str, path: Path) -> str:
    """A file with a plan for an RPC server, which somebody else may have written."""
    split_plan(path, f"rpc://{endpoint}", slices_only=True)
    return str(path)


def test_a_plan_chooses_no_server(tmp_path: Path) -> None:
    stub = stub_program(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as strangers:
        endpoint = f"127.0.0.1:{strangers.getsockname()[1]}"
        plan = plan_for(endpoint, tmp_path / "plan.json")
        for words in (
            ("run", MODEL, "--plan", plan, "-p", "my secret"),
            ("chat", MODEL, "--plan", plan),
            ("serve", MODEL, "--plan", plan, "--port", "0", "--llama-server", stub),
            ("simulate", plan),
        ):
            said = here(*words, code=2).stderr
            assert f"add --device rpc://{endpoint}" in said and len(said.splitlines()) == 1
        here("export", plan, "--to", "plugin", "-o", tmp_path / "plan.oallama")
        assert f"prompts to rpc://{endpoint}" in here("export", plan, "--to", "llama-server").stderr
        read = Plan.load(plan)
        for device in ("none", "auto"):
            with pytest.raises(PlanError, match="device"):
                Placer.load(MODEL, device=device).engine(read)
        here("bench", MODEL, "--arms", f"{plan},stock-cpu", "-p", 4, "-n", 2, "-r", 1, "-t", 1, code=2)
        assert not select.select([strangers], [], [], 0)[0], "nobody connected"


def test_a_plan_runs_on_the_server_that_is_named_beside_it(tmp_path: Path) -> None:
    with RpcServer(threads=1) as server:
        plan = plan_for(server.endpoint, tmp_path / "plan.json")
        device = ("--device", f"rpc://{server.endpoint}")
        assert here("run", MODEL, "--plan", plan, *device, "-t", 1, "-p", "Once", "-n", 4, "--no-chat").stdout
