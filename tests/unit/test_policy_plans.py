"""What each policy does, on machines whose rates can be reckoned with by hand, through the pure plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from worlds import (
    CARD,
    HOST,
    World,
    bytes_of,
    device_bytes,
    every,
    model_info,
    own_policy,
    there,
    total_s,
    where,
    worlds,
)

from oallama.core.errors import DoesNotFit, UsageError
from oallama.core.options import Options
from oallama.core.profile import Sharing
from oallama.core.types import CPU_DEVICE, ModelInfo, Workload
from oallama.device.card import Card
from oallama.place.decide import larger_ubatches
from oallama.place.placement import placed_whole
from oallama.place.policies.registry import POLICIES, Rules

pytestmark = pytest.mark.usefixtures("small_cards")

FFN = ("ffn_gate", "ffn_up", "ffn_down")
FAST = replace(
    CARD, kernel_s=0.0, launch_s=0.0, launch_node_s=0.0, copy_s=0.0, copy_issue_s=0.0, synchronize_s=0.0,
    bytes_per_s=8e12,
)  # fmt: skip
"""No fixed times: what is computed and copied is all that counts."""

PLAIN_HOST = replace(HOST, kernel_s=0.0, dram_bytes_per_s=1e15)
TOKEN = Workload(n_prompt=1, n_gen=100, n_ctx=512)
EXPERTS = model_info(n_expert=8, n_expert_used=2)


def slow_cpu(**facts: object) -> World:
    """A CPU of 20 GB/s, a link of 10 GB/s, a card that takes hardly any time."""
    card = replace(FAST, pinned_bytes_per_s=10e9, pageable_bytes_per_s=10e9)
    host = replace(PLAIN_HOST, bytes_per_s=20e9)
    return replace(World(card=card, host=host, workload=TOKEN), **facts)


#
# times, reckoned by hand
#


def test_the_cpu_takes_its_bytes_by_its_rate_and_the_rest_of_each_layer() -> None:
    """The mean depth of a token is half of what is generated: 256, which was measured."""
    world = World(workload=Workload(n_prompt=156, n_gen=200, n_ctx=512))
    plan = world.plan("cpu")
    (rest,) = {
        case.seconds
        for case in world.profile.rest
        if (case.device, case.n_tokens, case.n_kv) == (CPU_DEVICE, 1, 256) and case.shape and case.shape.flash_attn
    }
    moved = sum(4 * (o.shape[0] + o.shape[1]) for o in world.operators)  # activations, in and out
    by_hand = (bytes_of(world.operators) + moved) / 40e9 + len(world.operators) * 5e-6
    assert plan.device == "none"
    assert plan.predicted.tpot_s == pytest.approx(by_hand + 2 * rest)


def test_attention_between_two_depths_that_were_timed_is_on_the_line_between_them() -> None:
    def tpot_s(depth: int) -> float:
        load = Workload(n_prompt=1, n_gen=2, n_ctx=2048, n_past=depth - 2)
        return World(workload=load).plan("cpu").predicted.tpot_s

    assert {256, 1024} < {case.n_kv for case in World().profile.rest}
    assert tpot_s(256) < tpot_s(640) == pytest.approx((tpot_s(256) + tpot_s(1024)) / 2)


def test_a_device_adds_its_crossings_and_launches() -> None:
    """Slower and slower links and launches: each costs what it adds, whatever is computed."""
    world = World(share=3.0, workload=TOKEN)
    base = total_s(world.plan("layers"))
    launches = replace(world, card=replace(CARD, launch_s=CARD.launch_s + 1e-3))
    assert total_s(launches.plan("layers")) == pytest.approx(base + 101 * 1e-3)
    logits = replace(world, card=replace(CARD, pinned_bytes_per_s=1e6, pageable_bytes_per_s=1e6))
    ids_and_result = 101 * 4 * (512 + 4096)
    slower = 1 / 1e6 - 1 / 20e9, 1 / 1e6 - 1 / 8e9
    assert total_s(logits.plan("layers")) - base == pytest.approx(ids_and_result * slower[0], rel=0.01)


def test_a_long_prompt_s_host_layers_are_computed_on_the_device() -> None:
    """llama.cpp copies their weights for batches of 32 tokens and more, where it has the device."""
    at = {n: Workload(n_prompt=n, n_gen=1, n_ctx=1024) for n in (31, 32, 512)}
    slow = slow_cpu(share=0.3, model=model_info(n_layer=3))
    seconds, alone = (
        {n: replace(slow, workload=load).plan(name).predicted.ttft_s for n, load in at.items()}
        for name in ("layers", "cpu")
    )
    assert seconds[512] < 0.5 * alone[512]
    assert seconds[32] / seconds[31] != pytest.approx(alone[32] / alone[31], rel=0.02)
    kept = replace(slow, workload=at[512], device_facts=(("device_backend", "RPC"),)).plan("layers")
    assert kept.predicted.ttft_s > 1.5 * seconds[512]


#
# whole operators
#


def test_layers_are_taken_from_the_end_and_the_output_first() -> None:
    world = World(model=model_info(n_layer=4))
    layer = bytes_of(o for o in world.operators if o.layer == 0)
    output = bytes_of(world.operators[-1:])
    for n_layers in range(5):
        made = replace(world, room=output + n_layers * layer + 100)
        for name in ("layers", "fit"):
            plan = made.plan(name)
            assert plan.n_gpu_layers == n_layers + 1
            assert {o.layer for o in there(made, plan)} == {None, *range(4 - n_layers, 4)}


@pytest.mark.parametrize("parts", [(), ("ffn_up_exps",), ("ffn_up_exps", "ffn_gate_exps")])
def test_fit_places_experts_last_and_of_one_more_layer_a_part(parts: tuple[str, ...]) -> None:
    world = World(model=EXPERTS)
    others = [o for o in world.operators if o.op == "MUL_MAT"]
    last = [o for o in world.operators if o.layer == 1 and o.op == "MUL_MAT_ID"]
    first = [o for o in world.operators if o.layer == 0 and o.role in parts]
    made = replace(world, room=bytes_of((*others, *last, *first)) + 100)
    assert set(there(made, made.plan("fit"))) == {*others, *last, *first}


def test_fit_is_not_limited_by_a_share_of_the_weights() -> None:
    with pytest.raises(UsageError, match="limit it by --vram"):
        World(options=Options(flash_attn="on", gpu_weights=0.5)).plan("fit")


def one_layer(world: World) -> ModelInfo:
    return replace(world.model, n_layer=1, n_expert=0, n_expert_used=0)


@given(world=worlds())
@settings(max_examples=examples(20))
def test_oato_is_near_the_best_of_all_placements(world: World) -> None:
    """Of a model of one layer; the bound is below all of them."""
    world = replace(world, model=one_layer(world), uses=())
    with every() as brute_force:
        tried = world.plan(brute_force)
    best, found = min(tried, world.plan("cpu"), key=total_s), world.plan("oato")
    assert best.bound.total_s <= best.predicted.total_s * (1 + 1e-9)
    assert total_s(best) * (1 - 1e-9) <= total_s(found) <= 1.1 * total_s(tried)
    assert total_s(best) <= total_s(world.plan("atsinfer")) * (1 + 1e-9)


def test_a_placement_that_the_device_cannot_compute_is_passed_over() -> None:
    world = World(share=3.0, workload=TOKEN)
    first = world.operators[0].mul_mat
    cases = [one for one in world.profile.cases if one.device == "CPU" or one.mul_mat != first]
    world = world.with_profile(cases=tuple(cases))
    everything = [True] * len(world.operators)
    with own_policy("everything", lambda problem, room: [placed_whole(room.costs, everything, 0)]) as policy:
        plan = world.plan(policy)
    assert not there(world, plan) and total_s(plan) < inf


def test_where_all_fits_the_bound_is_not_far_below() -> None:
    world = World(card=FAST, share=3.0, workload=TOKEN)
    plan = world.plan("oato")
    assert 0.3 * plan.predicted.tpot_s < plan.bound.tpot_s <= plan.predicted.tpot_s


def test_the_bound_is_the_linear_program_s() -> None:
    """CPU and device together at their rates, with nothing to fit: no weight may stay, and the link is slow."""
    world = slow_cpu(options=Options(flash_attn="on", gpu_weights=0.0))
    bound = world.plan("cpu").bound
    weights = bytes_of(world.operators)
    at_least = weights / (20e9 + 10e9)
    assert at_least * 0.9 <= bound.tpot_s <= weights / 20e9 * 1.2


def test_oato_s_rules() -> None:
    """Published, it fills up with what gains nothing, and stops at the first that does not fit."""
    slow = World(card=replace(CARD, bytes_per_s=1e9), share=0.6)
    assert not there(slow, slow.plan("oato"))
    assert any("nothing is placed on card" in note for note in slow.plan("oato").notes)
    published = slow.plan("oato", rules=Rules(affinity="paper", fill="paper"))
    assert there(slow, published)
    full = slow.plan("oato", rules=Rules(fill="full"))
    assert full.memory.spare < min(o.bytes for o in slow.operators if o not in there(slow, full))
    for rules in (Rules(affinity="paper"), Rules(fill="full")):
        assert slow.plan("auto", rules=rules).policy == "oato"
        with pytest.raises(UsageError, match="say how oato places; policy layers does not"):
            slow.plan("layers", rules=rules)


@pytest.mark.parametrize("name", ["affinity", "fill", "prefetch"])
def test_a_rule_that_there_is_not_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 'best'; give one of"):
        Rules(**{name: "best"})


#
# slices
#


def test_hetegen_cuts_each_linear_by_equation_8() -> None:
    """alpha = T_CPU / (T_CPU + T_GPU + T_COM), of times by rates; within one step of the cut."""
    world = slow_cpu(
        model=model_info(n_embd=1024, n_ff=4096), options=Options(flash_attn="on", gpu_weights=0.0), share=1.0
    )
    cpu_s, gpu_s, com_s = 1 / 20e9, 1 / 8e12, 1 / 10e9
    alpha = cpu_s / (cpu_s + gpu_s + com_s)
    for operator, place in zip(world.operators, world.plan("hetegen").operators, strict=True):
        if operator.layer is not None:
            assert place.gg == 0 and place.cg == pytest.approx(alpha, abs=0.07), operator.name
    narrow = replace(world, room=60_000)
    assert set(where(narrow.plan("hetegen")).values()) <= {"cpu", "device", "cpu streamed", "streamed"}


def test_hetegen_promotes_while_memory_lasts() -> None:
    n_whole = [len(there(made, made.plan("hetegen"))) for s in (0.1, 0.5, 1.5) if (made := slow_cpu(share=s))]
    assert n_whole == sorted(n_whole) and n_whole[0] < n_whole[1] < n_whole[2] == 15


def test_scheinfer_balances_cpu_and_link() -> None:
    """In decode both sides end together: the CPU computes 1 - r of an FFN while the link copies r (Eq. 10)."""
    world = slow_cpu(
        model=model_info(n_embd=1024, n_ff=8192), options=Options(flash_attn="on", gpu_weights=0.0), share=1.0,
        workload=Workload(n_prompt=1, n_gen=400, n_ctx=512),
    )  # fmt: skip
    shares = {p.cg for o, p in zip(world.operators, world.plan("scheinfer").operators, strict=True) if o.role in FFN}
    assert all(share == pytest.approx(1 / 3, abs=0.05) for share in shares)


def test_more_of_the_weights_are_streamed_over_a_faster_link() -> None:
    shares = []
    for rate in (1e7, 5e9, 40e9):
        card = replace(FAST, pinned_bytes_per_s=rate, pageable_bytes_per_s=rate)
        plan = slow_cpu(card=card, options=Options(flash_attn="on", gpu_weights=0.2), share=1.0).plan("scheinfer")
        shares.append(sum(place.cg for place in plan.operators))
    assert shares == sorted(shares) and shares[0] == 0 < shares[1] < shares[-1]


def long_prompt(**facts: object) -> World:
    """A CPU that is slow in prompts, and a device to which llama.cpp itself sends no batches."""
    world = slow_cpu(
        host=replace(PLAIN_HOST, bytes_per_s=20e9, flops_per_s=2e11), model=model_info(n_embd=1024, n_ff=4096),
        share=2.0, workload=Workload(n_prompt=512, n_gen=100, n_ctx=1024),
        options=Options(flash_attn="on", gpu_weights=0.2), device_facts=(("device_backend", "RPC"),),
    )  # fmt: skip
    return replace(world, **facts)


def linked(rate: float) -> Card:
    return replace(FAST, pinned_bytes_per_s=rate, pageable_bytes_per_s=rate)


def test_tokens_of_a_long_prompt_go_to_the_device_and_of_a_short_one_do_not() -> None:
    """n_g: what is copied once is computed for as many tokens as the CPU would take longer for (Eq. 15)."""
    firsts = []
    for rate in (10e9, 2e9):
        plan = long_prompt(card=linked(rate)).plan("scheinfer")
        table = plan.token_assignment
        (below, none), (first, some), *_, (longest, most) = table
        assert (none, first) == (0, below + 1) and some > 0 and longest // 2 < most
        assert all(n - n_g in (0, 1, n) or (n - n_g) % 4 == 0 for n, n_g in table), "the CPU computes four rows at once"
        firsts.append(first)
    assert firsts[0] < firsts[1]
    assert long_prompt(card=linked(1e6)).plan("scheinfer").token_assignment == ()


@pytest.mark.parametrize("host_room", [0, 1 << 40])
def test_what_the_cpu_computes_in_a_faster_layout_is_kept_twice_where_the_host_has_room(host_room: int) -> None:
    plan = long_prompt(repacked=1.2, host_room=host_room, card=linked(4e9)).plan("scheinfer")
    assert plan.token_assignment
    assert plan.streaming.kept_twice is (host_room > 0)
    assert {place.layout for place in plan.operators if 0 < place.cc < 1} >= {"CPU_REPACK"}


def test_copies_run_ahead_unless_they_may_not() -> None:
    world = slow_cpu(
        model=model_info(n_embd=1024, n_ff=4096), options=Options(flash_attn="on", gpu_weights=0.0), share=1.0,
        workload=Workload(n_prompt=512, n_gen=100, n_ctx=1024),
    )  # fmt: skip
    ahead, layer = (world.plan("scheinfer", rules=Rules(prefetch=mode)) for mode in ("ahead", "layer"))
    assert (ahead.streaming.prefetch, layer.streaming.prefetch) == ("ahead", "layer")
    assert ahead.streaming.n_slots == 2 and layer.streaming.n_slots == 1
    assert total_s(ahead) < total_s(layer)
    blocking = replace(world, device_facts=(("device_asynchronous", False),)).plan("scheinfer")
    assert total_s(blocking) > total_s(ahead)
    assert blocking.streaming is None or blocking.streaming.n_slots == 1


#
# experts
#


def routed(uses: tuple[float, ...], **facts: object) -> World:
    return slow_cpu(model=EXPERTS, uses=uses, share=0.45, **facts)


SKEWED = (9000.0, 5.0, 5.0, 5000.0, 5.0, 5.0, 5.0, 5.0)


def test_the_experts_that_are_used_are_on_the_device() -> None:
    plan = routed(SKEWED).plan("experts")
    hot = {place.name: place.hot_experts for place in plan.operators if place.hot_experts}
    assert plan.policy == "experts" and hot
    assert all(name.split(".")[2].endswith("_exps") and {0, 3} <= set(experts) for name, experts in hot.items())
    for layer in (0, 1):
        sets = {experts for name, experts in hot.items() if name.startswith(f"blk.{layer}.")}
        assert len(sets) <= 1, "gate, up and down of an expert are together"
    alike = routed((100.0,) * 8)
    assert total_s(plan) < total_s(alike.plan("auto"))
    assert routed(SKEWED).plan("auto").policy == "experts"


def test_experts_used_alike_are_not_placed_by_use() -> None:
    plan = routed((100.0,) * 8).plan("experts")
    assert any("no layer's experts are worth placing by use" in note for note in plan.notes)
    assert not any(place.hot_experts for place in plan.operators)
    assert routed((100.0,) * 8).plan("auto").policy != "experts"


def hot_of(world: World) -> list[tuple[int, ...]]:
    return [place.hot_experts for place in world.plan("experts").operators if place.hot_experts]


def test_experts_that_others_took_the_place_of_are_not_hot() -> None:
    """A set is chosen from all that is known, and judged by what it served later."""
    assert hot_of(routed(SKEWED))
    assert not hot_of(routed(SKEWED, latest=tuple(reversed(SKEWED))))


def test_a_crossing_that_costs_more_than_it_saves_is_not_made() -> None:
    dear = replace(slow_cpu().card, launch_s=1.0)
    assert not hot_of(routed(SKEWED, card=dear))


def test_biases_of_hot_experts_are_sent_with_each_batch() -> None:
    plain, biased = (routed(SKEWED, biased=biased, card=linked(1e9)) for biased in (False, True))
    plan = biased.plan("experts")
    sent = sum(4 * o.shape[1] * len(p.hot_experts) for o, p in zip(biased.operators, plan.operators, strict=True))
    less, more = (world.simulate(plan).token.seconds for world in (plain, biased))
    assert sent > 0 and more - less == pytest.approx(sent / 1e9, rel=0.15)


def test_a_prompt_of_some_tokens_reads_the_cold_experts_that_any_of_them_uses() -> None:
    """A few tokens read more experts than one does, and never more than there are."""
    ttft_s = []
    for n_prompt in (1, 2, 4, 8):
        plan = routed(SKEWED, workload=Workload(n_prompt=n_prompt, n_gen=400, n_ctx=512)).plan("experts")
        ttft_s.append(plan.predicted.ttft_s)
    gains = [more - less for less, more in pairwise(ttft_s)]
    assert all(gain > 0 for gain in gains) and ttft_s[-1] < 8 * ttft_s[0]


def test_without_known_uses_it_says_how_to_come_by_them() -> None:
    with pytest.raises(UsageError, match="this one has none"):
        slow_cpu().plan("experts")
    with pytest.raises(UsageError, match="count-experts"):
        slow_cpu(model=EXPERTS).plan("experts")


#
# other systems
#


def test_twinpilots_has_whole_modules_on_both_sides_by_turns() -> None:
    """S_cpu and S_gpu end together; of six alike FFNs two are loaded to the device, evenly among the others."""
    model = model_info(n_layer=6, n_embd=1024, n_ff=4096)
    world = slow_cpu(model=model, options=Options(flash_attn="on", gpu_weights=0.0), share=1.0)
    plan = world.plan("twinpilots")
    assert {place.cg for place in plan.operators} == {0, 1}
    for role in FFN:
        assert [place.cg for place in plan.operators if f".{role}." in place.name] == [0, 1, 0, 0, 1, 0]
    assert any("(CPU 182 ms, device with its loading 182 ms); operators run in graph order" in n for n in plan.notes)
    uneven = replace(world, model=model_info(n_layer=3, n_embd=1024, n_ff=8192)).plan("twinpilots")
    assert any("(CPU 228 ms, device with its loading 44.7 ms)" in note for note in uneven.notes)


@given(world=worlds())
@settings(max_examples=examples(20))
def test_atsinfer_finds_the_best_of_all_placements_where_crossings_cost_nothing(world: World) -> None:
    """Of a model of one layer in decode: its sum has times of operators alone."""
    free = replace(world.card, copy_s=0.0, copy_issue_s=0.0, launch_s=0.0, launch_node_s=0.0, synchronize_s=0.0,
                   pinned_bytes_per_s=1e18, pageable_bytes_per_s=1e18)  # fmt: skip
    world = replace(
        world, model=one_layer(world), uses=(), card=free, workload=Workload(n_prompt=1, n_gen=64, n_ctx=1024)
    )
    plan = world.plan("atsinfer")
    with every(firsts=(0,)) as brute_force:
        best = world.plan(brute_force)
    if there(world, plan) or there(world, best):
        assert total_s(best) * (1 - 1e-9) <= total_s(plan) <= total_s(best) * (1 + 1e-3)


PUBLISHED = {one.name: one.published for one in POLICIES.values() if one.published}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_says_what_of_the_published_system_it_has_not(name: str) -> None:
    plan = slow_cpu(model=EXPERTS).plan(name)
    assert PUBLISHED[name] in plan.notes and plan.policy == name


def test_fiddler_keeps_experts_on_the_host_and_the_rest_on_the_device() -> None:
    world = slow_cpu(model=EXPERTS)
    others = [o for o in world.operators if o.op == "MUL_MAT"]
    last = [o for o in world.operators if o.op == "MUL_MAT_ID" and o.layer == 1]
    for more in ([], last):
        made = replace(world, room=bytes_of((*others, *more)) + 200_000)
        assert set(there(made, made.plan("fiddler"))) == {*others, *more}
    with pytest.raises(UsageError, match="models with experts"):
        slow_cpu().plan("fiddler")


#
# memory
#


def test_the_micro_batch_is_halved_until_the_buffers_fit_and_said_so() -> None:
    world = World(compute_per_token=1 << 16, workload=Workload(n_prompt=64, n_gen=8, n_ctx=512))
    small = replace(world, room=-300 * (1 << 16))
    plan = small.plan("oato")
    assert plan.workload.n_ubatch == 128
    assert "micro-batch lowered from 512 to 128" in plan.notes[0]


def test_does_not_fit_names_required_available_and_device() -> None:
    none = World(compute_per_token=1 << 16, room=-500 * (1 << 16))
    with pytest.raises(DoesNotFit, match="card") as caught:
        none.plan("oato")
    assert caught.value.required > caught.value.available > 0 and caught.value.device == "card"
    assert none.plan("auto").memory.spare >= 0


def test_the_ledger_counts_each_instance_of_the_back_end_that_computes(runtime_bytes: Callable[[int], None]) -> None:
    """llama.cpp's and the split back end's; first from what is kept free."""
    world = slow_cpu(share=0.8)
    capacity, one = world.device_bytes, world.device_bytes // 50
    runtime_bytes(one)
    found = {name: world.plan(name).memory.runtime for name in ("layers", "flexgen", "cpu")}
    assert found == {"layers": one, "flexgen": 2 * one, "cpu": 0}
    assert replace(world, device_facts=(("device_backend", "Vulkan"),)).plan("layers").memory.runtime == 0
    limits = []
    for runtime in (0, capacity // 20, capacity // 5):
        runtime_bytes(runtime)
        limits.append(world.plan("layers").memory.limit)
    assert limits == [int(0.9 * capacity), int(0.9 * capacity), capacity - capacity // 5]


def test_a_kv_cache_that_does_not_fit_leaves_layers_on_the_host() -> None:
    world = World(workload=Workload(n_prompt=64, n_gen=8, n_ctx=4096), room=-2_000_000, compute_per_token=64)
    plan = world.plan("layers")
    (note,) = plan.notes
    assert "some layers keep theirs on the host" in note and plan.workload.n_ubatch == 512
    assert plan.n_gpu_layers < world.model.n_layer + 1
    assert plan.memory.kv < world.taken(world.workload, plan.attention).kv


def test_the_share_of_the_weights_is_a_cap() -> None:
    for share, name in product((0.25, 0.5, 0.75), ("oato", "layers", "scheinfer")):
        world = World(share=2.0, options=Options(flash_attn="on", gpu_weights=share), model=model_info(n_layer=4))
        placed = sum(device_bytes(world.operators, world.plan(name)))
        assert 0 < placed <= share * bytes_of(world.operators)


def test_the_share_of_the_weights_is_a_cap_where_each_byte_gains_the_same() -> None:
    """Equal gains for a byte differ by rounding, which must not take a block's larger step before its smaller ones."""
    world = World(
        model=model_info(n_layer=1, n_ff=1408), type_name="F16", compute_per_token=512 * 1024,
        workload=Workload(n_prompt=600, n_gen=0, n_ctx=1024), options=Options(flash_attn="on", gpu_weights=0.4),
    )  # fmt: skip
    placed = sum(device_bytes(world.operators, world.plan("split")))
    assert 0 < placed <= 0.4 * bytes_of(world.operators)


