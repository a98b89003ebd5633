"""r_GG by Eq. 14: within the memory, never worse with more of it, and close to the best there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples

from oallama.place.sharing import Menu, assign


@st.composite
def menus(draw: st.DrawFn) -> list[Menu]:
    made = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = sorted(draw(st.sets(st.integers(1, 60), min_size=0, max_size=5)))
        made.append(tuple((n, draw(st.floats(0, 1))) for n in (0, *sizes)))
    return made * draw(st.integers(1, 2))


def best(of: list[Menu], room: int) -> float:
    return min(
        sum(seconds for _, seconds in choice)
        for choice in itertools.product(*of)
        if sum(n_bytes for n_bytes, _ in choice) <= room
    )


@settings(max_examples=examples(200))
@given(menus(), st.integers(0, 200))
def test_choices_fit_and_add_up(of: list[Menu], room: int) -> None:
    found = assign(of, room)
    chosen = [menu[i] for menu, i in zip(of, found.chosen, strict=True)]
    assert found.bytes == sum(n_bytes for n_bytes, _ in chosen) <= room
    assert found.seconds == pytest.approx(sum(seconds for _, seconds in chosen))
    assert found == assign(list(of), room)


@settings(max_examples=examples(200))
@given(menus(), st.integers(0, 200), st.integers(0, 200))
def test_more_memory_is_never_worse(of: list[Menu], room: int, more: int) -> None:
    assert assign(of, room + more).seconds <= assign(of, room).seconds + 1e-12


@settings(max_examples=examples(100))
@given(menus(), st.integers(0, 200))
def test_what_is_lost_to_the_best_is_less_than_one_step(of: list[Menu], room: int) -> None:
    one_step = max(menu[0][1] - min(seconds for _, seconds in menu) for menu in of)
    if len(of) <= 5:
        assert best(of, room) - 1e-9 <= assign(of, room).seconds <= best(of, room) + one_step + 1e-9


@settings(max_examples=examples(100))
@given(menus())
def test_with_room_for_everything_it_is_the_best_and_says_so(of: list[Menu]) -> None:
    found = assign(of, 10_000)
    assert found.seconds == pytest.approx(sum(min(seconds for _, seconds in menu) for menu in of))
    assert not found.short


def test_memory_is_shared_out_where_the_device_is_hidden_behind_the_cpu() -> None:
    """Ten equal blocks, half of their bytes: half of each hides the device's time, half of the blocks does not."""
    menu = tuple((100 * i, max(3.0 * (1 - i / 16), 1.5 * i / 16)) for i in range(17))
    found = assign([menu] * 10, 8000)
    assert found.seconds == pytest.approx(10 * 1.5) and found.bytes == 8000
    assert assign([(menu[0], menu[-1])] * 10, 8000).seconds == pytest.approx(5 * 3.0 + 5 * 1.5)


def test_what_a_byte_saves_the_most_of_comes_first_whatever_the_order_and_the_smaller_choices() -> None:
    large, small = ((0, 10.0), (10, 9.0), (20, 5.0)), ((0, 10.0), (10, 8.0))  # a quarter of a second a byte; a fifth
    found = assign([small, small, large, large], 40)
    assert found.chosen == (0, 0, 2, 2) and found.seconds == pytest.approx(10 + 10 + 5 + 5)


def test_the_last_choice_is_what_saves_the_most_and_not_what_is_largest() -> None:
    """Beyond the first one, the next step would be the second block's, which does not fit."""
    found = assign([((0, 10.0), (1, 8.5), (10, 5.0), (20, 6.0)), ((0, 100.0), (100, 0.0))], 50)
    assert found.chosen == (2, 0) and found.bytes == 10


def test_what_gains_nothing_stays_off_the_device() -> None:
    assert assign([((0, 1.0), (10, 2.0))], 100).chosen == (0,)


def test_a_larger_slice_costs_what_it_adds_to_the_one_that_is_there() -> None:
    """From 4 bytes to 5 is one byte more, which fits; nothing beyond it does."""
    found = assign([((0, 10.0), (4, 5.0), (5, 4.96), (6, 4.9))], 5)
    assert (found.chosen, found.bytes, found.seconds) == ((2,), 5, pytest.approx(4.96))


def test_of_what_fits_beyond_the_path_the_largest_saving_is_taken() -> None:
    """Behind 1 byte the path goes on to 10, which do not fit; 3 bytes and 4 do."""
    found = assign([((0, 20.0), (1, 18.0), (3, 17.0), (4, 17.5), (10, 1.0))], 5)
    assert (found.chosen, found.bytes, found.seconds) == ((2,), 3, pytest.approx(17.0))


def test_equal_blocks_grow_alike() -> None:
    """Every step is worth the same, and there is room for eight; what fits behind the first steps may end the path."""
    found = assign([((0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0))], 8, [0] * 8)
    assert found.chosen[:5] == (1,) * 5
    assert found.seconds == pytest.approx(24.0)


@settings(max_examples=examples(100))
@given(menus(), st.integers(0, 200), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_blocks_that_share_a_menu_are_blocks_with_menus_of_their_own(
    of: list[Menu], room: int, kinds: list[int]
) -> None:
    numbers = [kind % len(of) for kind in kinds]
    shared, own = assign(of, room, numbers), assign([of[number] for number in numbers], room)
    assert max(shared.bytes, own.bytes) <= room
    assert shared.seconds == pytest.approx(own.seconds, abs=1e-8)
