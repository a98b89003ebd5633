"""The `atsinfer` policy's dynamic programming: the best of all placements of a chain, within the memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import costs, operators, rates
from seeds import examples

from oallama.place.policies import atsinfer as policy
from oallama.place.policies.atsinfer import Link, chain, chained, least_chain

SECONDS = st.floats(0.0, 1.0)
SIZES = st.integers(1, 60)
LINKS = st.lists(st.builds(Link, SIZES, SECONDS, st.one_of(st.none(), SECONDS), SECONDS, SECONDS), max_size=9)


def seconds_of(links: list[Link], back_s: float, chosen: tuple[bool, ...]) -> float:
    total, there = 0.0, False
    for link, on in zip(links, chosen, strict=True):
        if on and link.gpu_s is None:
            return float("inf")
        if on != there:
            total += link.enter_s if on else link.leave_s
        total += link.gpu_s if on and link.gpu_s is not None else link.cpu_s
        there = on
    return total + back_s * there


def used(links: list[Link], chosen: tuple[bool, ...]) -> int:
    return sum(link.bytes for link, on in zip(links, chosen, strict=True) if on)


@settings(max_examples=examples(150))
@given(LINKS, SECONDS, st.integers(0, 300))
def test_it_is_the_best_of_all_placements(links: list[Link], back_s: float, budget: int) -> None:
    chosen, seconds = least_chain(links, back_s, budget)
    assert used(links, chosen) <= budget
    assert seconds == pytest.approx(seconds_of(links, back_s, chosen))
    possible = (c for c in itertools.product((False, True), repeat=len(links)) if used(links, c) <= budget)
    assert seconds == pytest.approx(min(seconds_of(links, back_s, c) for c in possible))


@settings(max_examples=examples(60))
@given(LINKS, SECONDS, st.integers(0, 300), st.integers(0, 300))
def test_more_memory_is_never_slower(links: list[Link], back_s: float, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert least_chain(links, back_s, large)[1] <= least_chain(links, back_s, small)[1] + 1e-12


@settings(max_examples=examples(40))
@given(LINKS, SECONDS, st.integers(0, 300))
def test_sizes_that_are_rounded_up_still_keep_to_the_budget(links: list[Link], back_s: float, budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "MOST_UNITS", 7)
        chosen, seconds = least_chain(links, back_s, budget)
    assert used(links, chosen) <= budget
    assert seconds == pytest.approx(seconds_of(links, back_s, chosen))


def test_a_switch_that_costs_more_than_it_saves_is_not_made() -> None:
    """Of three operators the one in the middle is slow on the device: it goes there too, or none does."""
    for enter_s, wanted in ((0.1, True), (3.0, False)):
        links = [
            Link(1, 1.0, 0.1, enter_s, enter_s),
            Link(1, 1.0, 1.1, enter_s, enter_s),
            Link(1, 1.0, 0.1, enter_s, enter_s),
        ]
        assert least_chain(links, enter_s, 3)[0] == (wanted,) * 3


def test_what_gains_nothing_stays_on_the_host() -> None:
    assert least_chain([Link(1, 1.0, 1.0, 0.0, 0.0)], 0.0, 3) == ((False,), 1.0)


def test_operators_stay_on_the_host_in_layers_whose_kv_is_there() -> None:
    ops = operators(3)
    problem = costs(ops, 3, [(1.0, 0.1)] * len(ops))
    placed = chained(problem, lambda first: 10**6 if first >= 2 else -1)
    assert placed.first_device_layer == 2
    assert [op for op, there in zip(ops, placed.on_device, strict=True) if there] == [
        op for op in ops if op.layer in (2, None)
    ]


def test_crossings_are_priced_by_what_is_read_and_written() -> None:
    ops = operators(1)
    problem = costs(ops, 1, [(1.0, 0.1)] * len(ops), rates(1.0, 0.5, 10.0))
    links, back_s = chain(problem, 0)
    assert [link.bytes for link in links] == [op.bytes for op in ops]
    assert links[0].enter_s == pytest.approx(11.0 + 0.5 * 256 * 4), "one vector of n_embd, and a split"
    assert links[1].leave_s == pytest.approx(1.0 + 0.5 * 256 * 4)
    assert back_s == pytest.approx(1.0 + 0.5 * 1000 * 4), "the logits"


def test_without_any_gain_everything_is_on_the_cpu() -> None:
    ops = operators(2)
    placed = chained(costs(ops, 2, [(1.0, 2.0)] * len(ops)), lambda first: 10**6)
    assert not any(placed.on_device) and placed.first_device_layer == 3