def test_a_larger_micro_batch_is_taken_where_it_gains_and_said_so() -> None:
    """A weight that is streamed is read once a micro-batch."""
    load = Workload(n_prompt=2000, n_gen=1, n_ctx=4096)
    world = slow_cpu(workload=load, share=0.2, model=model_info(n_layer=4), compute_per_token=64)
    larger = larger_ubatches(load, world.options)
    assert larger == (1024, 2048)
    plan = world.plan("layers", larger_ubatches=larger)
    assert plan.workload.n_ubatch == 2048 and "raised from 512 to 2048 tokens" in plan.notes[0]
    assert total_s(plan) < total_s(world.plan("layers"))
    decode = replace(world, workload=replace(load, n_prompt=1, n_gen=100))
    assert decode.plan("layers", larger_ubatches=larger) == decode.plan("layers")


@pytest.mark.parametrize(
    ("n_prompt", "options", "sizes"),
    [(1, {}, ()), (512, {}, ()), (513, {}, (768,)), (1100, {}, (1024, 1280)), (10_000, {}, (1024, 2048)),
     (10_000, {"n_batch": 700}, (700,)), (10_000, {"n_batch": 8192}, (1024, 2048, 4096, 8192)),
     (10_000, {"n_ubatch": 512}, ())],
)  # fmt: skip
def test_micro_batches_are_doubled_up_to_the_whole_prompt(
    n_prompt: int, options: dict[str, int], sizes: object
) -> None:
    assert larger_ubatches(Workload(n_prompt=n_prompt, n_gen=1, n_ctx=16384), Options(**options)) == sizes


