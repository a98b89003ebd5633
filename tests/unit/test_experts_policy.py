"""The `experts` policy: what hot experts cost by hand, choices as good as the best of all there are, within the memory,
judged on traffic that they were not chosen from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import GPU, LOAD, N_LAYER, PAIR, block_of, experts, problem
from seeds import examples
from split_cases import EMBD, FF, VOCAB, World, attention, llama, operator

from oallama.core.errors import UsageError
from oallama.core.profile import LinearFit
from oallama.core.routing import LayerRouting, Routing, Uses
from oallama.core.types import Operator, Workload
from oallama.cost.blocks import ffn_block, hot_weights
from oallama.cost.experts import ExpertUse, expert_use, experts_alike
from oallama.cost.rates import slice_rates
from oallama.cost.slices import Cut, Pricing, slice_times
from oallama.place.decide import decide
from oallama.place.placement import Placement, cpu, nothing_there
from oallama.place.price import price
from oallama.place.problem import Problem, costs_of
from oallama.place.sharing import Slicer

N_EXPERT, N_USED = 8, 2
SKEWED: Uses = (1.0, 2.0, 900.0, 3.0, 800.0, 4.0, 5.0, 6.0)
EVEN: Uses = (1.0,) * N_EXPERT
FREE = 4_000_000  # bytes of the device; experts have 7.1 MB
SLOW_CPU = World(cpu_rate=5e8, device_rate=8e9, launch_s=1e-6, link=LinearFit(1e-6, 1e-8, 1.0))


def routing(*uses: Uses, later: Uses | None = None, prompt: Uses | None = None) -> Routing:
    """Of layers that used their experts so in the first recording; later: in the last one, if otherwise."""

    def layers(of: Sequence[Uses], last: Uses | None) -> tuple[LayerRouting, ...]:
        return tuple(LayerRouting(i, 100, use, before=use, latest=last or use) for i, use in enumerate(of))

    prompts = [prompt or use for use in uses]
    return Routing(1, "f" * 64, N_EXPERT, N_USED, 4096, layers(uses, later), layers(prompts, prompt))


def moe(n_layer: int = N_LAYER) -> list[Operator]:
    layers = [
        replace(op, layer=layer, name=op.name.replace("blk.0", f"blk.{layer}"))
        for layer in range(n_layer)
        for op in (*attention(0), *experts())
    ]
    return [*layers, operator("output", EMBD, VOCAB, None)]


def hot_staging(n_hot: int, n_tokens: int) -> int:
    """Inputs and hidden values of as many rows as may be hits, in the place of which the results come."""
    rows = min(n_hot, N_USED)
    return (EMBD + rows + 3 * rows * FF) * n_tokens * 4 if n_hot else 0


def known(world: World, free: int, uses: Routing | None, ops: list[Operator] | None = None) -> Problem:
    return replace(problem(world, free, ops or moe()), routing=uses)


#
# prices
#


def test_one_token_by_hand() -> None:
    """Two of eight experts a token, each a hit with probability c. The device computes both rows whatever they are."""
    world = World(cpu_rate=1e9, device_rate=4e9, launch_s=3e-5, link=LinearFit(1e-5, 1e-9, 1.0))
    ops = experts()
    profile = world.profile(ops)
    c = 0.7
    use = ExpertUse(tuple(range(N_EXPERT)), (0.0, 0.4, c, *[0.9] * 5, 1.0), EVEN)
    of = replace(block_of(ops, profile), use=use)
    all_cpu_s = sum(op.bytes for op in ops) / 1e9
    gpu_s = 3e-5 + sum(op.bytes for op in ops) / 4e9
    up_s = 1e-5 + 4e-9 * (EMBD + N_USED)
    down_s = 1e-5 + 4e-9 * N_USED * EMBD
    join_s = 12 * (N_USED + (1 - c) * N_USED) * EMBD / 1e9
    together_s = sum(
        comb(2, misses) * (1 - c) ** misses * c ** (2 - misses) * max(misses / 2 * all_cpu_s, gpu_s)
        for misses in range(3)
    )
    seconds = Pricing(slice_rates(profile)).seconds(of, Cut(FF, 0, 0, 2), 1)
    assert seconds == pytest.approx(up_s + together_s + down_s + join_s)


def test_of_a_prompt_the_device_computes_all_rows_and_the_cpu_what_misses() -> None:
    world = World(cpu_rate=1e9, device_rate=4e9, token_s_per_byte=1e-10, launch_s=0.0, link=LinearFit(0.0, 0.0, 1.0))
    ops = experts()
    profile = world.profile(ops)
    use = ExpertUse(tuple(range(N_EXPERT)), EVEN, (0.0, 0.3, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 1.0))
    of = replace(block_of(ops, profile), use=use)
    n_bytes = sum(op.bytes for op in ops)
    times = slice_times(of, slice_rates(profile), Cut(FF, 0, 0, 2), 512)
    assert times.cpu_s == pytest.approx(0.4 * n_bytes * (1e-9 + 511e-10))
    assert [step.gpu_s for step in times.steps] == [pytest.approx(n_bytes * (1 / 4e9 + 511 * 1e-10 / 4))]
    one_row = slice_times(of, slice_rates(profile), Cut(FF, 0, 0, 1), 512)
    assert one_row.steps[0].gpu_s == pytest.approx(times.steps[0].gpu_s / 2), "of one hot expert one row of two"
    for n_tokens in (2, 4):
        few = slice_times(of, slice_rates(profile), Cut(FF, 0, 0, 2), n_tokens)
        read = 6 * (1 - (1 - 0.8 / 6) ** n_tokens) / N_USED  # cold experts that are missed, of those that a token reads
        assert few.cpu_s == pytest.approx(max(read / 1e9, 0.4 * (1e-9 + (n_tokens - 1) * 1e-10)) * n_bytes)
    assert slice_times(of, slice_rates(profile), Cut(FF, 0, 0, N_EXPERT), 512).cpu_s == 0, "all hits"


def test_a_set_is_judged_on_later_traffic() -> None:
    changed = tuple(reversed(SKEWED))
    (use,) = expert_use(routing(SKEWED, later=changed)).values()
    assert use.order[:2] == (2, 4), "chosen from all that is known"
    assert use.decode[2] == pytest.approx((4 + 3 + 2) / (sum(SKEWED) + 8)), "what it served when others were used"
    assert (use.decode[0], use.decode[N_EXPERT]) == (0.0, 1.0)
    (same,) = expert_use(routing(SKEWED)).values()
    assert same.decode[2] == pytest.approx(1702 / (sum(SKEWED) + 8)) == same.prompt[2]
    (short,) = expert_use(routing(SKEWED, later=(0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0))).values()
    assert short.decode[2] == pytest.approx(0.4), "two uses say little"
    once = replace(routing(SKEWED).decode[0], before=(0.0,) * N_EXPERT)
    assert expert_use(replace(routing(SKEWED), decode=(once,))) == {}, "seen once promises nothing"
    assert expert_use(replace(routing(SKEWED), prompt=()))[0].prompt == pytest.approx(experts_alike(N_EXPERT).prompt)


#
# choices
#


@settings(max_examples=examples(25))
@given(
    st.floats(1e8, 1e10), st.floats(0, 1e-3), st.integers(0, 3_000_000),
    st.lists(st.lists(st.integers(0, 50), min_size=8, max_size=8), min_size=2, max_size=2),
)  # fmt: skip
def test_choices_are_close_to_brute_force(rate: float, launch_s: float, room: int, counts: list[list[int]]) -> None:
    """Two FFNs of experts: every combination of hot sets and slices within the memory."""
    ops = [replace(op, layer=i, name=f"blk.{i}.{op.role}.weight") for i in range(2) for op in experts()]
    uses = [tuple(1.0 + count for count in of) for of in counts]
    load = Workload(8, 32, 256, 8)
    made = known(World(device_rate=rate, launch_s=launch_s), 10**9, routing(*uses), ops)
    slicer = Slicer(made, load, streams=False, hot=True)
    whole = cpu(costs_of(made, load, "mixed", llama_uses_device=False))
    found = slicer.blocks(whole)
    blocks = [block.types[0] for block in found]
    plan = slicer.plan(whole, room, room)
    assert plan is not None and plan.weights_bytes + plan.staging_bytes <= room

    def total_s(cuts: Sequence[Cut]) -> float:
        return slicer.priced(found, list(zip(blocks, cuts, strict=True))).total_s(load)

    choices = [
        [Cut(FF, 0, 0), *(Cut(FF, 0, 0, n) for n in range(1, 9)), *(Cut(FF - gg, 0, gg) for gg in range(64, FF, 64))]
        for _ in blocks
    ]
    start_s = total_s([Cut(FF, 0, 0)] * 2)
    best, most = start_s, 0.0
    for cuts in itertools.product(*choices):
        seconds = total_s(cuts)
        n_bytes = sum(of.weight_bytes(cut) for of, cut in zip(blocks, cuts, strict=True))
        staging = max(
            of.hot(cut.n_hot).staging_bytes(FF, 8) if cut.n_hot else of.block.staging_bytes(cut.gg, 8) if cut.gg else 0
            for of, cut in zip(blocks, cuts, strict=True)
        )
        if n_bytes + staging <= room:
            best = min(best, seconds)
        if sum(not cut.is_whole for cut in cuts) == 1:
            most = max(most, start_s - seconds)
    assert plan.total_s(load) <= best + most + 1e-12, "a greedy ends at most one block worse"
    if not plan.short:
        assert plan.total_s(load) <= best * (1 + 1e-9)


def hot_of(made: Problem, policy: str = "experts", load: Workload = LOAD) -> tuple[tuple[int, ...], ...]:
    slices = decide(made, policy, load, "mixed").placement
    return tuple(own for own in (slices.hot if slices else ()) if own)


def test_few_experts_of_much_use_are_hot_and_experts_used_alike_are_sliced() -> None:
    few = hot_of(known(SLOW_CPU, FREE, routing(*[SKEWED] * N_LAYER)))
    assert few and all({2, 4} <= set(own) for own in few)
    assert hot_of(known(SLOW_CPU, FREE, routing(*[EVEN] * N_LAYER))) == ()


def test_what_is_not_seen_again_is_not_hot() -> None:
    gone = routing(*[SKEWED] * N_LAYER, later=(1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0))
    assert hot_of(known(SLOW_CPU, FREE, gone)) == ()


def test_a_crossing_that_costs_more_than_it_saves_is_not_made() -> None:
    dear = replace(SLOW_CPU, launch_s=1.0)
    assert hot_of(known(dear, FREE, routing(*[SKEWED] * N_LAYER))) == ()


def biased(ops: Sequence[Operator]) -> list[Operator]:
    return [replace(op, biased=op.op == "MUL_MAT_ID") for op in ops]


def test_biases_of_hot_experts_are_sent_with_each_batch() -> None:
    world = World(link=LinearFit(1e-5, 1e-9, 1.0))
    ops, use = experts(), ExpertUse(tuple(range(N_EXPERT)), (0.5,) * 9, (0.5,) * 9)
    profile = world.profile(ops)
    plain = replace(block_of(ops, profile), use=use)
    own = ffn_block(biased(ops), range(len(ops)))
    assert own.biases == sum(op.shape[1] for op in ops)
    of = replace(plain, block=own)
    for n_hot, n_tokens in ((1, 1), (3, 1), (3, 64)):
        sent = [slice_times(one, slice_rates(profile), Cut(FF, 0, 0, n_hot), n_tokens).send_s for one in (plain, of)]
        assert sent[1] - sent[0] == pytest.approx(1e-9 * 4 * own.biases * n_hot)


@pytest.mark.parametrize("world", [SLOW_CPU, PAIR, GPU])
def test_experts_with_biases_may_be_hot(world: World) -> None:
    made = known(world, FREE, routing(*[SKEWED] * N_LAYER), biased(moe()))
    found = decide(made, "experts", LOAD, "mixed")
    assert found.placement.seconds <= decide(made, "scheinfer", LOAD, "mixed").placement.seconds * (1 + 1e-3)
    slices = found.placement
    hot = slices.hot if slices.is_sliced and slices.hot else ((),) * len(made.operators)
    if world is SLOW_CPU:
        assert all({2, 4} <= set(own) for own in hot if own) and any(hot)
    if not slices.is_sliced or not any(hot):
        return
    assert slices.hot_bytes == hot_weights(made.operators, hot)
    assert slices.staging_bytes >= max(hot_staging(len(own), found.workload.n_ubatch) for own in hot)
    assert found.memory.spare >= 0
    again = price(made, found.workload, found.placement)
    assert again.tpot_s == pytest.approx(found.predicted.tpot_s)
    assert again.ttft_s == pytest.approx(found.predicted.ttft_s)


def test_experts_with_biases_that_are_on_the_device_in_part_are_no_block_of_one_layer() -> None:
    ops = biased(moe())
    slicer = Slicer(known(SLOW_CPU, FREE, routing(*[SKEWED] * N_LAYER), ops), LOAD, hot=True)
    gate = next(i for i, op in enumerate(ops) if op.layer == 0 and op.role == "ffn_gate_exps")
    base = nothing_there(len(ops), 0)
    placed = Placement.whole([i == gate for i in range(len(ops))], base.first_device_layer)

    def blocks(of: Placement, together: Sequence[int]) -> list[tuple[int, ...]]:
        return [block.operators for block in slicer.blocks(of, together)]

    assert blocks(base, (0,)) != blocks(base, ())
    assert blocks(placed, (0,)) == blocks(placed, ())


def test_experts_with_biases_that_are_used_alike_are_sliced() -> None:
    made = known(SLOW_CPU, FREE, routing(*[EVEN] * N_LAYER), biased(moe()))
    slices = decide(made, "experts", LOAD, "mixed").placement
    assert slices.is_sliced and not any(slices.hot) and any(slices.gg)


def test_without_known_uses_it_says_how_to_come_by_them() -> None:
    with pytest.raises(UsageError, match="run MODEL --count-experts"):
        decide(known(SLOW_CPU, 10**6, None), "experts", LOAD, "mixed")
    once = replace(routing(SKEWED), decode=(replace(routing(SKEWED).decode[0], before=(0.0,) * N_EXPERT),))
    with pytest.raises(UsageError, match="nothing was recorded twice"):
        decide(known(SLOW_CPU, 10**6, once), "experts", LOAD, "mixed")
    with pytest.raises(UsageError, match="this one has none"):
        decide(known(SLOW_CPU, 10**6, None, llama(N_LAYER)), "experts", LOAD, "mixed")
