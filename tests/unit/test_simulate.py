"""`oallama simulate`: what runs on which stream, the machines, the command. Its report: tests/golden/report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import SMALL, World, bytes_of, some_plan

from oallama.cli.main import exit_code
from oallama.cli.served import as_asked as as_asked_for
from oallama.core.errors import PlanError, UsageError
from oallama.core.options import Options
from oallama.core.types import CPU_DEVICE, Attention, Workload
from oallama.core.units import MIB
from oallama.device.card import Card
from oallama.device.cards import CARDS, USUAL_PC
from oallama.device.machines import MACHINES, machine_of
from oallama.placer.described import plan_for
from oallama.plan.plan import Plan
from oallama.profile.described import host_profile

pytestmark = pytest.mark.usefixtures("small_cards")

TESTBEDS = Path(__file__).resolve().parents[2] / "scripts" / "reproduce" / "testbeds"
WORLD = World(model=SMALL)
DECODE = Workload(n_prompt=64, n_gen=8, n_ctx=256)


def world_on(machine: str, **facts: Any) -> World:
    """A small model on a machine by name or file, whose card has room for half of it."""
    on = machine_of(machine)
    return replace(World(model=SMALL, host=on.host, card=on.card, workload=DECODE), **facts)


#
# what runs when: that it adds up is in test_every_plan.py
#


def test_whole_operators_run_in_graph_order_where_they_are() -> None:
    world = world_on("pc-12gb")
    plan = world.plan("layers")
    works = sorted(world.simulate(plan).token.works, key=lambda work: work.start_s)
    found = [work for work in works if work.kind == "operator"]
    assert [work.name for work in found] == [operator.name for operator in world.operators]
    assert [work.stream == "gpu" for work in found] == [place.gg == 1 for place in plan.operators]
    assert {work.stream for work in found} == {"cpu", "gpu"}


def test_a_host_layer_of_a_large_prompt_is_streamed_and_computed_on_the_card() -> None:
    world = world_on("pc-24gb", share=0.4, workload=Workload(n_prompt=512, n_gen=8, n_ctx=1024))
    plan = world.plan("layers")
    made, name = world.simulate(plan), plan.operators[0].name
    assert plan.operators[0].cc == 1
    assert {(w.stream, w.kind) for w in made.prompt.works if w.name == name} == {("in", "weights"), ("gpu", "operator")}
    assert {"cache", "weights"} <= {work.kind for work in made.prompt.works}
    assert "weights" not in {work.kind for work in made.token.works}


@pytest.mark.parametrize("blocking", [False, True])
def test_streamed_slices_are_copied_while_the_cpu_computes_unless_the_device_blocks(blocking: bool) -> None:
    facts = (("device_asynchronous", False), ("device_backend", "RPC")) if blocking else ()
    world = world_on(f"{TESTBEDS}/scheinfer-a.json", share=0.3, device_facts=facts)
    works = world.simulate(world.plan("flexgen")).token.works
    copies = [work for work in works if work.kind == "stream"]
    others = [work for work in works if work.stream != "in"]
    assert copies and all(work.stream == "in" for work in copies)
    beside = sum(max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in copies for b in others)
    assert (beside > 1e-9) is not blocking


def test_a_plan_that_splits_what_the_device_cannot_compute_is_refused() -> None:
    world = world_on(f"{TESTBEDS}/scheinfer-a.json", share=0.3)
    plan = world.plan("flexgen")
    assert any(place.cg for place in plan.operators)
    of_cpu = (case for case in world.profile.cases if case.device == CPU_DEVICE)
    with pytest.raises(PlanError, match="cannot compute"):
        world.with_profile(cases=tuple(of_cpu)).simulate(plan)


def plan_on(machine: str) -> Plan:
    return world_on(machine).plan("layers")


def test_a_plan_is_simulated_on_any_machine_without_a_load() -> None:
    plan = plan_on("pc-12gb")
    small, large = (WORLD.alone().simulate(plan, machine=MACHINES[name]) for name in ("pc-12gb", "pc-24gb"))
    assert small.predicted.tpot_s == pytest.approx(plan.predicted.tpot_s, rel=1e-6)
    assert large.predicted.tpot_s < small.predicted.tpot_s
    longer = WORLD.alone().simulate(plan, replace(plan.workload, n_prompt=128), MACHINES["pc-12gb"])
    assert longer.predicted.ttft_s > small.predicted.ttft_s


def test_a_plan_of_another_model_is_refused() -> None:
    other = replace(plan_on("pc-12gb"), model_fingerprint="e" * 64)
    with pytest.raises(PlanError, match="made for"):
        WORLD.alone().simulate(other, machine=MACHINES["pc-12gb"])


def test_stock_fit_on_a_described_machine_keeps_to_the_memory_that_was_asked_for() -> None:
    def fit(**options: Any) -> Plan:
        return plan_for(replace(WORLD, options=Options(**options)).alone(), MACHINES["pc-12gb"], DECODE, "fit")

    weights = bytes_of(WORLD.operators)
    whole, part = fit(), fit(vram=weights // 2 + 2 * MIB)
    assert part.memory.capacity == weights // 2 + 2 * MIB < whole.memory.capacity
    assert part.memory.spare >= 0
    assert 0 < part.n_gpu_layers < whole.n_gpu_layers == WORLD.model.n_layer + 1
    with pytest.raises(UsageError, match="--vram"):
        fit(gpu_weights=0.5)


def test_a_plan_is_loaded_with_the_context_and_attention_that_are_asked_for() -> None:
    planned = some_plan((), attention=Attention(flash_attn="off", type_k="f16", type_v="f16"))

    def as_asked(**options: object) -> Plan:
        return as_asked_for(replace(WORLD, options=Options.given(**options)).alone(), planned)

    assert as_asked() == planned
    asked = as_asked(n_ctx=16384, n_ubatch=64, type_k="q8_0", flash_attn="on")
    assert asked == replace(
        planned,
        workload=replace(planned.workload, n_ctx=16384, n_ubatch=64),
        attention=Attention(flash_attn="on", type_k="q8_0", type_v="f16"),
    )


def test_a_plan_for_a_device_needs_one() -> None:
    profile = host_profile(USUAL_PC, WORLD.model, WORLD.operators, WORLD.tokens)
    with pytest.raises(PlanError, match="name one with --device"):
        WORLD.alone(profile).simulate(plan_on("pc-12gb"))


#
# machines
#


def test_the_presets_are_machines_that_people_buy() -> None:
    assert set(MACHINES) == {"pc-12gb", "pc-24gb"}
    for name, machine in MACHINES.items():
        assert machine.name == name and all(len(source) > 20 for _, source in machine.sources)


def test_an_unknown_machine_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"'pdp-11'.*pc-12gb.*pc-24gb"):
        machine_of("pdp-11")


def test_a_machine_may_come_from_a_file(tmp_path) -> None:
    host = {"name": "two cores", "bytes_per_s": 2e10, "flops_per_s": 1e11, "source": "STREAM"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "host": host, "card": "rtx3060"}))
    machine = machine_of(str(path))
    assert machine.card is CARDS["rtx3060-12"] and machine.host.bytes_per_s == 2e10
    card = {f: getattr(CARDS["h100"], f) for f in Card.__dataclass_fields__}
    path.write_text(json.dumps({"name": "mine", "host": host, "card": card}))
    assert machine_of(str(path)).card == CARDS["h100"]
    path.write_text(json.dumps({"name": "mine", "host": host, "card": card, "sources": {"CPU": "measured"}}))
    assert machine_of(str(path)).sources == (("CPU", "measured"),)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "not JSON"),
        ("[]", "needs name, host and card"),
        ('{"name": "m", "host": {"name": "h"}, "card": "rtx3060"}', "bytes_per_s is missing"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 0, "flops_per_s": 1, "source": ""}, "card": "rtx3060"}',
         "host: bytes_per_s must be above 0, not 0"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 1, "flops_per_s": 1, "source": ""}, "card": "pdp"}',
         "there is no card"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 1, "flops_per_s": 1, "source": ""}, "card": "rtx3060", '
         '"sources": ["a"]}', "sources must be texts"),
    ],
)  # fmt: skip
def test_a_bad_machine_file_is_refused(tmp_path, document: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(document)
    with pytest.raises(UsageError, match=said):
        machine_of(str(path))
    with pytest.raises(UsageError, match="cannot read"):
        machine_of(str(tmp_path / "none.json"))


#
# command
#


def test_the_command_refuses_what_does_not_go_together(tmp_path, capsys) -> None:
    assert exit_code(["simulate", "m.gguf", "--machine", "pdp-11"]) == 2
    assert "pc-24gb" in capsys.readouterr().err
    assert exit_code(["simulate", "m.gguf", "p.json", "--policy", "oato"]) == 2
    assert "--policy" in capsys.readouterr().err
    assert exit_code(["simulate", "m.gguf", "--machine", "pc-12gb", "--device", "CUDA0"]) == 2
    assert "--device" in capsys.readouterr().err
