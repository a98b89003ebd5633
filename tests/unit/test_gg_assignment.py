"""r_GG by Eq. 14: within the memory, never worse with more of it, and close to the best there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import MACHINES, STREAMED, gemm, machine, streamed

from oallama.cost.slice_times import Rates, StreamedBlock
from oallama.place.allocate import Menu
from oallama.place.gg_assignment import assign_gg, gg_choices, menu_of
from oallama.place.slicing import Streaming


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


@settings(deadline=None, max_examples=200)
@given(menus(), st.integers(0, 200))
def test_choices_fit_and_add_up(of: list[Menu], room: int) -> None:
    found = assign_gg(of, room)
    chosen = [menu[i] for menu, i in zip(of, found.chosen, strict=True)]
    assert found.bytes == sum(n_bytes for n_bytes, _ in chosen) <= room
    assert found.seconds == pytest.approx(sum(seconds for _, seconds in chosen))
    assert found == assign_gg(list(of), room)


@settings(deadline=None, max_examples=200)
@given(menus(), st.integers(0, 200), st.integers(0, 200))
def test_more_memory_is_never_worse(of: list[Menu], room: int, more: int) -> None:
    assert assign_gg(of, room + more).seconds <= assign_gg(of, room).seconds + 1e-12


@settings(deadline=None, max_examples=100)
@given(menus(), st.integers(0, 200))
def test_what_is_lost_to_the_best_is_less_than_one_step(of: list[Menu], room: int) -> None:
    one_step = max(menu[0][1] - min(seconds for _, seconds in menu) for menu in of)
    if len(of) <= 5:
        assert best(of, room) - 1e-9 <= assign_gg(of, room).seconds <= best(of, room) + one_step + 1e-9


@settings(deadline=None, max_examples=25)
@given(STREAMED, MACHINES, st.integers(2, 6), st.floats(0, 1.1))
def test_slices_of_real_layers_fit_and_gain_from_memory(
    block: StreamedBlock, on: Streaming, n_layer: int, share: float
) -> None:
    choices = gg_choices(block, on, n_values=6)
    menu = menu_of(block, choices)
    assert menu[0] == (0, choices[0].seconds) and menu[-1][0] == block.block.bytes
    assert all(made.gg + made.cc + made.cg == block.block.extent for made in choices)
    room = int(share * n_layer * block.block.bytes)
    found = assign_gg([menu] * n_layer, room)
    assert found.bytes <= room
    assert found.seconds <= n_layer * on.seconds(block, Rates(1.0, 0.0, 0.0), 1) * (1 + 1e-9)
    assert assign_gg([menu] * n_layer, 2 * room).seconds <= found.seconds * (1 + 1e-12)


def test_memory_is_shared_out_where_the_device_is_hidden_behind_the_cpu() -> None:
    """Ten equal layers, half of their bytes: half of each hides the device's time, half of the layers does not."""
    block = streamed([gemm(1e-3, 5e-4)] * 3)
    choices = gg_choices(block, machine(1e-6))
    found = assign_gg([menu_of(block, choices)] * 10, 5 * block.block.bytes)
    assert {0, 1024}.isdisjoint(choices[i].gg for i in found.chosen)
    assert found.seconds == pytest.approx(10 * 1.5e-3)
    whole = assign_gg([menu_of(block, (choices[0], choices[-1]))] * 10, 5 * block.block.bytes)
    assert whole.seconds == pytest.approx(5 * 3e-3 + 5 * 1.5e-3)


def test_what_gains_nothing_stays_off_the_device() -> None:
    block = streamed([gemm(1e-4, 1e-2)] * 3)
    choices = gg_choices(block, machine(1e-6))
    assert assign_gg([menu_of(block, choices)] * 3, 10**12).bytes == 0
