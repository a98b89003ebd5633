"""Several devices: their names, ranges of layers, plans over them as files and as command lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from worlds import (
    CARD,
    HOST,
    SMALL,
    World,
    bytes_of,
    model_info,
    placed,
    some_plan,
    weights_of,
    worlds,
)

from oallama.cli.main import exit_code
from oallama.core.errors import DoesNotFit, PlanError, UsageError
from oallama.core.options import Options
from oallama.core.types import Attention, DeviceInfo, MemoryBreakdown, SplitSettings, StreamSettings, Workload
from oallama.cost.blocks import is_ffn, slice_weights
from oallama.cost.passes import passes
from oallama.cost.ranges import ranges_seconds
from oallama.cost.slices import Cut
from oallama.cost.whole import placement_seconds
from oallama.device.card import Card
from oallama.device.identity import KnownDevice
from oallama.device.opening import local_gpus
from oallama.device.spec import device_for_plan, parse_device
from oallama.model.cut import cut_extent
from oallama.placer import Placer
from oallama.placer.model_on_device import in_order_of_speed
from oallama.placer.plans import plan_over_devices
from oallama.plan.export import Plugin, split_devices, stock_command
from oallama.plan.patterns import split_names
from oallama.plan.plan import Plan
from oallama.plan.plugin_text import plugin_text, split_texts
from oallama.planner.attention import AttentionRule, Problems
from oallama.planner.decide import plan
from oallama.planner.parts import problem_in, sliced_parts
from oallama.planner.placement import (
    ON_DEVICE,
    ON_HOST,
    Assignment,
    DeviceSlices,
    Placement,
    operator_rows,
    placed_by_plan,
    whole_bytes,
)
from oallama.planner.policies.oato import oato
from oallama.planner.policies.ranges import on_each, ranges
from oallama.planner.policies.registry import Request
from oallama.planner.policies.stock_devices import layers_by_share
from oallama.planner.price import price
from oallama.planner.problem import (
    LoadBytes,
    Problem,
    costs_of,
    costs_over,
    device_costs,
    empty_memory,
    memory_of,
)
from oallama.planner.pure_plan import Memory, pure_problem
from oallama.planner.ranges import Ranges, WholeRanges
from oallama.planner.slicer import slicer_of
from oallama.planner.staging import staging_bytes
from oallama.profile.store import profile_from_json
from oallama.report.plan import plan_sentences
from oallama.run.stock import Cap, StockPlacement

pytestmark = pytest.mark.usefixtures("small_cards")

TWO = "emulated:rtx3060-12,vram=8589934592,emulated:gtx1650-4"

#
# names
#


@pytest.mark.parametrize(
    "text, each",
    [
        ("CUDA0,CUDA1", ["CUDA0", "CUDA1"]),
        ("Vulkan1, Vulkan0", ["Vulkan1", "Vulkan0"]),
        ("emulated:rtx3060,vram=8GiB,emulated:gtx1650", ["emulated:rtx3060-12,vram=8589934592", "emulated:gtx1650-4"]),
        ("emulated,emulated", ["emulated:rtx3060-12", "emulated:rtx3060-12"]),
        ("emulated:rtx3060,scale=2/3,seed=1", ["emulated:rtx3060-12,scale=2/3,seed=1"]),
        ("CUDA0,rpc://10.0.0.2:50052", ["CUDA0", "rpc://10.0.0.2:50052"]),
        ("emulated,vram=1GiB,rpc://h:1,rpc://h:2", ["emulated:rtx3060-12,vram=1073741824", "rpc://h:1", "rpc://h:2"]),
    ],
)  # fmt: skip
def test_a_part_without_an_equals_sign_begins_another_device(text: str, each: list[str]) -> None:
    spec = parse_device(text)
    assert [str(one) for one in spec.each] == each
    assert parse_device(str(spec)) == spec
    assert not any(one.others for one in spec.each)


@pytest.mark.parametrize(
    "text, why",
    [
        ("CUDA0,cuda0", "names cuda0 twice"),
        ("rpc://10.0.0.2:50052,CUDA0", "all be local GPUs, or all be emulated, with RPC servers behind them"),
        ("CUDA0,rpc://10.0.0.2:50052,CUDA1", "with RPC servers behind them"),
        ("rpc://10.0.0.2:50052,rpc://10.0.0.3:50052", "all be local GPUs"),
        ("CUDA0,rpc://h:1,rpc://h:1", "names h:1 twice"),
        ("CUDA0,emulated:rtx3060", "all be local GPUs"),
        ("auto,CUDA0", "all be local GPUs"),
        ("CUDA0,none", "all be local GPUs"),
        ("emulated:rtx3060,vram", "all be local GPUs"),
    ],
)
def test_what_several_devices_cannot_be_is_one_sentence(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_device(text)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"vram": "6GiB"}, "--vram gives one size, but --device names 2"),
        ({"vram": "6GiB,4GiB,2GiB"}, "--vram gives 3 sizes, but --device names 2"),
        ({"vram": "6GiB,4GiB", "gpu_weights": "50%"}, "--gpu-weights needs one device"),
    ],
)
def test_options_of_one_device_are_refused_for_two(options: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Placer(SMALL, weights_of(SMALL), [], Options.given(device="CUDA0,CUDA1", **options))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [KnownDevice(parse_device(name)) for name in ("CUDA0", "CUDA1")]
    monkeypatch.setattr("oallama.placer.model_on_device.found_gpus", lambda: gpus)
    monkeypatch.setattr("oallama.placer.model_on_device.in_order_of_speed", lambda members: members[::-1])


def test_where_no_device_is_named_all_gpus_are_used_the_fastest_first(two_gpus: None) -> None:
    placer = Placer(SMALL, weights_of(SMALL), [], Options())
    assert str(placer.device) == "CUDA1,CUDA0" and placer.chose_devices
    assert [str(member.device) for member in placer.members] == ["CUDA1", "CUDA0"]
    with pytest.raises(
        UsageError, match="policy oato needs a single device, but 2 are in use; choose one with --device: CUDA1, CUDA0"
    ):
        plan_over_devices(placer, Request(LONG, oato), lambda member: a_plan())
    named = Placer(SMALL, weights_of(SMALL), [], Options(device="CUDA0,CUDA1"))
    assert str(named.device) == "CUDA0,CUDA1" and not named.chose_devices


@pytest.mark.parametrize("options", [{"vram": "6GiB"}, {"gpu_weights": "50%"}, {"device": "none"}])
def test_an_option_of_one_device_chooses_the_first_as_ever(two_gpus: None, options: dict[str, str]) -> None:
    placer = Placer(SMALL, weights_of(SMALL), [], Options.given(**options))
    assert not placer.members and placer.device.kind in ("auto", "none")


def test_devices_are_in_the_order_of_speed_where_all_were_measured_and_differ() -> None:
    def on(card: Card, **options: object) -> Placer:
        profile = None if options else replace(World(model=SMALL), card=card).profile
        return Placer(SMALL, weights_of(SMALL), [], Options(device="none"), profile)

    slow, fast, as_fast = on(SLOW), on(CARD), on(replace(CARD, bytes_per_s=1.02 * CARD.bytes_per_s))
    assert in_order_of_speed((slow, fast)) == (fast, slow) == in_order_of_speed((fast, slow))
    assert in_order_of_speed((slow, fast, as_fast)) == (fast, as_fast, slow)
    assert in_order_of_speed((slow, fast, on(CARD, unmeasured=True)))[0] is slow


def test_each_of_several_devices_is_profiled_and_one_exported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    profiles = [replace(World(model=SMALL), card=card).profile for card in (CARD, replace(SLOW, name="slow"))]
    placer = Placer(SMALL, weights_of(SMALL), [], Options(device="CUDA0,CUDA1"))
    for member, profile in zip(placer.members, profiles, strict=True):
        member._profile = profile
    monkeypatch.setattr(Placer, "of_file", lambda *_: placer)
    assert exit_code(["profile", str(model), "--json"]) == 0
    assert [profile_from_json(one) for one in json.loads(capsys.readouterr().out)] == profiles
    assert exit_code(["profile", str(model)]) == 0
    assert {"card", "slow"} <= set(capsys.readouterr().out.split())
    assert exit_code(["profile", str(model), "--export", str(tmp_path / "p.json")]) == 2
    assert "--export needs a single device, but 2 are in use" in capsys.readouterr().err


def test_the_gpus_that_there_are_have_the_first_ones_back_end_and_no_integrated_one_beside_them() -> None:
    def gpu(name: str, kind: str = "GPU") -> DeviceInfo:
        return DeviceInfo(name, f"{name}'s", name[:-1], kind, 1, 1, True, True, True)

    names = [gpu("CUDA0"), gpu("CUDA1"), gpu("Vulkan0"), gpu("Vulkan1", "IGPU"), gpu("RPC0"), gpu("CPU0", "CPU")]
    assert [one.name for one in local_gpus(names)] == ["CUDA0", "CUDA1"]
    assert [one.name for one in local_gpus([gpu("Vulkan0", "IGPU"), gpu("CPU0", "CPU")])] == ["Vulkan0"]
    assert local_gpus([gpu("CPU0", "CPU")]) == []


def test_each_device_has_its_own_memory_and_the_first_ones_is_that_of_one_device() -> None:
    assert Options.given(vram="10GiB,6GiB") == Options(vram=10 << 30, other_vram=(6 << 30,))
    assert Options.given(vram="10GiB") == Options(vram=10 << 30)
    placer = Placer(SMALL, weights_of(SMALL), [], Options.given(device="CUDA0,CUDA1", vram="10GiB,6GiB"))
    assert [(str(one.device), one.options.vram) for one in placer.members] == [("CUDA0", 10 << 30), ("CUDA1", 6 << 30)]
    with pytest.raises(UsageError, match="--vram gives 2 sizes, but --device names 1"):
        Placer(SMALL, weights_of(SMALL), [], Options.given(device="CUDA0", vram="10GiB,6GiB"))


def test_a_plan_that_leaves_devices_out_runs_on_its_own_and_one_of_more_is_refused() -> None:
    assert device_for_plan("CUDA0,CUDA1", "CUDA1") == "CUDA1"
    assert device_for_plan("Vulkan0,Vulkan1", "CUDA0,CUDA1") == "Vulkan0,Vulkan1"
    assert device_for_plan(None, "CUDA0,CUDA1") == "CUDA0,CUDA1"
    with pytest.raises(
        UsageError, match=r"your prompts to rpc://h:1; if you trust that server, add --device CUDA0,rpc"
    ):
        device_for_plan(None, "CUDA0,rpc://h:1")
    with pytest.raises(UsageError, match="uses 2 devices, but --device names 1"):
        device_for_plan("CUDA0", "CUDA0,CUDA1")
    placer = Placer(SMALL, weights_of(SMALL), [], Options.given(device="CUDA0,CUDA1,CUDA2"))
    for named in ("rpc://h:1", "CUDA0,rpc://h:1"):
        with pytest.raises(UsageError, match="your prompts to rpc://h:1"):
            placer.on_devices_of(some_plan((), device=named))


#
# ranges
#


@settings(max_examples=examples(60))
@given(data=st.data(), n_layers=st.integers(1, 5), n_devices=st.integers(1, 3))
def test_ranges_are_the_best_of_all_contiguous_ones(data: st.DataObject, n_layers: int, n_devices: int) -> None:
    """Against every first layer and every place where one device's range may end. Whole numbers add up exactly."""
    seconds_of = st.sampled_from([0.0, 1.0, 2.0, 3.0, 7.0, float("inf")])
    host = [0.0, *data.draw(st.lists(st.sampled_from([1.0, 2.0, 5.0, 9.0]), min_size=n_layers, max_size=n_layers))]
    spans = [(begin, end) for begin in range(n_layers) for end in range(begin + 1, n_layers + 1)]
    table = {(device, *span): data.draw(seconds_of) for device, span in product(range(n_devices), spans)}
    entries = {
        (last, device, layer): data.draw(st.sampled_from([0.0, 1.0, 4.0]))
        for device in range(n_devices) for last in range(device) for layer in range(1, n_layers)
    }  # fmt: skip

    def total(bounds: Sequence[int]) -> float:
        found, last = sum(host[: bounds[0] + 1]), None
        for device, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                found += table[device, begin, end] + (0.0 if last is None else entries[last, device, begin])
                last = device
        return found

    def every() -> Iterator[tuple[int, ...]]:
        yield (*(n_layers,) * n_devices, n_layers)
        for bounds in combinations_with_replacement(range(n_layers + 1), n_devices):
            yield (*bounds, n_layers)

    ranges = Ranges(
        n_layers, n_devices, lambda *span: table[span], lambda last, device, layer: entries[last, device, layer]
    )
    found_s, first, layers = ranges.best(lambda first: sum(host[: first + 1]))
    bounds = [first]
    for n in layers:
        bounds.append(bounds[-1] + n)
    assert found_s == min(map(total, every())) == total(bounds)
    assert bounds[-1] == n_layers


