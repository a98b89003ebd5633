"""What each policy promises, on machines whose rates can be reckoned with by hand, through the pure plan; and plans of
many small worlds as golden/small_worlds.txt has them. What holds for every plan: test_every_plan.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest
from golden import small_worlds
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from worlds import (
    HOST,
    World,
    bytes_of,
    every,
    linked,
    model_info,
    own_policy,
    placed,
    routed,
    slow_cpu,
    some_plan,
    there,
    total_s,
    weight,
    worlds,
)

from oallama.core.errors import UsageError
from oallama.core.options import Options
from oallama.core.types import CPU_DEVICE, PLAIN_LAYOUT, Attention, Operator, StreamSettings, Workload
from oallama.core.units import MIB
from oallama.cost.expert_cache import cached_layers, lru_hits
from oallama.planner.decide import larger_ubatches
from oallama.planner.placement import Placement, placed_whole
from oallama.planner.policies.registry import Rules
from oallama.planner.runtime import CUBLAS_BYTES, RUNTIME_BYTES, runtime_bytes

pytestmark = pytest.mark.usefixtures("small_cards")

STREAMED = small_worlds.STREAMED
TOKEN = Workload(n_prompt=1, n_gen=100, n_ctx=512)
SMALL_WORLDS = list(small_worlds.worlds())


@pytest.mark.parametrize(("name", "world", "policies"), SMALL_WORLDS, ids=[name for name, *_ in SMALL_WORLDS])
def test_plans_of_small_worlds_stay_as_they_are(name: str, world: World, policies: tuple[str, ...]) -> None:
    kept = small_worlds.FILE.read_text(encoding="utf-8")
    made = small_worlds.text_of(name, world, policies)
    before = kept[kept.index(made.partition("\n")[0] + "\n") :]
    assert made == "== ".join(before.split("== ", 2)[:2]), "meant? golden/small_worlds.py writes them anew"


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


@pytest.mark.parametrize("policy", ["oato", "layers"])
def test_what_slices_nothing_needs_no_time_of_the_link(policy: str) -> None:
    world = World(room=10**9)
    plan = world.with_profile(link={}).plan(policy)
    assert there(world, plan) == there(world, world.plan(policy)) and there(world, plan)


@pytest.mark.parametrize(
    ("policy", "parts", "n_layers"),
    [("fit", (), 1), ("fit", ("up",), 1), ("fit", ("up", "gate"), 1), ("fiddler", (), 0), ("fiddler", (), 1)],
)
def test_experts_come_after_all_else_from_the_last_layer_on(policy: str, parts: tuple[str, ...], n_layers: int) -> None:
    """fit: and of one more layer a part of them."""
    world = routed()
    experts = [o for o in world.operators if o.routed]
    wanted = [o for o in world.operators if o.op == "MUL_MAT"]
    wanted += [o for o in experts if o.layer == 2 - n_layers or o.role in [f"ffn_{part}_exps" for part in parts]]
    made = replace(world, room=bytes_of(dict.fromkeys(wanted)) + 100_000)
    assert set(there(made, made.plan(policy))) == set(wanted)


#
# options of stock llama.cpp
#


def test_no_host_gains_the_cpus_own_layouts_and_loses_what_is_streamed() -> None:
    world = World(repacked=3.0, share=0.4, workload=Workload(n_prompt=16, n_gen=64, n_ctx=1024))
    tokens, prompts = world.plan("stock"), replace(world, workload=Workload(600, 1, 1024)).plan("stock")
    assert tokens.stock is not None and tokens.stock.no_host and "--no-host" in tokens.notes[-1]
    assert prompts.stock is not None and not prompts.stock.no_host
    assert total_s(tokens) < total_s(world.plan("fit")), "which keeps the host's weights plain"
    assert all(row.layout is None for row in tokens.operators), "llama.cpp chooses"


def test_an_expert_cache_takes_what_other_weights_leave_and_is_priced_by_what_it_serves() -> None:
    model = model_info(n_layer=4, n_embd=512, n_expert=32, n_expert_used=4)
    world = World(model=model, card=linked(30e9), host=replace(HOST, bytes_per_s=2e9), share=0.6,
                  workload=Workload(8, 64, 512))  # fmt: skip
    plan = world.plan("stock")
    assert plan.stock is not None and plan.stock.moe_cache_bytes and plan.stock.n_cpu_moe
    assert plan.memory.spare >= 0 and plan.stock.moe_cache_bytes < plan.memory.weights_gpu
    assert world.placer().price(plan) == plan.predicted
    less = replace(plan, stock=replace(plan.stock, moe_cache_bytes=plan.stock.moe_cache_bytes // 2))
    assert world.placer().price(less).tpot_s > plan.predicted.tpot_s


@pytest.mark.parametrize(("n_expert", "share", "hits"), [(32, 0.5, 0.92), (128, 0.5, 0.97), (8, 0.5, 0.5), (32, 0, 0)])
def test_a_cache_serves_more_than_its_share_where_experts_are_many(n_expert: int, share: float, hits: float) -> None:
    assert lru_hits(n_expert, share) == pytest.approx(hits, abs=0.01) and lru_hits(n_expert, 1.0) == 1.0


def test_layers_of_a_shape_share_a_cache_that_holds_a_tokens_experts_at_least() -> None:
    operators = routed().operators
    nothing = [False] * len(operators)
    experts = bytes_of(o for o in operators if o.routed)
    (all_of_them,) = cached_layers(operators, nothing, 0, 2 * experts)
    assert all_of_them.share == all_of_them.hits == 1.0 and len(all_of_them.layers) == 2
    assert cached_layers(operators, nothing, 0, experts // 100) == ()
    (one,) = cached_layers(operators, [o.layer == 1 for o in operators], 0, experts)
    assert len(one.layers) == 1, "of a layer on the device there is nothing to cache"


def test_a_device_that_may_hold_no_operator_still_takes_large_batches() -> None:
    """llama.cpp streams weights there; over a slow link the CPU computes them."""
    options = Options(flash_attn="on", gpu_weights=0.0)
    world = World(options=options, workload=Workload(n_prompt=600, n_gen=16, n_ctx=1024))
    for policy in ("oato", "scheinfer"):
        plan = world.plan(policy)
        assert plan.device == "card" and not there(world, plan)
        assert total_s(plan) < 0.9 * total_s(world.plan("cpu"))
    assert replace(world, card=linked(1e8)).plan("oato").device == "none"


@given(world=worlds())
@settings(max_examples=examples(20))
def test_oato_is_near_the_best_of_all_placements(world: World) -> None:
    """Compare with every placement of a model of one layer: the worst of 1,200 drawn worlds was 11 % slower than the
    best. The physical bound is below all placements."""
    world = replace(world, model=replace(world.model, n_layer=1, n_expert=0, n_expert_used=0), uses=())
    with every() as brute_force:
        tried = world.plan(brute_force)
    best, found = min(tried, world.plan("cpu"), key=total_s), world.plan("oato")
    assert best.bound.total_s <= best.predicted.total_s * (1 + 1e-9)
    assert total_s(best) * (1 - 1e-9) <= total_s(found) <= 1.2 * total_s(best)
    assert total_s(best) <= total_s(world.plan("atsinfer")) * (1 + 1e-9)


@given(world=worlds())
@settings(max_examples=examples(20))
def test_atsinfer_finds_the_best_of_all_placements_where_device_copies_cost_nothing(world: World) -> None:
    """Of a model of one layer in decode: its sum has times of operators alone."""
    world = replace(
        world, model=replace(world.model, n_layer=1, n_expert=0, n_expert_used=0), uses=(),
        card=replace(world.card, copy_s=0.0, copy_issue_s=0.0, launch_s=0.0, launch_node_s=0.0, synchronize_s=0.0,
                     pinned_bytes_per_s=1e18, pageable_bytes_per_s=1e18),
        workload=Workload(n_prompt=1, n_gen=64, n_ctx=1024),
    )  # fmt: skip
    plan = world.plan("atsinfer")
    with every(firsts=(0,)) as brute_force:
        best = world.plan(brute_force)
    if there(world, plan) or there(world, best):
        assert total_s(best) * (1 - 1e-9) <= total_s(plan) <= total_s(best) * (1 + 1e-3)


def test_a_placement_that_the_device_cannot_compute_is_passed_over() -> None:
    world = World(share=3.0, workload=TOKEN)
    first = world.operators[0].mul_mat
    cases = [one for one in world.profile.cases if one.device == "CPU" or one.mul_mat != first]
    world = world.with_profile(cases=tuple(cases))
    everything = [True] * len(world.operators)
    with own_policy("everything", lambda problem, room: [placed_whole(room.costs, everything, 0)]) as policy:
        plan = world.plan(policy)
    assert not there(world, plan) and total_s(plan) < inf


def test_a_placement_without_its_seconds_is_refused() -> None:
    world = World(share=3.0)
    nothing = [False] * len(world.operators)
    with (
        own_policy("unpriced", lambda problem, room: [Placement.whole(nothing, 0)]) as policy,
        pytest.raises(UsageError, match="policy unpriced yields a placement without predicted seconds"),
    ):
        world.plan(policy)


#
# slices and experts
#


def test_hetegen_cuts_each_linear_by_equation_8() -> None:
    """alpha = T_CPU / (T_CPU + T_GPU + T_COM), of times by rates; within one step of the cut."""
    world = slow_cpu(model=small_worlds.WIDE, options=STREAMED, share=1.0)
    cpu_s, gpu_s, com_s = 1 / 20e9, 1 / 8e12, 1 / 10e9
    alpha = cpu_s / (cpu_s + gpu_s + com_s)
    for operator, place in zip(world.operators, world.plan("hetegen").operators, strict=True):
        if operator.layer is not None:
            assert place.gg == 0 and place.cg == pytest.approx(alpha, abs=0.07), operator.name


def test_twinpilots_without_its_solver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(UsageError, match=r"pip install 'oallama\[twinpilots\]'"):
        World().plan("twinpilots")


def test_scheinfer_balances_cpu_and_link() -> None:
    """In decode both sides end together: the CPU computes 1 - r of an FFN while the link copies r (Eq. 10)."""
    world = slow_cpu(model=model_info(n_embd=1024, n_ff=8192), options=STREAMED, share=1.0)
    pairs = zip(world.operators, world.plan("scheinfer").operators, strict=True)
    shares = {place.cg for operator, place in pairs if operator.role in ("ffn_gate", "ffn_up", "ffn_down")}
    assert all(share == pytest.approx(1 / 3, abs=0.05) for share in shares)


def many_experts(**facts: object) -> World:
    """A model of 32 experts, of which each token uses four."""
    model = model_info(n_embd=1024, n_ff=1024, n_expert=32, n_expert_used=4)
    return slow_cpu(**{"model": model, "share": 0.45, **facts})


def test_experts_follow_the_conversation_where_nothing_is_known_of_their_use() -> None:
    world = many_experts()
    plan = world.plan()
    hot = {len(place.hot_experts) for place in plan.operators if place.hot_experts}
    assert (
        plan.policy == "experts"
        and plan.streaming.exchange == "idle"
        and plan.streaming.link_bytes_per_s
        and min(hot) > 1
    )
    assert "follow the conversation" in plan.notes[-1]
    assert total_s(plan) < total_s(world.plan("scheinfer"))


def test_experts_are_exchanged_out_of_memory_that_the_device_can_read() -> None:
    """In the plain layout, or, where another one is much faster and the host has room, out of a second copy."""
    slow, fast = (many_experts(repacked=repacked).plan("experts") for repacked in (0.0, 3.0))
    assert {place.layout for place in slow.operators if place.hot_experts} == {PLAIN_LAYOUT}
    assert slow.streaming.exchange == "idle" and not slow.streaming.kept_twice
    assert {place.layout for place in fast.operators if place.hot_experts} == {"CPU_REPACK"}
    assert fast.streaming.exchange == "idle" and fast.streaming.kept_twice
    crowded = many_experts(repacked=3.0, host_copies_limit=0).plan("experts")
    assert not crowded.streaming or not crowded.streaming.kept_twice


def test_misses_are_shared_between_the_link_and_the_cpu() -> None:
    """A faster link makes no token slower; a fast one beside a slow CPU carries all of them, a slow one none."""
    seconds = [many_experts(card=linked(rate)).plan("experts").predicted.tpot_s for rate in (1e8, 1e10, 4e10, 1e12)]
    assert seconds == sorted(seconds, reverse=True) and seconds[1] < 0.95 * seconds[0] and seconds[3] < seconds[2]


def test_misses_of_a_prompt_are_shared_too() -> None:
    """Though it uses more experts than there are slots: a faster link makes prompts faster."""
    prompts = Workload(n_prompt=512, n_gen=64, n_ctx=1024)
    plans = [many_experts(card=linked(rate), workload=prompts).plan("experts") for rate in (1e9, 1e10, 4e10)]
    assert all(plan.streaming.exchange == "idle" for plan in plans)
    seconds = [plan.predicted.ttft_s for plan in plans]
    assert seconds[1] < 0.7 * seconds[0] and seconds[2] < seconds[1]


def test_attention_between_weights_of_the_split_back_end_is_computed_by_the_cpu() -> None:
    """llama.cpp offloads a prompt's attention only between mul-mats that it offloads; with n_g the split back end has
    them."""
    world = slow_cpu(workload=Workload(n_prompt=512, n_gen=0, n_ctx=1024), tokens=(512,))
    slower = tuple(
        replace(case, seconds=case.seconds + 1.0 * (case.device == CPU_DEVICE)) for case in world.profile.rest
    )
    n_layer, rows = world.model.n_layer, [placed(operator.name) for operator in world.operators]
    of_llama = some_plan(rows, workload=world.workload, n_gpu_layers=1, attention=Attention("on"))
    stream = StreamSettings(n_slots=1, prefetch="ahead", kept_twice=True)
    of_split = replace(of_llama, token_assignment=((512, 256),), streaming=stream)
    for plan, more_s in ((of_llama, 0.0), (of_split, float(n_layer))):
        now, then = (
            each.placer().price(plan, world.workload).ttft_s for each in (world, world.with_profile(rest=slower))
        )
        assert then - now == pytest.approx(more_s, rel=0.1, abs=1e-6)


#
# memory
#


def test_the_memory_breakdown_counts_each_instance_of_the_back_end_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama.cpp's and the split back end's; first from what is kept free."""
    world = slow_cpu(share=0.8)
    world = replace(world, workload=replace(world.workload, n_ubatch=32))  # its pool is small, as its device
    capacity, one = world.device_bytes, world.device_bytes // 50
    monkeypatch.setitem(RUNTIME_BYTES, "CUDA", one)
    found = {name: world.plan(name).memory.runtime for name in ("layers", "flexgen", "cpu")}
    pool = found["layers"] - one
    assert pool > 0 and found == {"layers": one + pool, "flexgen": 2 * (one + pool), "cpu": 0}
    assert replace(world, device_facts=(("device_backend", "Vulkan"),)).plan("layers").memory.runtime == 0
    for runtime, limit in ((1, int(0.9 * capacity)), (capacity // 5, capacity - capacity // 5 - pool)):
        monkeypatch.setitem(RUNTIME_BYTES, "CUDA", runtime)
        assert world.plan("layers").memory.limit == limit


def test_what_a_card_keeps_for_itself_grows_with_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ggml-cuda's own rules: the input of the largest mul-mat as Q8_1, by cuBLAS input, result and weight in F16."""
    monkeypatch.setitem(RUNTIME_BYTES, "CUDA", fixed := 48 * MIB)
    down = weight(role="ffn_down", k=14336, n=4096, layer=0)
    experts = weight(role="ffn_down_exps", k=1500, n=4096, layer=0, n_expert=64, used=8)
    output = weight(role="output", k=4096, n=128_000)

    def kept(*operators: Operator, backend: str = "CUDA", name: str = "NVIDIA GeForce RTX 3060", n: int = 512,
             plain: bool = False, instances: int = 1) -> int:  # fmt: skip
        return runtime_bytes(backend, name, operators, n, plain, instances) - fixed * instances

    assert kept(down) == 512 * 14336 * 36 // 32 and kept(down, n=2048) == 4 * kept(down)
    assert kept(experts) == 512 * 8 * 1536 * 36 // 32, "rows are padded to 512 elements"
    assert kept(down, output) == kept(down), "the output matrix sees one token"
    assert kept(down, instances=2) == 2 * kept(down)
    assert kept(down, plain=True) == kept(down) + CUBLAS_BYTES
    in_f16 = 2 * 512 * (14336 + 4096)
    assert kept(replace(down, type="F16"), instances=2) == 2 * in_f16 + CUBLAS_BYTES, "cuBLAS is loaded once"
    for slow in (kept(replace(down, type="IQ1_M")), kept(down, name="Tesla V100-PCIE-32GB")):
        assert slow == in_f16 + 2 * 14336 * 4096 + CUBLAS_BYTES, "and the weight in F16, which has no integer kernel"
    for backend in ("Emulated", "Vulkan", "RPC", "CPU"):
        assert runtime_bytes(backend, "", (down,), 512, True, 2) == 0


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
    found = {mode: replace(world, options=Options(flash_attn=mode)).plan("oato") for mode in ("on", "off", "auto")}
    assert total_s(found["auto"]) == pytest.approx(min(total_s(found["on"]), total_s(found["off"])))
    for mode, plan in found.items():
        assert plan.attention.flash_attn == mode or mode == "auto"


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(("without", "chosen"), [("off", "on"), ("on", "off")])
def test_a_way_of_attention_that_was_not_timed_is_not_chosen(without: str, chosen: str, on_cpu: bool) -> None:
    world = World(workload=Workload(n_prompt=1, n_gen=64, n_ctx=2048, n_past=1500), options=Options())
    lost = [
        case
        for case in world.profile.rest
        if (case.device == CPU_DEVICE) is on_cpu and case.shape.flash_attn is (without == "on")
    ]
    rest = tuple(case for case in world.profile.rest if case not in lost)
    assert lost and world.with_profile(rest=rest).plan("layers").attention.flash_attn == chosen


#
# refused
#


def beside_an_encoder(n_more_layers: int = 0) -> World:
    """n_more_layers: of the decoder."""
    world = World()
    encoder = [replace(o, name=f"enc.{o.name}", role=f"enc.{o.role}") for o in world.operators[:-1]]
    more = [replace(o, layer=world.model.n_layer + n) for n in range(n_more_layers) for o in world.operators[:7]]
    vars(world)["operators"] = (*encoder, *world.operators[:-1], *more, world.operators[-1])
    return world


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: World(options=STREAMED).plan("fit"), "limit it by --vram"),
        (lambda: World().plan("layers", rules=Rules(fill="full")), "apply only to policy oato, not to layers"),
        (lambda: Rules(affinity="best"), "unknown affinity 'best'; choose from"),
        (lambda: Rules(fill="best"), "unknown fill 'best'; choose from"),
        (lambda: Rules(prefetch="best"), "unknown prefetch 'best'; choose from"),
        (lambda: slow_cpu().plan("experts"), "needs a model with experts"),
        (lambda: routed().plan("experts"), "count-experts"),
        (lambda: slow_cpu().plan("fiddler"), "needs a model with experts"),
        (lambda: Options(flash_attn="off", type_v="q8_0"), "V cache of type q8_0 needs flash attention"),
        (lambda: beside_an_encoder().plan("oato"), "encoder-decoder models are not supported on a device"),
        (lambda: beside_an_encoder(2).plan("oato"), "encoder-decoder models are not supported on a device"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(asked: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        asked()
