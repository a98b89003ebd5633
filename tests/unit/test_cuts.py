"""r_CG* and n_g: the solver against a search of every cut and every n_g, and what must hold on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from seeds import examples
from slicing_cases import INTERFERENCE, MACHINES, SHARED_MACHINES, STREAMED, gemm, machine, solve_cg, streamed

from oallama.core.profile import LinearFit
from oallama.core.types import StreamSettings, Workload
from oallama.cost.kernels import Kernel
from oallama.cost.rates import Interference, TransferRates
from oallama.cost.slices import BlockType, Cut, Pricing
from oallama.place.cutting import (
    ROWS_AT_ONCE,
    Menus,
    best_cg,
    count_blocks,
    least,
    linear_n_g,
    n_g_at,
    pass_seconds,
    solve_n_g,
    token_table,
)
from oallama.place.memory import most_n_g

JOINS = TransferRates(LinearFit(1e-5, 1e-10, 1.0), LinearFit(1e-5, 1e-10, 1.0), 5e-6)
ALL_CC = Cut(1024, 0, 0)


def cuts(block: BlockType, gg: int) -> list[Cut]:
    """Every cut that the backend can make."""
    rest = block.block.extent - gg
    return [Cut(cc, rest - cc, gg) for cc in sorted({*range(0, rest, block.block.step), rest})]


def every_cut(block: BlockType, on: Pricing, gg: int, n_tokens: int = 1) -> list[float]:
    return [on.seconds(block, cut, n_tokens) for cut in cuts(block, gg)]


def possible_gg(block: BlockType, share: float) -> int:
    """About that share of the block, and such that the rest is a multiple of the step."""
    extent, step = block.block.extent, block.block.step
    return extent - min(extent, round((1 - share) * extent / step) * step)


def test_where_the_device_takes_no_less_no_tokens_are_its() -> None:
    assert solve_n_g([(streamed([gemm(0.0, 0.0)]), ALL_CC)], machine(0.0), 512) == (0, 0.0)


@pytest.mark.parametrize("x", [0, 1, 2, 50, 98, 99, 100])
def test_the_least_of_one_valley_is_found_wherever_it_lies(x: int) -> None:
    assert least(lambda at: abs(at - x), 0, 100) == (x, 0)


@settings(max_examples=examples(200))
@given(STREAMED, MACHINES, st.sampled_from([0.0, 0.3, 0.6, 1.0]), st.sampled_from([1, 7, 512]))
def test_no_cut_is_better_than_the_solved_one(block: BlockType, on: Pricing, share: float, n_tokens: int) -> None:
    gg = possible_gg(block, share)
    found, seconds = solve_cg(block, on, gg, n_tokens)
    assert found in cuts(block, gg)
    assert seconds == pytest.approx(on.seconds(block, found, n_tokens))
    assert seconds <= min(every_cut(block, on, gg, n_tokens)) * (1 + 1e-6)


@settings(max_examples=examples(100))
@given(STREAMED, SHARED_MACHINES | st.builds(machine, st.floats(1e-10, 1e-8), beside=INTERFERENCE),
       st.sampled_from([0.0, 0.3, 0.6]))  # fmt: skip
def test_with_interference_no_cut_is_better_by_more_than_one_granule_is_worth(
    block: BlockType, on: Pricing, share: float
) -> None:
    gg = possible_gg(block, share)
    _, found_s = solve_cg(block, on, gg)
    seconds = every_cut(block, on, gg)
    granule = max((abs(a - b) for a, b in pairwise(seconds)), default=0.0)
    assert found_s <= min(seconds) + granule + 1e-9


@settings(max_examples=examples(100))
@given(STREAMED, st.builds(machine, st.floats(1e-10, 1e-8), beside=INTERFERENCE), st.sampled_from([0.0, 0.3, 0.6]),
       st.sampled_from([1, 512]), st.floats(0.0, 100.0))  # fmt: skip
def test_of_few_cuts_the_best_is_found_for_any_mix_of_passes(
    block: BlockType, on: Pricing, share: float, n_tokens: int, count: float
) -> None:
    block = replace(block, block=replace(block.block, step=max(64, block.block.extent // 16)))
    gg = possible_gg(block, share)

    def seconds(cut: Cut) -> float:
        return on.seconds(block, cut, n_tokens) + count * on.seconds(block, cut, 1)

    found, found_s = best_cg(block, gg, seconds)
    assert found_s == min(map(seconds, cuts(block, gg))) == seconds(found)


def drawn_blocks(n: int) -> Iterator[tuple[BlockType, Pricing]]:
    """Of 28 to 56 granules, with contention: there may be several valleys."""
    draw = Random(7)
    for _ in range(n):
        extent, step = draw.choice([(896, 32), (1792, 32)])
        gemms = [
            gemm(10 ** draw.uniform(-5, -2), 10 ** draw.uniform(-5, -2), 0.0, int(10 ** draw.uniform(4, 7)))
            for _ in range(draw.randint(1, 3))
        ]
        block = streamed(gemms, extent, step, draw.choice([0.0, 1e-5, 1e-3]))
        beside = Interference(*(draw.uniform(0.2, 1.0) for _ in range(6)), one_queue=draw.random() < 0.25)
        ring = StreamSettings(draw.choice([1, 2, 4]), draw.choice(["layer", "ahead"]))
        yield block, machine(10 ** draw.uniform(-11, -8), ring, beside, JOINS, draw.choice([0.0, 1e-5]))


def test_of_many_cuts_none_is_better_by_a_hundredth() -> None:
    for i, (block, on) in enumerate(drawn_blocks(150)):
        n_tokens = (1, 1, 7, 512)[i % 4]
        assert solve_cg(block, on, 0, n_tokens)[1] <= 1.01 * min(every_cut(block, on, 0, n_tokens))


def test_of_a_menu_s_cuts_beside_more_and_more_gg_none_is_better_by_a_hundredth() -> None:
    """Searches begin where those beside less GG ended."""
    for block, on in drawn_blocks(150):
        for cut, seconds in Menus(on, Workload(1, 1, 2), True, 16).choices(block, "decode", None):
            assert seconds <= 1.01 * min(every_cut(block, on, cut.gg))


@settings(max_examples=examples(50))
@given(STREAMED, MACHINES, st.floats(1.0, 20.0))
def test_a_slower_link_never_streams_more(block: BlockType, on: Pricing, times_slower: float) -> None:
    link = on.rates.weights
    slower_link = LinearFit(link.alpha_s, link.beta_s_per_byte * times_slower, 1.0)
    slower = Pricing(replace(on.rates, weights=slower_link), on.streaming)
    (before, before_s), (after, after_s) = solve_cg(block, on, 0), solve_cg(block, slower, 0)
    assert after_s >= before_s * (1 - 1e-9)
    # within what a tie may shift
    assert after.cg <= before.cg or on.seconds(block, after, 1) <= before_s * (1 + 1e-6)


@settings(max_examples=examples(50))
@given(STREAMED, MACHINES, st.floats(1.0, 20.0))
def test_a_slower_cpu_is_never_faster(block: BlockType, on: Pricing, times_slower: float) -> None:
    slower = tuple(
        replace(g, cpu=Kernel(tuple((n, s * times_slower) for n, s in g.cpu.whole), g.cpu.alpha)) for g in block.gemms
    )
    assert solve_cg(replace(block, gemms=slower), on, 0)[1] >= solve_cg(block, on, 0)[1] * (1 - 1e-9)


@settings(max_examples=examples(50))
@given(STREAMED, SHARED_MACHINES)
def test_streaming_is_never_slower_than_not_streaming(block: BlockType, on: Pricing) -> None:
    all_cc = Cut(block.block.extent, 0, 0)
    assert solve_cg(block, on, 0)[1] <= on.seconds(block, all_cc, 1) * (1 + 1e-12)


def test_a_saturated_memory_leaves_nothing_to_stream() -> None:
    """The CPU alone uses all of DRAM: what is streamed, the CPU loses, and joining costs more than is won."""
    block = streamed([gemm(25e-3, 1e-4, n_bytes=1_000_000_000)] * 3)  # 40 GB/s
    free, saturated, half = (
        machine(1 / 20e9, transfer=JOINS, beside=Interference(cpu_with_link=cpu, link_with_cpu=link))
        for cpu, link in ((1.0, 1.0), (0.625, 0.75), (0.825, 0.75))
    )
    assert solve_cg(block, free, 0)[0].cg > 0
    assert solve_cg(block, saturated, 0)[0].cg == 0
    assert 0 < solve_cg(block, half, 0)[0].cg < solve_cg(block, free, 0)[0].cg


def test_running_ahead_streams_more_where_attention_takes_long() -> None:
    block = streamed([gemm(4e-3, 1e-4)] * 3, gap_s=6e-3)
    per_layer, per_layer_s = solve_cg(block, machine(4e-9, StreamSettings(2, "layer")), 0)
    ahead, ahead_s = solve_cg(block, machine(4e-9, StreamSettings(2, "ahead")), 0)
    assert ahead.cg > per_layer.cg and ahead_s < per_layer_s


def test_a_device_that_cannot_receive_and_compute_at_once_is_streamed_less() -> None:
    block = streamed([gemm(4e-3, 1e-3, n_bytes=4_000_000)] * 3)
    free, turns = (machine(5e-10, beside=Interference(one_queue=queue)) for queue in (False, True))
    assert 0 < solve_cg(block, turns, 256)[0].cg < solve_cg(block, free, 256)[0].cg


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 2000))
def test_all_of_an_odd_extent_can_be_streamed(step: int, extent: int) -> None:
    assume(extent >= step)
    block = streamed([gemm(1.0, 1e-6)], extent=extent, step=step)
    assert solve_cg(block, machine(1e-15), 0)[0] == Cut(0, extent, 0)
    assert solve_cg(block, machine(1.0), 0)[0].cg == 0


#
# tokens
#

LAYERS = st.lists(STREAMED, min_size=1, max_size=2)


def solved(blocks: list[BlockType], on: Pricing) -> list[tuple[BlockType, Cut]]:
    return [(block, solve_cg(block, on, 0)[0]) for block in blocks]


@settings(max_examples=examples(60))
@given(LAYERS, MACHINES | SHARED_MACHINES, st.integers(2, 80))
def test_no_number_of_tokens_is_better_by_more_than_a_group_is_worth(
    blocks: list[BlockType], on: Pricing, n_tokens: int
) -> None:
    layers = solved(blocks, on)
    n_g, seconds = solve_n_g(layers, on, n_tokens)
    assert seconds == pytest.approx(pass_seconds(layers, on, n_tokens, n_g))
    every = [pass_seconds(layers, on, n_tokens, n) for n in range(n_tokens + 1)]
    token = max(abs(a - b) for a, b in pairwise(every[1:])) if n_tokens > 1 else 0.0
    assert seconds <= min(every) + ROWS_AT_ONCE * token + 1e-9
    on_cpu = n_tokens - n_g
    assert on_cpu in (0, 1, n_tokens) or on_cpu % ROWS_AT_ONCE == 0


@settings(max_examples=examples(40))
@given(STREAMED, SHARED_MACHINES, st.sampled_from([2, 64, 512]))
def test_assigning_tokens_is_never_slower_than_not(block: BlockType, on: Pricing, n_tokens: int) -> None:
    layers = solved([block], on)
    assert solve_n_g(layers, on, n_tokens)[1] <= pass_seconds(layers, on, n_tokens, 0) * (1 + 1e-12)


def test_a_long_prompt_goes_to_the_device_and_a_short_one_does_not() -> None:
    block = streamed([gemm(1e-3, 1e-4, n_bytes=8_000_000)] * 3)
    on = machine(1e-9)
    layers = [(block, ALL_CC)] * 4
    table = token_table(layers, on, 512)
    assert [n for n, _ in table] == sorted({n for n, _ in table})
    assert {256, 512} < {n for n, _ in table}
    (below, none), (first, some) = table[:2]
    assert (none, first) == (0, below + 1) and some > 0
    assert n_g_at(table, 1) == n_g_at(table, below) == 0
    assert n_g_at(table, first) == some
    assert n_g_at(table, 512) == dict(table)[512] > 256
    assert linear_n_g(table, 1024) == 2 * dict(table)[512]
    # hidden or not, the copy has to be worth it: at the last length that does not use it, using it is slower
    for n_tokens, n_g in table:
        assert n_g == solve_n_g(layers, on, n_tokens)[0]


def test_a_slow_link_gets_no_table() -> None:
    assert token_table([(streamed([gemm(1e-5, 1e-6)] * 3), ALL_CC)], machine(1.0), 64) == ()
    assert n_g_at((), 512) == 0


def test_a_slower_link_needs_longer_prompts() -> None:
    layers = [(streamed([gemm(1e-3, 1e-4)] * 3), ALL_CC)]
    tables = [token_table(layers, machine(beta), 512) for beta in (5e-9, 1e-8, 2e-8)]
    firsts = [min(n for n, n_g in table if n_g) for table in tables]
    assert firsts == sorted(firsts) and firsts[0] < firsts[-1]


def test_nothing_on_the_cpu_needs_no_tokens_moved() -> None:
    layers = [(streamed([gemm(1e-3, 1e-4)] * 3), Cut(0, 512, 512))]
    assert solve_n_g(layers, machine(1e-9), 512) == (0, pytest.approx(pass_seconds(layers, machine(1e-9), 512, 0)))


def test_equal_layers_are_counted_once() -> None:
    one = streamed([gemm(1e-3, 1e-4)] * 3)
    layers = [(one, ALL_CC), (streamed([gemm(1e-3, 1e-4)] * 3), ALL_CC)]
    assert [count for *_, count in count_blocks(layers)] == [2]
    on = machine(1e-9)
    assert pass_seconds(layers, on, 64, 8) == pytest.approx(2 * pass_seconds(layers[:1], on, 64, 8))


def test_starting_a_copy_can_cost_more_than_it_gains() -> None:
    layers = [(streamed([gemm(1e-3, 1e-4)] * 3), ALL_CC)]
    on = machine(1e-9)
    late = Pricing(replace(on.rates, weights=LinearFit(10.0, 1e-9, 1.0)), on.streaming)
    assert solve_n_g(layers, on, 512)[0] > 0
    assert solve_n_g(layers, late, 512)[0] == 0


def test_between_two_lengths_n_g_is_rounded_and_a_half_goes_up() -> None:
    table = ((16, 3), (48, 16), (50, 15))
    assert [linear_n_g(table, n) for n in (15, 16, 17, 19, 32, 48, 49, 50)] == [0, 3, 3, 4, 10, 16, 16, 15]
    assert [linear_n_g(((1, 0), (3, 1), (5, 2), (7, 3)), n) for n in (2, 4, 6)] == [1, 2, 3]


def test_between_two_lengths_the_cpu_gets_whole_groups_of_tokens() -> None:
    """As the split backend has it (tests/native/split_test_tokens.cpp). Lengths of the table are as they are."""
    table = ((16, 3), (48, 20), (50, 15))
    assert [n_g_at(table, n) for n in (15, 16, 17, 19, 32, 48, 49, 50)] == [0, 3, 1, 3, 12, 20, 17, 15]
    assert n_g_at(((8, 0), (16, 15)), 12) == 8 and n_g_at(((8, 7), (16, 15)), 12) == 11, "one token is a group"


def test_batches_that_are_never_run_need_no_memory() -> None:
    assert [most_n_g(((512, 400), (2048, 900)), n) for n in (511, 512, 1280, 2048, 4096)] == [0, 400, 650, 900, 1800]


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda one: one[0]),
    st.integers(1, 1200),
)
def test_no_batch_has_more_tokens_on_the_device_than_memory_is_kept_for(
    points: list[tuple[int, float]], n_ubatch: int
) -> None:
    table = tuple((n, int(share * n)) for n, share in sorted(points))
    most = most_n_g(table, n_ubatch)
    assert all(0 <= n_g_at(table, n) <= min(n, most) for n in range(1, n_ubatch + 1))


def test_the_last_step_of_an_odd_extent_is_a_part_of_one() -> None:
    block = streamed([gemm(1.0, 1e-6)], extent=1000, step=32)
    seen: set[Cut] = set()

    def seconds(cut: Cut) -> float:
        seen.add(cut)
        return abs(cut.cg - 500)

    assert best_cg(block, 0, seconds)[0] == Cut(512, 488, 0)
    assert all(cut.extent == 1000 and (cut.cc % 32 == 0 or cut.cg == 0) and cut.cc >= 0 for cut in seen)
    assert best_cg(block, 0, lambda cut: -cut.cg)[0] == Cut(0, 1000, 0)
    assert best_cg(block, 0, lambda cut: cut.cg)[0] == Cut(1000, 0, 0)
    assert best_cg(block, 0, lambda cut: abs(cut.cg - 8))[0] == Cut(992, 8, 0)
