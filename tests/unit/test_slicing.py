"""r_CG*: the solver against a search of every cut, and against what must hold on any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slicing_cases import MACHINES, SHARED_MACHINES, STREAMED, gemm, machine, streamed

from oallama.core.types import Contention, LinearFit
from oallama.cost.slice_times import Rates, StreamedBlock, paper_times
from oallama.cost.timeline import PAPER, Prefetch
from oallama.cost.transfer import TransferRates
from oallama.place.slicing import Slices, Streaming, solve_cg

JOINS = TransferRates(LinearFit(1e-5, 1e-10, 1.0), LinearFit(1e-5, 1e-10, 1.0), 5e-6)


def cuts(block: StreamedBlock, gg: int) -> list[tuple[int, int]]:
    """Every (CC, CG) that the backend can make."""
    rest = block.block.extent - gg
    return [(cc, rest - cc) for cc in sorted({*range(0, rest, block.block.step), rest})]


def every_cut(block: StreamedBlock, on: Streaming, gg: int, n_tokens: int = 1) -> list[float]:
    extent = block.block.extent
    return [on.seconds(block, Rates(cc / extent, cg / extent, gg / extent), n_tokens) for cc, cg in cuts(block, gg)]


def possible_gg(block: StreamedBlock, share: float) -> int:
    """About that share of the block, and such that the rest is a multiple of the step."""
    extent, step = block.block.extent, block.block.step
    kept = min(extent, round((1 - share) * extent / step) * step)
    return extent - kept


@settings(deadline=None, max_examples=200)
@given(STREAMED, MACHINES, st.sampled_from([0.0, 0.3, 0.6, 1.0]), st.sampled_from([1, 7, 512]))
def test_no_cut_is_better_than_the_solved_one(block: StreamedBlock, on: Streaming, share: float, n_tokens: int) -> None:
    gg = possible_gg(block, share)
    found = solve_cg(block, on, gg, n_tokens)
    assert (found.cc, found.cg) in cuts(block, gg) and found.gg == gg
    assert found.seconds == pytest.approx(on.seconds(block, found.rates, n_tokens))
    assert found.seconds <= min(every_cut(block, on, gg, n_tokens)) * (1 + 1e-6)


@settings(deadline=None, max_examples=200)
@given(STREAMED, SHARED_MACHINES, st.sampled_from([0.0, 0.3, 0.6]))
def test_with_contention_no_cut_is_better_by_more_than_one_granule_is_worth(
    block: StreamedBlock, on: Streaming, share: float
) -> None:
    gg = possible_gg(block, share)
    found = solve_cg(block, on, gg)
    seconds = every_cut(block, on, gg)
    at = cuts(block, gg).index((found.cc, found.cg))
    granule = max((abs(seconds[i] - seconds[i - 1]) for i in (at, at + 1) if 0 < i < len(seconds)), default=0.0)
    assert found.seconds <= min(seconds) + granule + 1e-9


@settings(deadline=None, max_examples=100)
@given(STREAMED, MACHINES, st.floats(1.0, 20.0))
def test_a_slower_link_never_streams_more(block: StreamedBlock, on: Streaming, times_slower: float) -> None:
    link = on.rates.weights
    slower = replace(
        on, rates=replace(on.rates, weights=LinearFit(link.alpha_s, link.beta_s_per_byte * times_slower, 1.0))
    )
    before, after = solve_cg(block, on, 0), solve_cg(block, slower, 0)
    assert after.seconds >= before.seconds * (1 - 1e-9)
    # within what a tie may shift
    assert after.cg <= before.cg or on.seconds(block, after.rates, 1) <= before.seconds * (1 + 1e-6)


@settings(deadline=None, max_examples=100)
@given(STREAMED, MACHINES, st.floats(1.0, 20.0))
def test_a_slower_cpu_is_never_faster(block: StreamedBlock, on: Streaming, times_slower: float) -> None:
    slower = [replace(g, cpu=tuple((n, s * times_slower) for n, s in g.cpu)) for g in block.gemms]
    after = solve_cg(replace(block, gemms=tuple(slower)), on, 0)
    assert after.seconds >= solve_cg(block, on, 0).seconds * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(STREAMED, SHARED_MACHINES)
def test_streaming_is_never_slower_than_not_streaming(block: StreamedBlock, on: Streaming) -> None:
    assert solve_cg(block, on, 0).seconds <= on.seconds(block, Rates(1.0, 0.0, 0.0), 1) * (1 + 1e-12)


def test_a_saturated_memory_leaves_nothing_to_stream() -> None:
    """The CPU alone uses all of DRAM: what is streamed, the CPU loses, and joining costs more than is won."""
    block = streamed([gemm(25e-3, 1e-4, n_bytes=1_000_000_000)] * 3)  # 40 GB/s
    free = machine(1 / 20e9, transfer=JOINS)
    assert solve_cg(block, free, 0).cg > 0
    saturated = replace(free, contention=Contention(40.0, 20.0, 25.0, 15.0))
    assert solve_cg(block, saturated, 0).cg == 0
    half = replace(free, contention=Contention(40.0, 20.0, 33.0, 15.0))  # 20 % more together than alone
    assert 0 < solve_cg(block, half, 0).cg < solve_cg(block, free, 0).cg


def test_running_ahead_streams_more_where_attention_takes_long() -> None:
    block = streamed([gemm(4e-3, 1e-4)] * 3, gap_s=6e-3)
    per_layer = solve_cg(block, machine(4e-9, Prefetch("layer", 2)), 0)
    ahead = solve_cg(block, machine(4e-9, Prefetch("continuous", 2)), 0)
    assert ahead.cg > per_layer.cg and ahead.seconds < per_layer.seconds


def test_the_balance_of_two_equal_mul_mats_by_hand() -> None:
    """Case 1 of the paper without fixed costs: 2 (1 - r) t_C = 2 r t_C2G + r t_G gives r."""
    block = streamed([gemm(3e-3, 2e-3), gemm(3e-3, 2e-3)], extent=32000, step=32)
    found = solve_cg(block, replace(machine(4e-9, PAPER), times=paper_times), 0)
    assert found.rates.cg == pytest.approx(6 / (6 + 8 + 2), abs=1e-3)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 2000))
def test_all_of_an_odd_extent_can_be_streamed(step: int, extent: int) -> None:
    assume(extent >= step)
    block = streamed([gemm(1.0, 1e-6)], extent=extent, step=step)
    found = solve_cg(block, machine(1e-15), 0)
    assert found == Slices(0, extent, 0, found.seconds)
    assert solve_cg(block, machine(1.0), 0).cg == 0