#
# attention
#


@given(st.sampled_from([64, 300, 1000, 2000]))
@settings(max_examples=4)
def test_attention_is_whichever_is_predicted_to_be_faster(depth: int) -> None:
    world = World(workload=Workload(n_prompt=1, n_gen=64, n_ctx=4096, n_past=depth), share=0.4)
    found = {way: replace(world, options=Options(flash_attn=way)).plan("oato") for way in ("on", "off", "auto")}
    assert total_s(found["auto"]) == pytest.approx(min(total_s(found["on"]), total_s(found["off"])))
    for way, plan in found.items():
        assert plan.attention.flash_attn == way or way == "auto"


def test_more_depth_costs_more() -> None:
    seconds = [
        total_s(World(workload=Workload(n_prompt=1, n_gen=64, n_ctx=8192, n_past=depth)).plan("layers"))
        for depth in (0, 500, 2000, 6000)
    ]
    assert all(less < more for less, more in pairwise(seconds))


def test_a_prompt_in_two_batches_takes_what_each_takes_behind_the_other() -> None:
    world = World(options=Options(flash_attn="on"))

    def ttft_s(n_prompt: int, n_past: int) -> float:
        plan = replace(
            world, workload=Workload(n_prompt=n_prompt, n_gen=0, n_ctx=2048, n_ubatch=512, n_past=n_past)
        ).plan("cpu")
        return plan.predicted.ttft_s

    logits = sum(case.seconds for case in world.profile.cases if case.mul_mat.shape[1] == 4096 and case.n_tokens == 1)
    assert ttft_s(1024, 0) == pytest.approx(ttft_s(512, 0) + ttft_s(512, 512), abs=2 * logits)
    assert ttft_s(512, 512) > ttft_s(512, 0)


