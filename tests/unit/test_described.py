"""Machines and cards that are not here: profiles, `simulate`, `what-if`. What these print: tests/golden/report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import CARD, HOST, ROUTED, SMALL, World, bytes_of, model_info, some_plan, there, total_s

from oallama.cli.main import exit_code
from oallama.cli.what_if import parse_cards
from oallama.core.codec import to_json
from oallama.core.errors import PlanError, ProfileError, UsageError
from oallama.core.options import Options
from oallama.core.types import CPU_DEVICE, Attention, SplitSettings, Workload
from oallama.core.units import MIB
from oallama.device import cards as known
from oallama.device.card import Card
from oallama.device.cards import CARDS, USUAL_CARDS, USUAL_PC, preset
from oallama.device.machines import MACHINES, Machine, machine_of
from oallama.placer import Placer
from oallama.placer.described import alone_and_beside, plan_for
from oallama.plan.plan import Plan
from oallama.planner.placement import DeviceSlices, whole_bytes
from oallama.planner.policies.stock_devices import fitted
from oallama.planner.pure_plan import WhatIf
from oallama.profile.described import host_profile, with_card
from oallama.profile.merge import missing_contention, missing_link
from oallama.profile.store import profile_from_json
from oallama.profile.wanted import wanted
from oallama.report.what_if import CLAIM, what_if_document, what_if_table

pytestmark = pytest.mark.usefixtures("small_cards")

TESTBED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "testbeds" / "scheinfer-a.json"
WORLD = World(model=SMALL, tokens=(1, 32, 512))
MOE = replace(WORLD, model=ROUTED)
LOAD = Workload(n_prompt=512, n_gen=64, n_ctx=1024)


#
# profiles of described rates
#


def test_nothing_is_left_to_measure_and_it_can_be_stored() -> None:
    profile = MOE.profile
    want = wanted(MOE.model, MOE.operators, MOE.tokens, llc_bytes=0)
    assert missing_link(profile) == [] and missing_contention(profile, want) == []
    assert profile_from_json(to_json(profile)) == profile
    facts = profile.fingerprint
    assert facts["described"] and facts["device_host_buffer"] and facts["device_asynchronous"]
    assert profile.is_pinned and not profile.is_blocking


def test_a_measured_cpu_keeps_its_cases_and_loses_the_device_it_had() -> None:
    before = replace(WORLD, card=replace(CARD, name="another")).profile
    profile = with_card(before, CARD, SMALL, WORLD.operators, dram_bytes_per_s=45e9)
    assert profile.device == "card"
    assert {case.device for case in (*profile.cases, *profile.rest)} == {CPU_DEVICE, "card"}
    assert [c for c in profile.cases if c.device == CPU_DEVICE] == [c for c in before.cases if c.device == CPU_DEVICE]
    shared = profile.contention
    assert shared["cpu_with_link_gb_per_s"] + shared["link_with_cpu_gb_per_s"] == pytest.approx(45), "of the DRAM"
    with pytest.raises(ProfileError, match="no CPU mul-mat"):
        with_card(replace(before, cases=()), CARD, SMALL, WORLD.operators)


def test_a_card_is_not_described_to_compute_what_cuda_does_not() -> None:
    operators = tuple(replace(operator, input_f32=operator.role == "ffn_down_exps") for operator in MOE.operators)
    profile = with_card(host_profile(HOST, ROUTED, operators, MOE.tokens), CARD, ROUTED, operators)
    assert {case.device for case in profile.cases if case.mul_mat.input_f32} == {CPU_DEVICE}


@pytest.mark.parametrize("name", CARDS)
def test_a_described_card_gives_the_published_run_again(name: str) -> None:
    """LLaMA-2-7B Q4_0 whole on the card, priced by the cost model from the card's rates."""
    published = next(runs for runs in (*known._PUBLISHED, *known._UNPUBLISHED) if runs.name == name)
    llama = model_info(n_layer=32, n_embd=4096, n_ff=11008, n_head=32, n_head_kv=32, n_embd_head_k=128,
                       n_embd_head_v=128, n_vocab=32000)  # fmt: skip
    world = World(model=llama, host=USUAL_PC, card=preset(name), tokens=(1, 512), share=1.5)

    def seconds(n_prompt: int, n_gen: int) -> float:
        plan = replace(world, workload=Workload(n_prompt=n_prompt, n_gen=n_gen, n_ctx=512)).plan("fit")
        assert there(world, plan) == list(world.operators)
        return total_s(plan)

    assert 512 / seconds(512, 0) == pytest.approx(published.pp512, rel=0.05)
    assert 128 / (seconds(1, 128) - seconds(1, 0)) == pytest.approx(published.tg128, rel=0.05)


