"""The `atsinfer` policy's dynamic programming: the best of all placements of a chain, within the memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import costs, operators, rates
from seeds import examples

from oallama.place.policies import atsinfer as policy
from oallama.place.policies.atsinfer import Link, chain, least_chain

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


@settings(max_examples=examples(40))
@given(LINKS, SECONDS, st.integers(0, 300))
def test_sizes_that_are_rounded_up_still_keep_to_the_budget(links: list[Link], back_s: float, budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "MOST_UNITS", 7)
        chosen, seconds = least_chain(links, back_s, budget)
    assert used(links, chosen) <= budget
    assert seconds == pytest.approx(seconds_of(links, back_s, chosen))


def test_crossings_are_priced_by_what_is_read_and_written() -> None:
    ops = operators(1)
    problem = costs(ops, 1, [(1.0, 0.1)] * len(ops), rates(1.0, 0.5, 10.0))
    links, back_s = chain(problem, 0)
    assert [link.bytes for link in links] == [op.bytes for op in ops]
    assert links[0].enter_s == pytest.approx(11.0 + 0.5 * 256 * 4), "one vector of n_embd, and a split"
    assert links[1].leave_s == pytest.approx(1.0 + 0.5 * 256 * 4)
    assert back_s == pytest.approx(1.0 + 0.5 * 1000 * 4), "the logits"
