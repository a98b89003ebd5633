"""The `hetegen` policy: α in closed form and by the alpha benchmark, of each linear, and what is promoted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import LOAD, N_LAYER, plan_of, problem
from seeds import examples
from slicing_cases import GEMMS, SHARED_DRAM, gemm, machine, streamed
from split_cases import EMBD, FF, VOCAB, World, attention, ffn, operator, where

from oallama.core.profile import LinearFit
from oallama.core.types import Operator
from oallama.cost.blocks import split_blocks
from oallama.cost.rates import Interference
from oallama.cost.slices import Gemm
from oallama.model.cut import cut_extent
from oallama.place.decide import decide
from oallama.place.placement import Candidate, placed_by_plan
from oallama.place.policies.hetegen import Balance, alpha, alpha_benchmark, balance, cut
from oallama.place.price import price
from oallama.place.problem import Problem
from oallama.place.sharing import Slicer
from oallama.place.simulate import simulate
from oallama.plan.plan import Plan

TIMES = st.floats(1e-6, 1.0)


#
# alpha
#


@settings(deadline=None)
@given(TIMES, TIMES, TIMES, TIMES)
def test_both_sides_take_as_long(cpu_s: float, gpu_s: float, transfer_s: float, pin_s: float) -> None:
    for overlapped in (True, False):
        share = alpha(cpu_s, gpu_s, transfer_s, pin_s, overlapped)
        com_s = max(pin_s, transfer_s) if overlapped else pin_s + transfer_s
        assert 0 <= share <= 1
        assert (1 - share) * cpu_s == pytest.approx(share * (gpu_s + com_s))  # Eq. 4, 8


def test_equation_7_is_what_it_is_without_the_gpu() -> None:
    assert alpha(3.0, 0.0, 1.0) == pytest.approx(3 / 4)
    v_cpu, v_gpu, v_com = 1 / 3.0, 1 / 0.5, 1 / 1.0
    assert alpha(3.0, 0.5, 1.0) == pytest.approx(1 / (v_cpu / v_com + v_cpu / v_gpu + 1))  # Eq. 5


@settings(deadline=None)
@given(TIMES, TIMES, TIMES, st.floats(0.01, 1.0))
def test_a_faster_link_never_lowers_alpha(cpu_s: float, gpu_s: float, transfer_s: float, faster: float) -> None:
    assert alpha(cpu_s, gpu_s, transfer_s * faster) >= alpha(cpu_s, gpu_s, transfer_s)


#
# the alpha benchmark
#


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.05, 0.95))
def test_it_finds_where_both_sides_meet_wherever_it_begins(start: float, meet: float) -> None:
    """Neither line is one of α alone: each has a time of its own."""
    found = alpha_benchmark(lambda share: 0.5 + 2 * (meet - share), lambda share: 0.5 + (share - meet), start)
    assert found.alpha == pytest.approx(meet, abs=1e-6)
    assert found.seconds == pytest.approx(0.5, abs=1e-5)


def test_curves_are_followed() -> None:
    """A CPU that loses less than it is given less to do."""
    found = alpha_benchmark(lambda share: (1 - share) ** 2, lambda share: share, start=0.5)
    assert found.alpha == pytest.approx((3 - 5**0.5) / 2, abs=1e-6)


def test_a_side_that_is_never_worth_it_gets_nothing() -> None:
    assert alpha_benchmark(lambda share: 1 - share, lambda share: 5 + share, 0.5) == Balance(0.0, 1.0)
    assert alpha_benchmark(lambda share: 5 + (1 - share), lambda share: share, 0.5) == Balance(1.0, 1.0)


@settings(max_examples=examples(60))
@given(st.lists(GEMMS, min_size=1, max_size=3), st.floats(1e-11, 1e-8), st.floats(0.05, 1.0), SHARED_DRAM)
def test_a_faster_link_never_lowers_what_is_streamed(
    gemms: list[Gemm], s_per_byte: float, faster: float, beside: Interference
) -> None:
    block = streamed(gemms)
    slow, fast = machine(s_per_byte, beside=beside), machine(s_per_byte * faster, beside=beside)
    assert balance(block, fast).alpha >= balance(block, slow).alpha - 1e-6
    assert cut(block, fast).cg >= cut(block, slow).cg - block.block.step


def test_without_fixed_times_the_benchmark_says_what_the_closed_form_does() -> None:
    block, on = streamed([gemm(1e-3, 1e-4)]), machine(1e-9)
    assert balance(block, on).alpha == pytest.approx(alpha(1e-3, 1e-4, 1e-3), abs=1e-6)


def test_what_cpu_and_link_take_from_each_other_moves_alpha() -> None:
    block = streamed([gemm(1e-3, 1e-4)])
    alone = balance(block, machine(1e-9))
    slow_link = balance(block, machine(1e-9, beside=Interference(link_with_cpu=0.5)))
    slow_cpu = balance(block, machine(1e-9, beside=Interference(cpu_with_link=0.5)))
    assert slow_link.alpha < alone.alpha < slow_cpu.alpha
    assert min(slow_link.seconds, slow_cpu.seconds) > alone.seconds
    halves = Interference(cpu_with_link=0.5, link_with_cpu=0.5)
    whole = balance(streamed([gemm(10.0, 1e-4)]), machine(1e-9, beside=halves))
    assert whole.alpha == 1.0 and whole.seconds == pytest.approx(1e-3 + 1e-4), "nothing is left beside the link"
    none = balance(streamed([gemm(1e-3, 1e-4)]), machine(1e-3, beside=halves))
    assert none.alpha == 0.0 and none.seconds == pytest.approx(1e-3)


@settings(max_examples=examples(60))
@given(st.lists(GEMMS, min_size=1, max_size=3), st.sampled_from([320, 1000, 1024]), st.sampled_from([32, 256]))
def test_cuts_are_legal(gemms: list[Gemm], extent: int, step: int) -> None:
    made = cut(streamed(gemms, extent, step), machine(1e-9))
    assert made.gg == 0 and made.extent == extent and min(made.cc, made.cg) >= 0
    assert made.cc % step == 0 or made.cc == extent


#
# the module scheduler
#

SLOW = World(cpu_rate=2e8, device_rate=8e9, link=LinearFit(1e-6, 2e-9, 1.0))


def test_every_linear_operator_of_a_layer_is_cut_where_no_weight_may_stay() -> None:
    made = problem(SLOW, free=10**7, gpu_weights=0.0)
    found = where(decide(made, "hetegen", LOAD, "mixed"), made.operators)
    assert {op.role: found[op.name] for op in made.operators} == {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "streamed"),
        "output": "cpu",
    }


def test_promotion_goes_by_gain_while_memory_lasts() -> None:
    """With so much alike, single operators of attention, which pay the fixed times of a slice each, go first."""
    n_whole = []
    for free in (150_000, 600_000, 10**7):
        made = problem(SLOW, free=free)
        decision = decide(made, "hetegen", LOAD, "mixed")
        assert decision.memory.spare >= 0
        n_whole.append(sum(decision.placement.on_device))
    assert n_whole == sorted(n_whole) and n_whole[-1] == len(made.operators)
    assert 0 < n_whole[1] < len(made.operators)


def test_a_part_that_does_not_fit_the_ring_stays_on_the_cpu() -> None:
    made = problem(SLOW, free=40_000)
    decision = decide(made, "hetegen", replace(LOAD, n_ubatch=64), "mixed")
    assert decision.memory.spare >= 0
    found = where(decision, made.operators)
    assert {found[op.name] for op in made.operators if op.role.startswith("ffn_")} == {"cpu"}
    n_cpu = sum(found[op.name] == "cpu" for op in made.operators if op.layer is not None)
    assert any(note.startswith(f"{n_cpu} operators stay on the CPU whole") for note in decision.notes)


@settings(max_examples=examples(20))
@given(st.sampled_from([0.0, 0.2, 0.5, None]), st.integers(50_000, 4_000_000))
def test_layers_in_another_order_get_the_same_plan(gpu_weights: float | None, free: int) -> None:
    """Two layers whose FFNs differ in size, one before the other and the other way round."""
    found = []
    for sizes in ((FF, 2 * FF), (2 * FF, FF)):
        layers = [op for i, n_ff in enumerate(sizes) for op in (*attention(i), *ffn(i, n_ff=n_ff))]
        made = problem(SLOW, free, [*layers, operator("output", EMBD, VOCAB, None)], gpu_weights=gpu_weights)
        decision = decide(made, "hetegen", replace(LOAD, n_ubatch=8), "mixed")
        slices = decision.placement
        cg = slices.cg if slices else (0,) * len(made.operators)
        rows = zip(made.operators, decision.placement.on_device, cg, strict=True)
        found.append(sorted((op.role, op.shape, there, elements) for op, there, elements in rows))
    assert found[0] == found[1]


#
# each linear by itself
#

# no fixed times, so that the alpha benchmark says what the closed form does
PLAIN = World(cpu_rate=2e8, device_rate=8e9, launch_s=0.0, link=LinearFit(0.0, 2e-9, 1.0))
FFN_ROLES = ("ffn_gate", "ffn_up", "ffn_down")


def slow_down(world: World, slower: float, free: int = 10**7, gpu_weights: float | None = 0.0) -> Problem:
    """Of which the CPU takes so many times as long for ffn_down."""
    made = problem(world, free, gpu_weights=gpu_weights)
    downs = {op.mul_mat for op in made.operators if op.role == "ffn_down"}
    cases = tuple(
        replace(case, seconds=case.seconds * slower, samples=tuple(s * slower for s in case.samples))
        if case.device == "CPU" and case.mul_mat in downs
        else case
        for case in made.profile.cases
    )
    return replace(made, profile=replace(made.profile, cases=cases))


def streamed_shares(decision: Candidate, operators: tuple[Operator, ...]) -> dict[str, set[float]]:
    """α of the operators of each role."""
    assert decision.placement.is_sliced
    found: dict[str, set[float]] = {}
    for op, cg in zip(operators, decision.placement.cg, strict=True):
        found.setdefault(op.role, set()).add(cg / cut_extent(op))
    return found


def joins_of(made: Problem, decision: Candidate) -> set[str]:
    """The names of what is joined in a token."""
    return {work.name for work in simulate(made, LOAD, decision.placement).token.works if work.kind == "join"}


def test_each_linear_has_the_alpha_of_equation_8() -> None:
    """T'_CPU, T'_GPU and T'_COM are bytes by the described rates; gate and up have one, down another, which is joined
    by itself."""
    made = slow_down(PLAIN, 2.0)
    decision = decide(made, "hetegen", LOAD, "mixed")
    shares = streamed_shares(decision, made.operators)
    for role, slower in (("ffn_gate", 1.0), ("ffn_up", 1.0), ("ffn_down", 2.0), ("attn_q", 1.0)):
        cpu_s, gpu_s, com_s = slower / 2e8, 1 / 8e9, 2e-9
        (share,) = shares[role]
        assert share == pytest.approx(cpu_s / (cpu_s + gpu_s + com_s), abs=32 / EMBD)
    joins = joins_of(made, decision)
    assert {f"blk.{layer}.{role}.weight" for layer in range(N_LAYER) for role in FFN_ROLES} <= joins


def test_an_ffn_whose_shares_are_equal_is_joined_once() -> None:
    made = problem(PLAIN, free=10**7, gpu_weights=0.0)
    decision = decide(made, "hetegen", LOAD, "mixed")
    shares = streamed_shares(decision, made.operators)
    assert shares["ffn_gate"] == shares["ffn_up"] == shares["ffn_down"]
    assert {name for name in joins_of(made, decision) if "ffn" in name.lower()} == {"layer 0: FFN", "layer 1: FFN"}


def test_a_linear_of_an_ffn_costs_what_a_lone_mul_mat_costs() -> None:
    """Sending, computing and joining of each are those of a linear of attention with the same weight."""
    made = slow_down(PLAIN, 2.0)
    placed = decide(made, "hetegen", LOAD, "mixed").placement
    slicer = Slicer(made, LOAD)
    found = zip(*slicer.cuts_of(placed), strict=True)
    up = next(of for block, (of, _) in found if made.operators[block.operators[0]].role == "ffn_up")
    lone = replace(made.operators[0], name="blk.0.attn_q.weight", role="attn_q", shape=(EMBD, FF, 1))
    (block,) = split_blocks([replace(lone, bytes=up.block.bytes)], [32])
    assert replace(up.block, operators=()) == replace(block, operators=())


@settings(max_examples=examples(20))
@given(st.sampled_from([0.0, 0.3, None]), st.integers(40_000, 4_000_000), st.sampled_from([SLOW, PLAIN]))
def test_its_plan_keeps_to_the_memory_and_survives_json_and_pricing(
    gpu_weights: float | None, free: int, world: World
) -> None:
    made = slow_down(world, 2.0, free, gpu_weights)
    decision = decide(made, "hetegen", LOAD, "mixed")
    assert decision.memory.spare >= 0
    plan = plan_of(made, decision)
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert read == plan
    if not decision.placement.is_sliced:
        return
    again = placed_by_plan(N_LAYER, made.operators, read)
    assert price(made, decision.workload, again).tpot_s == pytest.approx(decision.predicted.tpot_s)
