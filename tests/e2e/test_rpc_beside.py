"""An emulated card, and behind it an RPC server over a network that is slow in both directions (slow_proxy.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from e2e.described_card import slow_cpu_fast_card
from e2e.forced import written
from e2e.slow_proxy import slow_proxy
from gguf_factory import write_llama_shape
from processes import ROOT
from rpc_server import RpcServer

from ggml_bridge.child import run_in_child
from oallama.cli.projector import ProjectorOptions
from oallama.cli.served import ServedModel
from oallama.core.units import KIB, MIB
from oallama.placer import Given, Placer
from oallama.plan.plan import Plan
from oallama.report.placement_page import Served
from oallama.run.address import Address
from oallama.run.program import ServerSettings

LATENCY_S, BYTES_PER_S = 5e-3, 25e6  # far from the loopback's own
CASES = "e2e.several_devices_cases"
CARD = "emulated:rtx3060,vram=2GiB,scale=1,values=real"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with RpcServer(threads=1) as server, slow_proxy(server.endpoint, LATENCY_S, BYTES_PER_S) as slow:
        yield slow


def opened(path: Path, endpoint: str, **options: object) -> Placer:
    placer = Placer.load(path, device=f"{CARD},rpc://{endpoint}", threads=1, n_ubatch=64, flash_attn="on", **options)
    card, server = placer.members
    card._profile, remote = slow_cpu_fast_card(path, 1e9), slow_cpu_fast_card(path, 4e8)
    facts = {**remote.fingerprint, "device_backend": "RPC", "device_host_buffer": False}
    server._profile = replace(remote, fingerprint=facts)
    return placer


def assert_stocks_logits(plan: Plan, placer: Placer) -> dict[str, int]:
    """In a process of its own; returns the bytes that each device has there."""
    asked = {"path": placer.model.path, "plan": plan.to_json(), "device": str(placer.device)}
    return run_in_child(CASES, asked, env={"PYTHONPATH": str(ROOT / "tests")}, timeout_s=300.0)


def test_its_link_is_timed_as_it_is_from_here(endpoint: str) -> None:
    """Both ways. A copy from it waits for the question to arrive, and for the answer; one to it is proven by an answer,
    whose time is not its own."""
    small, large = 4 * KIB, 8 * MIB
    asked = {"device": f"rpc://{endpoint}", "sizes": [small, large]}
    seconds = run_in_child(CASES, asked, env={"PYTHONPATH": str(ROOT / "tests")}, timeout_s=300.0)
    assert seconds[f"d2h {small}"] > 2 * 0.9 * LATENCY_S
    for way in ("d2h", "h2d"):
        assert seconds[f"{way} {large}"] - seconds[f"{way} {small}"] > 0.8 * large / BYTES_PER_S


def test_forced_layers_at_its_end_have_stocks_numbers(models: Path, endpoint: str) -> None:
    placer = opened(written(models, "llama", weight_type="F16", n_layer=5), endpoint)
    names = [o.name for o in placer.operators if o.layer_in(5) > 1 and o.name != "token_embd.weight"]
    workload = replace(placer.workload(64, 8, 256), n_outputs=0)
    plan = placer.plan(Given(names, 4, device_layers=(2, 2)), workload=workload)
    held = assert_stocks_logits(plan, placer)
    assert set(held) == {"Emulated0", "RPC0"} and min(held.values()) > 0


def test_a_plan_gives_it_whole_layers_behind_the_cards_and_serve_goes_on_without_it(
    models: Path, endpoint: str, tmp_path: Path
) -> None:
    path = write_llama_shape(models / "large.gguf", 8, 512, 2048, 8, 4, 2000, "Q4_0")
    placer = opened(path, endpoint, vram=f"{14 * MIB},{20 * MIB}", n_ctx=256)
    plan = placer.plan(workload=replace(placer.workload(64, 64), n_outputs=0))
    first, second = plan.device_layers(placer.operators, placer.model.n_layer)
    assert plan.policy == "ranges" and first > 0 < second and plan.device == str(placer.device)
    last = [row for operator, row in plan.pairs(placer.operators) if operator.layer_in(8) > 8 - second]
    assert all(row.gg == 1 and row.device == 1 for row in last)
    assert_stocks_logits(plan, placer)

    served = Served(placer.model, placer.operators, plan, "as asked")
    model = ServedModel(placer, served, ProjectorOptions(), True, None)
    settings = ServerSettings(Address("127.0.0.1", 8080), 1, 1, None, "large", None)
    program = Path("llama-server")
    wanted = model.launch(model.wanted, tmp_path, program, settings)
    assert f"--rpc {endpoint} --device Emulated0,RPC0" in " ".join(wanted.command)
    assert model.fallback is not None and model.fallback.plan.device == str(placer.members[0].device)
    without = model.launch(model.fallback, tmp_path, program, settings)
    assert "--device Emulated0 " in " ".join(without.command) and "rpc" not in " ".join(without.command).lower()
    assert without.uses_device