@settings(max_examples=examples(40))
@given(world=worlds(), data=st.data())
def test_one_device_with_all_ranges_costs_what_one_device_costs(world: World, data: st.DataObject) -> None:
    problem = problem_over([world])
    first = data.draw(st.integers(0, world.model.n_layer))
    sides = [layer >= first and data.draw(st.booleans()) for layer in problem.graph.operator_layer]
    over = passes(world.workload, "mixed")
    costs = costs_of(problem.devices[0], world.workload, "mixed")
    of_ranges = ranges_seconds(device_costs(problem, over), (world.model.n_layer + 1 - first,), sides, first, {})
    assert of_ranges == pytest.approx(placement_seconds(costs, sides, first))


SLOW = replace(CARD, bytes_per_s=CARD.bytes_per_s / 4, flops_per_s=CARD.flops_per_s / 8)
LONG = Workload(n_prompt=64, n_gen=200, n_ctx=512)
DEEP = model_info(n_layer=12, n_embd=1024, n_ff=2048)


def two(first: float, second: float, slow: object = SLOW, **facts: object) -> list[World]:
    """A fast card and a slow one, with room for such shares of the weights."""
    world = replace(World(model=DEEP, workload=LONG), **facts)
    return [replace(world, share=first), replace(world, share=second, card=slow)]