def test_a_way_of_attention_that_was_not_timed_is_not_chosen() -> None:
    world = World(workload=Workload(n_prompt=1, n_gen=64, n_ctx=2048, n_past=1500), options=Options())
    usual, other = ("off", "on")

    def chosen(*, without: str, device: str) -> str | None:
        rest = [
            case
            for case in world.profile.rest
            if (case.device == CPU_DEVICE) is not (device == CPU_DEVICE)
            or (case.shape and case.shape.flash_attn) is not (without == "on")
        ]
        attention = world.with_profile(rest=tuple(rest)).plan("layers").attention
        return attention and attention.flash_attn

    for device in (CPU_DEVICE, "card"):
        assert chosen(without=usual, device=device) == other
        assert chosen(without=other, device=device) == usual


def test_without_flash_attention_the_scores_may_not_take_more_than_the_model() -> None:
    load = Workload(n_prompt=1, n_gen=64, n_ctx=8192, n_past=7000)
    world = World(workload=load, options=Options(), share=1.5)
    rest = [c if c.shape and c.shape.flash_attn else replace(c, seconds=c.seconds / 100) for c in world.profile.rest]
    ways = []
    for n_ctx, file_bytes in ((8192, 1), (65536, 1), (65536, 4 << 30)):
        model = replace(world.model, file_bytes=file_bytes)
        made = replace(world, model=model, workload=replace(load, n_ctx=n_ctx)).with_profile(rest=tuple(rest))
        attention = made.plan("cpu").attention
        ways.append(attention and attention.flash_attn)
    assert ways == ["off", "on", "off"]