#
# machines
#


def test_presets_are_machines_that_people_buy_and_others_come_from_files(tmp_path: Path) -> None:
    assert set(MACHINES) == {"pc-12gb", "pc-24gb"}
    for name, machine in MACHINES.items():
        assert machine.name == name and all(len(source) > 20 for _, source in machine.sources)
    host = {"name": "two cores", "bytes_per_s": 2e10, "flops_per_s": 1e11, "source": "STREAM"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "host": host, "card": "rtx3060"}))
    machine = machine_of(str(path))
    assert machine.card is CARDS["rtx3060-12"] and machine.host.bytes_per_s == 2e10
    card = {f: getattr(CARDS["h100"], f) for f in Card.__dataclass_fields__}
    path.write_text(json.dumps({"name": "mine", "host": host, "card": card, "sources": {"CPU": "measured"}}))
    machine = machine_of(str(path))
    assert (machine.card, machine.sources) == (CARDS["h100"], (("CPU", "measured"),))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "not JSON"),
        ("[]", "needs name, host and card"),
        ('{"name": "m", "host": {"name": "h"}, "card": "rtx3060"}', "bytes_per_s is missing"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 0, "flops_per_s": 1, "source": ""}, "card": "rtx3060"}',
         "host: bytes_per_s must be above 0, not 0"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 1, "flops_per_s": 1, "source": ""}, "card": "pdp"}',
         "unknown card"),
        ('{"name": "m", "host": {"name": "h", "bytes_per_s": 1, "flops_per_s": 1, "source": ""}, "card": "rtx3060", '
         '"sources": ["a"]}', "sources must be an object"),
    ],
)  # fmt: skip
def test_a_bad_machine_file_is_refused(tmp_path: Path, document: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(document)
    with pytest.raises(UsageError, match=said):
        machine_of(str(path))


#
# simulate: that what runs adds up is in test_every_plan.py
#


def world_on(machine: str, **facts: Any) -> World:
    """A small model on a machine by name or file, whose card has room for half of it."""
    on = machine_of(machine)
    workload = Workload(n_prompt=64, n_gen=8, n_ctx=256)
    return replace(World(model=SMALL, host=on.host, card=on.card, workload=workload), **facts)


def plan_on(machine: str, **changes: Any) -> Plan:
    return replace(world_on(machine).plan("layers"), **changes)


def test_whole_operators_run_in_graph_order_where_they_are() -> None:
    world = world_on("pc-12gb")
    plan = world.plan("layers")
    works = sorted(world.simulate(plan).token.activities, key=lambda work: work.start_s)
    ran = [(work.name, work.stream) for work in works if work.kind == "operator"]
    assert ran == [(place.name, "gpu" if place.gg else "cpu") for place in plan.operators]
    assert {stream for _, stream in ran} == {"cpu", "gpu"}


@pytest.mark.parametrize("blocking", [False, True])
def test_the_device_computes_streamed_slices_beside_the_cpu_unless_its_calls_are_synchronous(blocking: bool) -> None:
    facts = (("device_asynchronous", False), ("device_backend", "RPC")) if blocking else ()
    world = world_on(str(TESTBED), share=0.3, device_facts=facts)
    works = world.simulate(world.plan("flexgen")).token.activities
    copies = [work for work in works if work.kind == "stream"]
    assert bool(copies) is not blocking and all(work.stream == "in" for work in copies)
    device = [work for work in works if work.kind == "slice" and work.stream == "gpu"]
    others = [work for work in works if work.stream == "cpu"]
    assert device and others
    beside = sum(
        max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a in [*copies, *device] for b in others
    )
    assert (beside > 1e-9) is not blocking


def test_a_plan_is_simulated_on_any_machine_without_a_load() -> None:
    plan = plan_on("pc-12gb")
    small, large = (WORLD.alone().simulate(plan, machine=MACHINES[name]) for name in ("pc-12gb", "pc-24gb"))
    assert small.predicted.tpot_s == pytest.approx(plan.predicted.tpot_s, rel=1e-6)
    assert large.predicted.tpot_s < small.predicted.tpot_s
    longer = WORLD.alone().simulate(plan, replace(plan.workload, n_prompt=128), MACHINES["pc-12gb"])
    assert longer.predicted.ttft_s > small.predicted.ttft_s


def test_stock_fit_on_a_described_machine_keeps_to_the_memory_that_was_asked_for() -> None:
    def fit(**options: Any) -> Plan:
        workload = Workload(n_prompt=64, n_gen=8, n_ctx=256)
        return plan_for(replace(WORLD, options=Options(**options)).alone(), MACHINES["pc-12gb"], workload, "fit")

    weights = bytes_of(WORLD.operators)
    whole, part = fit(), fit(vram=weights // 2 + 2 * MIB)
    assert part.memory.capacity == weights // 2 + 2 * MIB < whole.memory.capacity
    assert part.memory.spare >= 0
    assert 0 < part.n_gpu_layers < whole.n_gpu_layers == WORLD.model.n_layer + 1


def split_without_kernels() -> None:
    world = world_on(str(TESTBED), share=0.3)
    plan = world.plan("flexgen")
    of_cpu = (case for case in world.profile.cases if case.device == CPU_DEVICE)
    world.with_profile(cases=tuple(of_cpu)).simulate(plan)


def on_the_cpu_alone() -> None:
    profile = host_profile(USUAL_PC, WORLD.model, WORLD.operators, WORLD.tokens)
    WORLD.alone(profile).simulate(plan_on("pc-12gb"))


@pytest.mark.parametrize(
    ("refused", "kind", "says"),
    [
        (split_without_kernels, PlanError, "cannot compute"),
        (on_the_cpu_alone, PlanError, "choose it with --device"),
        (lambda: WORLD.alone().simulate(plan_on("pc-12gb", model_fingerprint="e" * 64), machine=MACHINES["pc-12gb"]),
         PlanError, "the plan is for"),
        (lambda: plan_for(replace(WORLD, options=Options(gpu_weights=0.5)).alone(), MACHINES["pc-12gb"], LOAD, "fit"),
         UsageError, "--vram"),
        (lambda: machine_of("pdp-11"), UsageError, r"'pdp-11'.*pc-12gb.*pc-24gb"),
        (lambda: machine_of("none.json"), UsageError, "cannot read"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_is_refused(refused: Callable[[], object], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        refused()


def test_a_plan_is_loaded_with_the_context_and_attention_that_are_asked_for() -> None:
    planned = some_plan((), attention=Attention(flash_attn="off", type_k="f16", type_v="f16"))

    def asked(**options: object) -> Plan:
        return replace(WORLD, options=Options.given(**options)).alone().as_asked(planned)

    assert asked() == planned
    assert asked(n_ctx=16384, n_ubatch=64, type_k="q8_0", flash_attn="on") == replace(
        planned,
        workload=replace(planned.workload, n_ctx=16384, n_ubatch=64),
        attention=Attention(flash_attn="on", type_k="q8_0", type_v="f16"),
    )


#
# what-if
#


def row_of(mib: float, policy: str = "auto", beside: float = 0.0, **facts: object) -> WhatIf:
    """A card of so much memory beside a small model's CPU; beside: MiB of a slower card in the same machine."""
    world = World(**{"model": SMALL, "workload": LOAD, **facts})
    profile = host_profile(HOST, world.model, world.operators, (1, 32, 512))
    layouts = (case for case in world.profile.cases if case.layout == "CPU_REPACK")
    placer = world.alone(replace(profile, cases=(*profile.cases, *layouts)))
    sizes = {"rtx3060": mib, **({"gtx1650": beside} if beside else {})}
    cards = tuple(replace(preset(name), memory_bytes=int(size * MIB)) for name, size in sizes.items())
    (row,) = alone_and_beside(placer, [cards], LOAD, policy)[1]
    return row


def test_a_card_that_has_room_for_all_needs_no_more_than_stock_and_one_without_any_leaves_it_on_the_cpu() -> None:
    row = row_of(1000)
    assert row.best is row.stock and row.best.policy == "fit" and row.gain == 1 and row.fits_whole
    none = row_of(0.5, repacked=2.0)
    assert none.best.policy == "cpu" and none.stock.memory.weights_gpu == 0


def test_stock_is_compared_with_at_its_fastest_which_is_no_host_where_the_cpus_own_layouts_gain_more() -> None:
    slow, fast = (row_of(12, repacked=factor) for factor in (0.0, 100.0))
    assert (slow.stock.policy, fast.stock.policy) == ("fit", "no-host")
    assert fast.stock.predicted.total_s < slow.stock.predicted.total_s
    assert fast.best.predicted.total_s <= fast.stock.predicted.total_s


@pytest.mark.parametrize(("model", "mib"), [(SMALL, 14), (ROUTED, 54)])
def test_the_quick_search_is_near_the_long_one(model, mib) -> None:
    card = replace(preset("rtx3060"), memory_bytes=mib * MIB)
    machine = Machine(name="m", description="", host=HOST, card=card, sources=())
    long = total_s(plan_for(World(model=model).alone(), machine, LOAD, "scheinfer"))
    quick = row_of(mib, "scheinfer", model=model).best
    assert quick.policy == "scheinfer" and 0.999 * long <= quick.predicted.total_s <= 1.3 * long


def test_limits_of_the_device_that_is_here_do_not_hold_for_cards() -> None:
    free, limited = (row_of(12, options=options) for options in (Options(), Options(vram=3 * MIB, gpu_weights=0.1)))
    assert limited.best.memory == free.best.memory and free.best.memory.limit == free.stock.memory.limit
    assert limited.best.predicted == free.best.predicted


def test_the_memory_breakdown_is_in_proportion_to_the_layers_there() -> None:
    whole, part = row_of(1000).stock, row_of(16).stock
    n_layers = SMALL.n_layer - part.placement.first_device_layer
    assert 0 < n_layers < SMALL.n_layer
    assert part.memory.kv == whole.memory.kv * n_layers // SMALL.n_layer
    assert part.memory.compute == whole.memory.compute == 2048 * 512


@pytest.mark.parametrize("policy", ["hetegen", "twinpilots", "flexgen", "atsinfer"])
def test_a_policy_of_choice_is_compared_whether_it_is_faster_or_not(policy: str) -> None:
    row = row_of(14, policy)
    assert row.best.policy == policy and row.best.memory.spare >= 0
    assert row_of(0.5, policy).best.policy == "cpu"


@pytest.mark.parametrize(("model", "mib", "beside"), [(SMALL, 14, 10), (ROUTED, 54, 20)])
def test_two_cards_in_one_machine_are_as_fast_as_the_faster_of_them_at_least(model, mib, beside) -> None:
    both, alone = (row_of(mib, model=model, beside=second) for second in (beside, 0.0))
    assert both.name == "rtx3060-12+gtx1650-4" and both.memory_bytes == (mib + beside) * MIB
    assert total_s(both.stock) <= total_s(alone.stock) and total_s(both.best) <= total_s(both.stock)
    if model is SMALL:  # whose slow card is faster than the CPU beside them
        assert both.stock_cards == (0, 1) and len(both.stock.memory.devices) == 2 and both.stock.memory.fits
    assert total_s(both.best) <= total_s(alone.best)
    placement = both.best.placement
    if both.best_cards == (0, 1):  # what lies there is counted once, slices included
        held = sum(own.held_bytes for own in placement.device_slices)
        there = whole_bytes(World(model=model).operators, placement.on_device) + held
        assert sum(device.weights_gpu for device in both.best.memory.devices) == there
        assert sum(placement.device_layers) == model.n_layer + 1 - placement.first_device_layer


def test_what_each_of_several_cards_has_is_told() -> None:
    row = row_of(14, beside=10)
    assert row.stock.placement.device_layers
    told = what_if_document(SMALL, LOAD, row.best, [row])["rows"][0]
    cards = told["cards"]
    assert [card["gpu"] for card in cards] == ["rtx3060-12", "gtx1650-4"]
    assert tuple(card["stock_n_layers"] for card in cards) == row.stock.placement.device_layers
    assert sum(card["device_bytes"] for card in cards) == told["device_bytes"]
    foot = " ".join(what_if_table(SMALL, LOAD, row.best, [row]).footer)
    layers = ", ".join(f"{card['gpu']} {card['stock_n_layers']}" for card in cards)
    assert "rtx3060-12+gtx1650-4: layers under oallama's plan: " in foot and f"llama.cpp's options: {layers}." in foot
    slices = (DeviceSlices(settings=SplitSettings(((1, 1),))),)
    sliced = replace(row, best=replace(row.best, placement=replace(row.best.placement, slices=slices)))
    foot = " ".join(what_if_table(SMALL, LOAD, row.best, [sliced]).footer)
    assert re.search(r"oallama's plan: rtx3060-12 \d+ and slices, gtx1650-4 \d+;", foot)
    assert what_if_table(SMALL, LOAD, row.best, [row]).rows[0][0] == "rtx3060-12+gtx1650-4"
    assert "cards" not in what_if_document(SMALL, LOAD, row.best, [row_of(14)])["rows"][0]


def test_a_policy_that_uses_one_card_is_refused_for_two() -> None:
    with pytest.raises(UsageError, match="policy scheinfer uses one card"):
        row_of(14, "scheinfer", beside=10)


def test_plus_joins_cards_of_one_machine_and_the_comma_separates_rows() -> None:
    first, second = preset("rtx3060"), preset("gtx1650")
    assert parse_cards("rtx3060-12+gtx1650-4, RTX 3060") == ((first, second), (first,))
    assert parse_cards("rtx3060+rtx3060") == ((first, first),)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=8),
    free=st.lists(st.integers(0, 120), min_size=1, max_size=3), has_experts=st.booleans(),
)  # fmt: skip
def test_what_fit_is_taken_to_give_each_device_fits_it(sizes, free, has_experts) -> None:
    """A size of a layer is that without experts, and that of its experts."""

    def fits(device: int, begin: int, end: int, full: int) -> bool:
        used = sum(size for size, _ in sizes[begin:end]) + sum(size for _, size in sizes[begin : min(end, full)])
        return used <= free[device]

    bounds, full = fitted(len(sizes), [1 + n for n in free], fits, has_experts)
    assert bounds == sorted(bounds) and bounds[-1] == len(sizes) and len(bounds) == len(free) + 1
    assert all(fits(device, begin, end, full) for device, (begin, end) in enumerate(pairwise(bounds)))
    if len(free) == 1 and not has_experts:  # as many of the last as fit
        assert bounds[0] == 0 or not fits(0, bounds[0] - 1, len(sizes), full)


#
# the commands
#


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["what-if", "no.gguf", "--gpu", "rtx9090"],
            "unknown card 'rtx9090' (did you mean rtx5090?); choose from gtx1650-4",
        ),
        (["what-if", "no.gguf", "--gpu", "teapot"], "unknown card 'teapot'; choose from gtx1650-4"),
        (["what-if", "no.gguf", "--gpu", ","], "unknown card"),
        (["what-if", "no.gguf", "--gpu", "rtx3060+rtx9090"], "unknown card 'rtx9090'"),
        (["what-if", "no.gguf", "--vram-fill", "2"], "is not between 0 and 1"),
        (["what-if", "no.gguf", "--ram-speed", "fast"], "'fast' is not a number from 1 to 10000"),
        (["what-if", "no.gguf", "--ram-speed", "nan"], "'nan' is not a number from 1 to 10000"),
        (["what-if", "no.gguf", "--cores", "0"], "is not a whole number"),
        (["what-if", "no.gguf", "--profile", "p.json", "--cores", "4"], "cannot be combined with --cores"),
        (["what-if", "no.gguf"], "no.gguf"),
        (["what-if", "llama9", "--cores", "4"], "llama9 is neither a GGUF file nor a downloaded model"),
        (["what-if", "llama9", "--cores", "4"], "; known by name: llama-3.2-1b, "),
        (["what-if", "gema-3-27b", "--cores", "4"], "(did you mean gemma-3-27b?); known by name: "),
        (["what-if", "gpt-oss-20b:Q4_K", "--cores", "4"], "must be a multiple of 256 for Q4_K; choose another type"),
        (["simulate", "m.gguf", "--machine", "pdp-11"], "pc-24gb"),
        (["simulate", "m.gguf", "p.json", "--policy", "oato"], "--policy"),
        (["simulate", "m.gguf", "--machine", "pc-12gb", "--device", "CUDA0"], "--device"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, arguments, says) -> None:
    assert exit_code(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err


def test_what_if_beside_the_cpu_that_was_measured(capsys, monkeypatch) -> None:
    """By a placer that knows the small model and its CPU, without loads; then other programs were running."""
    world, busy = World(model=SMALL, workload=LOAD), 0.0

    def of_file(path: str, options: Options, profile: object, no_alloc_loader: Any) -> Placer:
        assert options.device == "none"
        made = host_profile(HOST, world.model, world.operators, (1, 32, 512))
        made = replace(made, fingerprint={**made.fingerprint, "others_cpu_percent": busy})
        return Placer(world.model, world.operators, (), options, made, no_alloc_loader)

    def answer(*arguments: str, code: int = 0, model: str = "m.gguf") -> Any:
        assert exit_code(["what-if", model, *arguments]) == code
        return capsys.readouterr()

    monkeypatch.setattr("oallama.placer.Placer.of_file", of_file)
    monkeypatch.setenv("OALLAMA_BUSY_PERCENT", "20")
    counted = world.alone().no_alloc_loads
    monkeypatch.setattr("oallama.placer.model_on_device.NoAllocLoads", lambda *_: counted)
    said = answer().out
    assert CLAIM in " ".join(said.split()) and all(f"\n{name} " in said for name in USUAL_CARDS)
    rows = json.loads(answer("--gpu", "rtx3060,H100,rtx3060-12", "--json").out)["rows"]
    assert [row["gpu"] for row in rows] == ["rtx3060-12", "h100"]
    named = json.loads(answer("--gpu", "h100", "--json", model="gemma-3-27b:Q8_0").out)
    assert named["model"]["path"] == "gemma-3-27b:Q8_0", "not that of a temporary file"
    said = answer("--gpu", "rtx3060,rtx4090", "--vram", "6GiB", "--ram-speed", "40", "--cores", "6").out
    assert len(re.findall(r"^rtx\S+ +6 GiB", said, re.MULTILINE)) == 2
    assert "beside 6 cores of Zen 4, memory of 40 GB/s" in " ".join(said.split())
    assert len(json.loads(answer("--gpu", "all", "--json").out)["rows"]) == len(CARDS)
    busy = 60.0
    (line,) = answer("--gpu", "rtx3060").err.splitlines()
    assert line.startswith("note: ") and "60 % of the CPU" in line