def problem_over(each: Sequence[World]) -> Problem:
    """What a placement over all takes: on each device its operators, its layers' KV, and buffers of its own."""
    problems = tuple(
        pure_problem(one.header, one.profile, replace(one.options, gpu_weights=None),
                     Memory(one.device_bytes, 0, one.taken), "on")
        for one in each
    )  # fmt: skip
    first = each[0]

    def taken(workload: Workload, placement: Placement) -> LoadBytes:
        if not placement.device_layers:
            return problems[0].no_alloc_load(workload, placement)
        host = first.taken(workload, Attention("on"))
        slices = [beside.held_bytes + beside.staging_bytes for beside in placement.device_slices]
        parts = [
            LoadBytes(n_bytes - own, 0, host.kv * n_blocks // first.model.n_layer, host.compute, w.device_bytes)
            for w, own, (n_blocks, n_bytes) in zip(each, slices, on_each(problems[0], placement), strict=True)
        ]
        on_cards = whole_bytes(first.operators, placement.on_device)
        return LoadBytes(on_cards, host.weights_host - on_cards, host.kv, host.compute, 0, tuple(parts))

    return replace(problems[0], no_alloc_load=taken, devices=problems)


def planned(each: Sequence[World], device: str = "CUDA0,CUDA1") -> Plan:
    world, problem = each[0], problem_over(each)
    problems = Problems(AttentionRule(world.model, world.options), world.profile, lambda _: problem)
    return plan(problems, Request(world.workload, ranges), device)


def test_two_cards_share_what_neither_holds_and_each_fits() -> None:
    each = two(0.6, 0.5)
    found = planned(each)
    layers = found.device_layers(each[0].operators, DEEP.n_layer)
    assert found.device == "CUDA0,CUDA1" and sum(layers) == DEEP.n_layer + 1 and layers[0] > layers[1] > 0
    assert all(place.gg == 1 for place in found.operators)
    assert len(found.memory.devices) == 2 and found.memory.fits
    assert found.memory.spare == sum(one.spare for one in found.memory.devices)
    alone = [world.plan("oato") for world in each]
    assert found.predicted is not None
    assert found.predicted.total_s < min(one.predicted.total_s for one in alone if one.predicted)


@pytest.mark.parametrize("required", [True, False])
def test_cards_that_no_placement_fits_are_left_alone_unless_they_are_required(required: bool) -> None:
    """Weights that move to the host need as much memory on the device again."""
    each = two(0.6, 0.5)
    problem = problem_over(each)

    def full(load: LoadBytes) -> LoadBytes:
        return replace(load, compute=int(0.9 * load.device_free) + 1 - load.weights_gpu - load.kv)

    def taken(workload: Workload, placement: Placement) -> LoadBytes:
        load = problem.no_alloc_load(workload, placement)
        return replace(load, devices=tuple(map(full, load.devices)))

    request = Request(LONG, ranges, required=required)
    with pytest.raises(DoesNotFit) if required else nullcontext():
        found = ranges.place(replace(problem, no_alloc_load=taken), request)
        assert found.policy == "cpu" and not found.placement.uses_device(DEEP.n_layer)


def test_a_card_that_slows_gets_no_layer() -> None:
    """The first holds everything."""
    assert planned(two(1.2, 1.2)).device == "none", "fewer than two devices: the plan on one of them is another's"
    slower_than_the_cpu = replace(SLOW, bytes_per_s=1e9, flops_per_s=1e9, flops_float_per_s=1e9)
    assert planned(two(0.5, 1.0, slower_than_the_cpu)).device == "none"


@settings(max_examples=examples(20))
@given(second=st.floats(0.1, 0.9), n_expert=st.sampled_from([0, 4]))
def test_another_machine_gets_whole_layers_and_the_last_ones(second: float, n_expert: int) -> None:
    """So a token crosses the network once, however much is left on the host."""
    model = model_info(n_layer=8, n_embd=512, n_ff=1024, n_expert=n_expert, n_expert_used=min(2, n_expert))
    each = two(0.3, second, CARD, model=model)
    remote = replace(each[1].profile, fingerprint={**each[1].profile.fingerprint, "device_backend": "RPC"})
    problem = problem_over(each)
    problem = replace(problem, devices=(problem.devices[0], replace(problem.devices[1], profile=remote)))
    found = ranges.place(problem, Request(each[0].workload, ranges)).placement
    if not found.device_layers:
        return
    begin = model.n_layer + 1 - found.device_layers[1]
    there = zip(problem.graph.operator_layer, found.on_device, strict=True)
    assert all(here for layer, here in there if layer >= begin)


def test_layers_that_fit_neither_stay_on_the_host() -> None:
    each = two(0.4, 0.2)
    found = planned(each)
    assert 0 < found.n_gpu_layers <= DEEP.n_layer + 1 and found.memory.fits
    on_host = [o for o, place in zip(each[0].operators, found.operators, strict=True) if place.gg == 0]
    assert 0.2 * bytes_of(each[0].operators) < bytes_of(on_host) < 0.6 * bytes_of(each[0].operators)


def test_of_experts_each_card_has_attention_first() -> None:
    model = model_info(n_layer=8, n_embd=512, n_ff=1024, n_expert=8, n_expert_used=2)
    each = two(0.3, 0.2, model=model)
    found = planned(each)
    assert found.n_gpu_layers == model.n_layer + 1
    sides = {(o.role, place.gg) for o, place in zip(each[0].operators, found.operators, strict=True)}
    assert ("attn_q", 0.0) not in sides and {("ffn_up_exps", 0.0), ("ffn_up_exps", 1.0)} <= sides


#
# splits beside each device
#


@settings(max_examples=examples(40))
@given(world=worlds(), another=worlds(), data=st.data())
def test_a_part_by_itself_costs_what_its_range_costs(world: World, another: World, data: st.DataObject) -> None:
    """Of whole operators: the layers of a device with the host's before them, or those behind another device's, which
    streams what the host has."""
    problem, n_layer = problem_over([world, replace(world, card=another.card)]), world.model.n_layer
    window = begin, end = data.draw(st.sampled_from([(a, b) for b in range(1, n_layer + 2) for a in range(b)]))
    first = begin or data.draw(st.integers(0, end - 1))
    sides = [layer >= first and data.draw(st.booleans()) for layer in problem.graph.operator_layer]
    low, high = problem.graph.operators_of(window)
    device = 1 if begin else 0
    costs = device_costs(problem, passes(world.workload, "mixed"))[device].costs
    own = costs_over(problem_in(problem, device, window), costs.passes, layouts=costs.layouts[low:high])
    of_part = placement_seconds(own, sides[low:high], first - begin)
    assert of_part == pytest.approx(placement_seconds(costs, sides, first, window=window))


def test_what_the_host_has_of_a_later_cards_layers_is_streamed_to_the_first() -> None:
    """In large batches, whose inputs and results cross between the cards."""
    problem = problem_over(two(0.4, 0.2))
    workload = replace(LONG, n_prompt=512, n_gen=1)
    window = 5, 9
    own, first = (
        costs_of(replace(problem_in(problem, device, window), first=None), workload, "prefill") for device in (1, 0)
    )
    behind = costs_of(problem_in(problem, 1, window), workload, "prefill")
    assert all(here.t_cpu_s > there.t_cpu_s for here, there in zip(own.operators, first.operators, strict=True))
    assert [one.t_cpu_s for one in behind.operators] == [one.t_cpu_s for one in first.operators]
    assert [one.t_gpu_s for one in behind.operators] == [one.t_gpu_s for one in own.operators]
    there = [True] * len(behind.operators)
    assert placement_seconds(behind, there, 0) == placement_seconds(own, there, 0)
    ffn = [not is_ffn(o) for o in problem_in(problem, 1, window).operators]
    as_from_host = replace(behind, to_first=None, offloaded=())
    assert placement_seconds(behind, ffn, 0) > placement_seconds(as_from_host, ffn, 0)
    assert placement_seconds(behind, ffn, 0, {i for i, here in enumerate(ffn) if not here}) == placement_seconds(
        as_from_host, ffn, 0, {i for i, here in enumerate(ffn) if not here}
    ), "slices are the split back end's"


def cut_like(problem: Problem, workload: Workload, border: int, gg: float, cg: float, alone: bool) -> Placement | None:
    """All layers before the border on the first device, their FFNs cut at these shares; the others whole on the second.
    alone: with nothing on the first device but slices. None: too small to be cut so."""
    n_layer, places = problem.graph.n_layer, list[Assignment]()
    for operator, layer in zip(problem.operators, problem.graph.operator_layer, strict=True):
        if layer < border and is_ffn(operator):
            extent, step = cut_extent(operator), 256  # whole groups of every layout and type
            on_gg, on_cg = (int(share * extent / step) * step for share in (gg, cg))
            if not on_gg + on_cg:
                return None
            places.append(Assignment(Cut(extent - on_gg - on_cg, on_cg, on_gg)))
        else:
            places.append(ON_HOST if alone and layer < border else ON_DEVICE)
    layers = (0 if alone else border), n_layer + 1 - border
    placement = Placement(
        tuple(places), n_layer + 1 - sum(layers), device_layers=layers,
        slices=(DeviceSlices(
            slice_weights(problem.operators, [0 if p.is_device else p.cut.gg for p in places]),
            staging_bytes=1,  # more than none, until it is known
            settings=SplitSettings(streaming=StreamSettings() if cg else None),
        ),),
    )  # fmt: skip
    ((part, own),) = sliced_parts(problem, placement).values()
    _, cut = slicer_of(part, workload, own).cuts_of(own)
    n_bytes = staging_bytes(cut, StreamSettings(), workload.largest_batch, 0)
    return replace(placement, slices=(replace(placement.first_slices, staging_bytes=n_bytes),))


@settings(max_examples=examples(20))
@given(world=worlds(), another=worlds())
def test_splits_are_as_good_as_any_border_and_shares(world: World, another: World) -> None:
    """Against every border, with shares of all FFNs before it on a grid, that fits both devices."""
    world = replace(world, model=replace(world.model, n_expert=0, n_expert_used=0), options=Options(flash_attn="on"))
    problem, workload = problem_over([world, replace(world, card=another.card, share=another.share)]), world.workload
    problem = problem.of_step(workload.step)
    if any(can is False for o, can in zip(problem.operators, problem.splittable, strict=True) if is_ffn(o)):
        return
    try:
        found = ranges.place(problem, Request(workload))
    except DoesNotFit:
        return
    assert found.memory.fits
    if len(found.placement.devices_used) < 2:
        return
    shares = [(gg, cg) for gg, cg in product((0.0, 0.25, 0.5, 0.75), (0.0, 0.25)) if 0 < gg + cg < 1]
    tried = (
        cut_like(problem, workload, border, *each, alone)
        for border in range(1, world.model.n_layer + 1) for each in shares for alone in (False, True)
    )  # fmt: skip
    least_s = min(
        (price(problem, workload, p).total_s for p in tried if p is not None and memory_of(problem, workload, p).fits),
        default=float("inf"),
    )
    assert found.predicted.total_s <= 1.05 * least_s


def test_what_fits_neither_card_is_split_beside_both() -> None:
    large, slow = model_info(n_layer=8, n_embd=4096, n_ff=12288), replace(HOST, bytes_per_s=HOST.bytes_per_s / 4)
    each = two(0.4, 0.2, model=large, host=slow)
    found, problem = planned(each), problem_over(each)
    assert found.policy == "ranges" and found.memory.fits and found.version == 3
    rows = list(zip(each[0].operators, found.operators, strict=True))
    assert {place.device for _, place in rows if place.backend == "split"} == {0, 1}
    first, second = found.memory.devices
    assert first.staging > 0 and second.staging > 0 and found.memory.staging == first.staging + second.staging
    assert found.split_settings[1].streaming != found.split_settings[0].streaming, "each ring is for its own link"
    costs = device_costs(problem, passes(LONG, "mixed"))
    memories = [empty_memory(one, LONG) for one in problem.devices]
    budgets = [lambda n, memory=memory: memory.operator_budget(memory.n_layer - n) for memory in memories]
    whole = WholeRanges(costs, each[0].operators, budgets).best()
    assert found.predicted is not None
    assert found.predicted.total_s < 0.9 * price(problem, LONG, whole).total_s


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("n_expert", [0, 4])
def test_what_is_priced_as_living_on_a_device_lives_there(n_expert: int, biased: bool, hot: bool) -> None:
    """Behind the first device not what another one may give its input to."""
    model = replace(DEEP, n_expert=n_expert, n_expert_used=min(2, n_expert))
    problem = problem_over(two(0.4, 0.2, model=model, biased=biased))
    hot_experts = (0, 2) if hot else ()
    places = []
    for operator, can in zip(problem.operators, problem.splittable, strict=True):
        extent, routed = cut_extent(operator), operator.op == "MUL_MAT_ID"
        cut = Cut(extent, 0, 0) if hot and routed else Cut(extent // 2, 0, extent - extent // 2)
        split = can and operator.layer is not None and (routed or not n_expert or not is_ffn(operator))
        places.append(Assignment(cut, None, hot_experts if routed else ()) if split else ON_DEVICE)
    border, n_layers = 5, model.n_layer + 1
    slices = (DeviceSlices(gg_bytes=1),) * 2
    placement = Placement(tuple(places), 1, device_layers=(border - 1, n_layers - border), slices=slices)
    text = "".join(
        split_texts(problem.operators, operator_rows(problem.operators, placement), 1, [SplitSettings()] * 2)
    )
    told = {line.split()[1] for line in text.splitlines() if line.endswith(" resident")}
    priced = set[str]()
    for device, (part, own) in sliced_parts(problem, placement).items():
        layers = [i for i, layer in enumerate(problem.graph.operator_layer) if (layer >= border) == bool(device)]
        for block in slicer_of(part, LONG, own).cuts_of(own)[0]:
            if block.types[0].context.resident:
                priced |= {problem.operators[layers[i]].name for i in block.operators}
    assert told == priced and "blk.1.attn_q.weight" in told and f"blk.{border + 1}.attn_q.weight" in told
    assert f"blk.{border}.attn_q.weight" not in told and "blk.0.attn_q.weight" not in told
    down = f"blk.{border}.ffn_down{'_exps' if n_expert else ''}.weight"
    assert (down in told) is not (n_expert > 0 and biased and not hot)


@settings(max_examples=examples(30))
@given(one=worlds(), another=worlds())
def test_whatever_the_cards_each_fits_and_a_plan_is_priced_as_it_was_found(one: World, another: World) -> None:
    """A plan that is read back has the same price."""
    other = replace(one, card=another.card, share=another.share)
    try:
        found = planned([one, other])
    except DoesNotFit:
        return
    assert found.memory.fits
    if found.device == "none":
        return
    placement = placed_by_plan(one.model.n_layer, one.operators, Plan.from_json(found.to_json()))
    again = price(problem_over([one, other]).of_step(one.workload.step), found.workload, placement)
    assert found.predicted == again


#
# plans as files and as command lines
#


def a_plan(devices: Sequence[int] = (0, 0, 1, 1, 1), **changes: object) -> Plan:
    """Four layers and the output are on devices, but ffn_up of layer 2 is on the host."""
    rows = [
        replace(placed(o.name, gg=0.0 if o.name == "blk.2.ffn_up.weight" else 1.0), device=devices[o.layer_in(4)])
        for o in weights_of(SMALL)
    ]
    usual = {"device": "CUDA0,CUDA1", "n_gpu_layers": 5, "policy": "ranges"}
    return some_plan(rows, **{**usual, **changes})


def test_only_plans_on_several_devices_are_version_3() -> None:
    of_two, of_one = a_plan(), a_plan((0,) * 5, device="CUDA0")
    assert of_two.to_json()["version"] == 3 and of_one.to_json()["version"] == 2
    assert {row["device"] for row in of_two.to_json()["operators"] if "device" in row} == {1}
    assert not any("device" in row for row in of_one.to_json()["operators"])
    assert "devices" not in of_one.to_json()["memory"]
    for each in (of_two, of_one):
        assert Plan.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_the_layers_of_each_device_follow_from_its_operators() -> None:
    operators = weights_of(SMALL)
    assert a_plan().device_layers(operators, 4) == (2, 3)
    assert a_plan(n_gpu_layers=4).device_layers(operators, 4) == (1, 3)
    assert a_plan((0,) * 5, device="CUDA0").device_layers(operators, 4) == ()
    assert placed_by_plan(4, operators, a_plan()).device_layers == (2, 3)


def test_a_plan_that_llama_cpp_cannot_load_is_refused() -> None:
    operators = weights_of(SMALL)
    with pytest.raises(PlanError, match="device 2, counted from 0"):
        a_plan((0, 0, 1, 2, 2)).check(SMALL, operators)
    with pytest.raises(PlanError, match="layer 1 on device 0 behind layers on device 1"):
        a_plan((1, 0, 1, 1, 1)).check(SMALL, operators)
    mixed = a_plan()
    rows = (replace(mixed.operators[0], device=1), *mixed.operators[1:])
    with pytest.raises(PlanError, match="one layer on two devices"):
        replace(mixed, operators=rows).check(SMALL, operators)
    first, last = (replace(mixed.operators[i], gg=0.5, cc=0.5) for i in (0, -1))
    replace(mixed, operators=(first, *mixed.operators[1:-1], last)).check(SMALL, operators)


def test_llama_cpp_is_told_the_devices_and_how_many_layers_each_has() -> None:
    operators = weights_of(SMALL)
    _, arguments = stock_command(a_plan(), operators, [o.name for o in operators])
    told = " ".join(arguments)
    assert "--device CUDA0,CUDA1 -ngl 5 -ts 2,3" in told and r"^blk\.2\.ffn_up\.weight$=CPU" in told
    _, arguments = stock_command(a_plan(), operators, [o.name for o in operators], "llama-bench")
    assert "--device CUDA0/CUDA1 -ngl 5 -ts 2/3" in " ".join(arguments)
    _, arguments = stock_command(a_plan(device=TWO), operators, [o.name for o in operators])
    assert "--device Emulated0,Emulated1" in " ".join(arguments)
    _, arguments = stock_command(a_plan((0,) * 5, device="CUDA0"), operators, [o.name for o in operators])
    assert "-ts" not in arguments
    for first, name in (("CUDA0", "CUDA0"), ("emulated:rtx3060-12,vram=1073741824", "Emulated0")):
        _, arguments = stock_command(a_plan(device=f"{first},rpc://h:1"), operators, [o.name for o in operators])
        assert f"--rpc h:1 --device {name},RPC0 -ngl 5 -ts 2,3" in " ".join(arguments)


def test_the_split_back_end_is_told_each_device_and_its_layers() -> None:
    """With n_g of the first device it computes what the host has of its layers, and nothing of the others."""
    operators = weights_of(SMALL)
    split = [f"blk.0.ffn_{role}.weight" for role in ("gate", "up", "down")]
    on_device = dict.fromkeys(split, 0.5) | {f"blk.{layer}.ffn_up.weight": 0.0 for layer in (1, 3)}
    rows = (replace(row, gg=(gg := on_device.get(row.name, row.gg)), cc=1 - gg) for row in a_plan().operators)
    found = replace(a_plan(), operators=tuple(rows), token_assignment=((32, 8),))
    assert split_devices(found) == ("CUDA0", "CUDA1")
    text = plugin_text(found, operators, 4, split_devices(found))
    assert "device CUDA0\n" in text
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("tensor")}
    assert set(lines) == {*split, "blk.1.ffn_up.weight"} and all(line.endswith("resident") for line in lines.values())
    _, arguments = stock_command(found, operators, [o.name for o in operators], plugin=Plugin("lib.so", "plan"))
    told = " ".join(arguments)
    assert "--device CUDA0,CUDA1 -ngl 5 -ts 2,3" in told and r"^blk\.(?:2|3)\.ffn_up\.weight$=CPU" in told


def test_the_split_back_end_is_told_how_to_stream_to_each_device() -> None:
    operators = weights_of(SMALL)
    split = [f"blk.{layer}.ffn_{role}.weight" for layer in (1, 2) for role in ("gate", "up", "down")]
    rows = (replace(row, gg=0.5, cg=0.25, cc=0.25) if row.name in split else row for row in a_plan().operators)
    second = SplitSettings(((32, 0), (512, 128)), StreamSettings(n_slots=1, link_bytes_per_s=5), residents=False)
    found = replace(
        a_plan(), operators=tuple(rows), streaming=StreamSettings(link_bytes_per_s=7), behind_first=(second,)
    )
    assert Plan.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert placed_by_plan(4, operators, found).split_settings == found.split_settings
    text = plugin_text(found, operators, 4, split_devices(found))
    first, behind = (part.splitlines() for part in text.split("device CUDA1\n"))
    assert "device CUDA0" in first and "link 7" in first and not any(line.startswith("tokens") for line in first)
    assert {"link 5", "slots 1", "tokens 512 128"} <= set(behind)
    tensors = [{line.split()[1] for line in part if line.startswith("tensor")} for part in (first, behind)]
    assert set(split[:3]) == tensors[0] and set(split[3:]) <= tensors[1]
    assert all(line.endswith(" resident") for line in first if line.startswith("tensor"))
    assert not any(line.endswith(" resident") for line in behind)
    assert set.union(*tensors) == set(split_names(found, operators))
    with pytest.raises(PlanError, match="splits beside 3 devices, but its device is CUDA0,CUDA1"):
        replace(found, behind_first=(second, second))


@given(n=st.integers(1, 60), cuts=st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_layers_are_shared_out_by_shares_and_counts_stay_as_they_are(n: int, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, n) for cut in cuts), n]
    counts = tuple(end - begin for begin, end in pairwise(bounds))
    assert layers_by_share(n, counts) == counts
    assert sum(layers_by_share(n, [0.7 * count + 0.1 for count in counts])) == n


