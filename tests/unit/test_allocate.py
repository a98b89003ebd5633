"""Sharing memory among blocks: the greedy against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.place.allocate import Menu, allocate


@st.composite
def menus(draw: st.DrawFn) -> list[Menu]:
    """Up to four blocks of up to five choices, of whole seconds and bytes, in no particular shape."""
    made: list[Menu] = []
    for _ in range(draw(st.integers(1, 4))):
        n_bytes = sorted(draw(st.sets(st.integers(1, 30), max_size=4)))
        made.append([(b, float(draw(st.integers(0, 40)))) for b in (0, *n_bytes)])
    return made


def best_by_brute_force(offered: Sequence[Menu], room: int) -> float:
    totals = []
    for choice in itertools.product(*(range(len(menu)) for menu in offered)):
        taken = [menu[c] for menu, c in zip(offered, choice, strict=True)]
        if sum(n_bytes for n_bytes, _ in taken) <= room:
            totals.append(sum(seconds for _, seconds in taken))
    return min(totals)


@given(menus(), st.integers(0, 130))
@settings(max_examples=300, deadline=None)
def test_the_greedy_lies_between_the_optimum_and_its_bound(offered: list[Menu], room: int) -> None:
    found = allocate(offered, room)
    best = best_by_brute_force(offered, room)
    taken = [menu[c] for menu, c in zip(offered, found.chosen, strict=True)]
    assert found.bytes == sum(n_bytes for n_bytes, _ in taken) <= room
    assert found.seconds == pytest.approx(sum(seconds for _, seconds in taken))
    assert found.bound_s - 1e-9 <= best <= found.seconds + 1e-9
    if not found.short:
        assert found.seconds == pytest.approx(best) == pytest.approx(sum(min(s for _, s in menu) for menu in offered))


@given(menus(), st.integers(0, 130))
@settings(max_examples=200, deadline=None)
def test_the_distance_to_the_bound_is_less_than_one_step_saves(offered: list[Menu], room: int) -> None:
    found = allocate(offered, room)
    most = max(a[1] - b[1] for menu in offered for a, b in itertools.combinations(menu, 2)) if any(
        len(menu) > 1 for menu in offered
    ) else 0.0  # fmt: skip
    assert found.seconds - found.bound_s <= max(most, 0.0) + 1e-9


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_exact_where_every_block_is_convex_and_steps_are_alike(savings: list[list[int]], room: int) -> None:
    """Each byte saves less than the one before it: then the greedy is the optimum (a matroid)."""
    offered: list[Menu] = []
    for steps in savings:
        falling = sorted(steps, reverse=True)
        offered.append([(i, 1000.0 - sum(falling[:i])) for i in range(len(falling) + 1)])
    assert allocate(offered, room).seconds == pytest.approx(best_by_brute_force(offered, room))


def test_what_saves_most_per_byte_goes_first_and_what_is_left_is_used() -> None:
    wide: Menu = [(0, 10.0), (10, 5.0)]  # half a second a byte
    dense: Menu = [(0, 10.0), (4, 6.0)]  # one second a byte
    assert allocate([wide, dense], 10).chosen == (0, 1)
    assert allocate([wide, dense], 14).chosen == (1, 1)
    small: Menu = [(0, 10.0), (2, 9.5), (10, 0.0)]  # its hull steps over the choice of 2 bytes
    found = allocate([small], 5)
    assert (found.chosen, found.bytes, found.short) == ((1,), 2, True)


def test_nothing_is_taken_that_saves_nothing_and_ties_go_to_earlier_blocks() -> None:
    assert allocate([[(0, 1.0), (5, 1.0)], [(0, 1.0), (5, 2.0)]], 100).chosen == (0, 0)
    same: Menu = [(0, 2.0), (5, 1.0)]
    assert allocate([same, same, same], 10).chosen == (1, 1, 0)
    assert allocate([], 10).seconds == 0