def test_a_quantised_v_cache_needs_flash_attention() -> None:
    deep = Workload(n_prompt=1, n_gen=64, n_ctx=8192, n_past=7000)
    attention = World(workload=deep, options=Options(type_v="q8_0")).plan("cpu").attention
    assert (attention.flash_attn, attention.type_v) == ("on", "q8_0")
    with pytest.raises(UsageError, match="V cache of type q8_0 needs flash attention"):
        Options(flash_attn="off", type_v="q8_0")


#
# what CPU, device and link leave each other, and how copies are made
#


def test_sides_that_slow_each_other_down_take_longer() -> None:
    only = Options(flash_attn="on", gpu_weights=0.0)
    world = slow_cpu(model=model_info(n_embd=1024, n_ff=4096), options=only, share=1.0)

    def seconds(policy: str = "scheinfer", **profile: object) -> float:
        return total_s(world.with_profile(**profile).plan(policy))

    def halved(first: str, second: str, n_tokens: int = 1) -> tuple[Sharing, ...]:
        rates = {"first_alone": 20.0, "second_alone": 10.0, "first_with_second": 10.0, "second_with_first": 5.0}
        named = {f"{name}_gb_per_s": rate for name, rate in rates.items()}
        return (Sharing(first=first, second=second, n_tokens=n_tokens, **named),)

    free = seconds(sharing=())
    assert seconds(sharing=halved("cpu", "link")) == pytest.approx(seconds("cpu"), rel=0.05), "one of them at a time"
    assert seconds(sharing=halved("device", "link")) >= free
    assert seconds(sharing=halved("cpu", "link", n_tokens=512)) > free
    assert seconds(sharing=(), copy_wait=0.9) > seconds(sharing=(), copy_wait=0.2) == free


def test_pageable_memory_is_said_with_its_rate() -> None:
    world = slow_cpu(options=Options(flash_attn="on", gpu_weights=0.0), share=1.0)
    for facts in ({"device_host_buffer": False}, {"device_pins": False}):
        notes = replace(world, device_facts=tuple(facts.items())).plan("flexgen").notes
        assert any("no pinned host memory" in note and "9.31 GiB/s" in note for note in notes)
    assert not any("pinned" in note for note in world.plan("flexgen").notes)


def test_an_encoder_beside_a_decoder_is_refused_in_a_sentence() -> None:
    world = World()
    encoder = (replace(o, name=f"enc.{o.name}", role=f"enc.{o.role}") for o in world.operators[:-1])
    vars(world)["operators"] = (*encoder, *world.operators)
    with pytest.raises(UsageError, match="an encoder beside its decoder, and such models are not placed"):
        world.plan("oato")