def test_free_memory_decides_where_stock_is_told_nothing() -> None:
    assert layers_by_share(33, (12 << 30, 4 << 30)) == (25, 8)
    assert layers_by_share(4, (0, 5)) == (0, 4)


def test_a_cap_of_some_devices_is_theirs() -> None:
    cap = Cap(60, of_each=(10, 20, 30))
    assert cap.of_some([2]) == Cap(30) and cap.of_some([0, 2]) == Cap(40, of_each=(10, 30))
    assert Cap(60).of_some([0]) == Cap(60)


def test_stocks_placement_as_a_plan_has_each_layer_on_one_device() -> None:
    found = StockPlacement(5, ((r"blk\.1\.ffn_down.*", "CUDA1"), (r"blk\.3\..*", "CPU")), device_layers=(2, 3))
    assert found.by_layers.overrides == ((r"blk\.1\.ffn_down.*", "CPU"), (r"blk\.3\..*", "CPU"))
    assert replace(found.by_layers, overrides=found.overrides) == found


def test_a_summary_says_what_each_device_has() -> None:
    each = (MemoryBreakdown(100, 0.9, 90, 40, 0, 10, 10, 0, 30), MemoryBreakdown(50, 0.9, 45, 20, 0, 5, 10, 0, 10))
    memory = MemoryBreakdown(150, 0.9, 135, 60, 7, 15, 20, 0, 40, devices=each)
    sentences = plan_sentences(a_plan(memory=memory), weights_of(SMALL))
    assert sentences[0].startswith("ranges on CUDA0 + CUDA1")
    assert sentences[1:3] == (
        "CUDA0: layers 0-1; 60 B of 90 B of memory", "CUDA1: layers 2-3, output; 35 B of 45 B of memory"
    )  # fmt: skip
