"""n_g: the solver against every n_g, and the table that a plan carries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import MACHINES, SHARED_MACHINES, STREAMED, gemm, machine, streamed

from oallama.core.types import LinearFit
from oallama.cost.slice_times import StreamedBlock
from oallama.place.slicing import Slices, Streaming, solve_cg
from oallama.place.token_assignment import kinds, n_g_at, pass_seconds, solve_n_g, token_table

LAYERS = st.lists(STREAMED, min_size=1, max_size=2)


def solved(blocks: list[StreamedBlock], on: Streaming) -> list[tuple[StreamedBlock, Slices]]:
    return [(block, solve_cg(block, on, 0)) for block in blocks]


@settings(deadline=None, max_examples=60)
@given(LAYERS.filter(lambda blocks: not any(block.routed for block in blocks)), MACHINES, st.integers(1, 80))
def test_no_number_of_tokens_is_better(blocks: list[StreamedBlock], on: Streaming, n_tokens: int) -> None:
    layers = solved(blocks, on)
    n_g, seconds = solve_n_g(layers, on, n_tokens)
    assert seconds == pytest.approx(pass_seconds(layers, on, n_tokens, n_g))
    assert seconds <= min(pass_seconds(layers, on, n_tokens, n) for n in range(n_tokens + 1)) * (1 + 1e-6)


@settings(deadline=None, max_examples=60)
@given(LAYERS, SHARED_MACHINES, st.integers(2, 80))
def test_with_experts_and_contention_no_number_of_tokens_is_better_by_much(
    blocks: list[StreamedBlock], on: Streaming, n_tokens: int
) -> None:
    layers = solved(blocks, on)
    n_g, seconds = solve_n_g(layers, on, n_tokens)
    every = [pass_seconds(layers, on, n_tokens, n) for n in range(n_tokens + 1)]
    token = max(abs(every[i] - every[i - 1]) for i in (n_g, n_g + 1) if 0 < i <= n_tokens)
    assert seconds <= min(every) + token + 1e-9


@settings(deadline=None, max_examples=40)
@given(STREAMED, SHARED_MACHINES, st.sampled_from([2, 64, 512]))
def test_assigning_tokens_is_never_slower_than_not(block: StreamedBlock, on: Streaming, n_tokens: int) -> None:
    layers = solved([block], on)
    assert solve_n_g(layers, on, n_tokens)[1] <= pass_seconds(layers, on, n_tokens, 0) * (1 + 1e-12)


def test_a_long_prompt_goes_to_the_device_and_a_short_one_does_not() -> None:
    block = streamed([gemm(1e-3, 1e-4, n_bytes=8_000_000)] * 3)
    on = machine(1e-9)
    layers = [(block, Slices(1024, 0, 0, 0.0))] * 4
    table = token_table(layers, on, 512)
    assert [n for n, _ in table] == sorted({n for n, _ in table})
    (below, none), (first, some) = table[:2]
    assert (none, first) == (0, below + 1) and some > 0
    assert n_g_at(table, 1) == n_g_at(table, below) == 0
    assert n_g_at(table, first) == some
    assert n_g_at(table, 512) == dict(table)[512] > 256
    assert n_g_at(table, 1024) == 2 * dict(table)[512]
    # hidden or not, the copy has to be worth it: at the last length that does not use it, using it is slower
    for n_tokens, n_g in table:
        assert n_g == solve_n_g(layers, on, n_tokens)[0]


def test_a_slow_link_gets_no_table() -> None:
    layers = [(streamed([gemm(1e-5, 1e-6)] * 3), Slices(1024, 0, 0, 0.0))]
    assert token_table(layers, machine(1.0), 64) == ()
    assert n_g_at((), 512) == 0


def test_a_slower_link_needs_longer_prompts() -> None:
    layers = [(streamed([gemm(1e-3, 1e-4)] * 3), Slices(1024, 0, 0, 0.0))]
    tables = [token_table(layers, machine(beta), 512) for beta in (5e-9, 1e-8, 2e-8)]
    firsts = [min(n for n, n_g in table if n_g) for table in tables]
    assert firsts == sorted(firsts) and firsts[0] < firsts[-1]


def test_nothing_on_the_cpu_needs_no_tokens_moved() -> None:
    layers = [(streamed([gemm(1e-3, 1e-4)] * 3), Slices(0, 512, 512, 0.0))]
    assert solve_n_g(layers, machine(1e-9), 512) == (0, pytest.approx(pass_seconds(layers, machine(1e-9), 512, 0)))


def test_equal_layers_are_counted_once() -> None:
    one = streamed([gemm(1e-3, 1e-4)] * 3)
    layers = [(one, Slices(1024, 0, 0, 0.0)), (streamed([gemm(1e-3, 1e-4)] * 3, first=3), Slices(1024, 0, 0, 0.0))]
    assert list(kinds(layers).values()) == [2]
    on = machine(1e-9)
    assert pass_seconds(layers, on, 64, 8) == pytest.approx(2 * pass_seconds(layers[:1], on, 64, 8))


def test_starting_a_copy_can_cost_more_than_it_gains() -> None:
    layers = [(streamed([gemm(1e-3, 1e-4)] * 3), Slices(1024, 0, 0, 0.0))]
    on = machine(1e-9)
    late = replace(on, rates=replace(on.rates, weights=LinearFit(10.0, 1e-9, 1.0)))
    assert solve_n_g(layers, on, 512)[0] > 0
    assert solve_n_g(layers, late, 512)[0] == 0
