"""r_GG of every layer: the greedy of ScheInfer (section IV-A4, Eq. 14) under a memory limit.

Each layer has a menu of r_GG with the least time that it then takes (Eq. 13). The importance of a choice is the time
that it saves over the layer's present one for each byte that it adds. The most important choice of all layers is taken,
again and again, until it does not fit. allocate.py walks the same path for the `split` policy and then fills up what is
left, layer by layer, which may end worse with more memory than with less; here one more choice may be taken after any
beginning of the path, so that more memory is never worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oallama.cost.slice_times import StreamedBlock
from oallama.place.allocate import Menu
from oallama.place.slicing import Slices, Streaming, solve_cg

N_VALUES = 16
"""n_G of the paper: how many values of r_GG above 0 are looked at."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """One choice for each layer."""

    chosen: tuple[int, ...]  # index into each layer's menu
    bytes: int
    seconds: float


def gg_choices(
    streamed: StreamedBlock, on: Streaming, n_values: int = N_VALUES, n_tokens: int = 1, up_to_all: bool = True
) -> tuple[Slices, ...]:
    """The block at r_GG = i/n for i = 0..n, each rounded to what the backend can cut, with its best r_CG. up_to_all:
    False leaves at least one step beside GG."""
    extent, step = streamed.block.extent, streamed.block.step
    rests = set()
    for i in range(n_values + 1):
        wanted = extent - extent * i // n_values
        below = wanted // step * step
        rest = min(below, min(below + step, extent), key=lambda rest: abs(rest - wanted))
        rests.add(rest if up_to_all else max(rest, min(step, extent)))
    return tuple(solve_cg(streamed, on, extent - rest, n_tokens) for rest in sorted(rests, reverse=True))


def menu_of(streamed: StreamedBlock, choices: Sequence[Slices]) -> Menu:
    return tuple((streamed.block.weight_bytes(choice.gg), choice.seconds) for choice in choices)


def assign_gg(menus: Sequence[Menu], room: int) -> Assigned:
    """The choices along the greedy's path, and one beyond it, that take the least seconds within `room` bytes.

    menus: bytes strictly ascending, the first 0. Ties go to earlier layers and smaller slices.
    """
    kind = [menus.index(menu) for menu in menus]
    best = now = Assigned((0,) * len(menus), 0, sum(menu[0][1] for menu in menus))

    def after(step: tuple[float, int, int]) -> Assigned:
        saved, layer, choice = step
        added = menus[layer][choice][0] - menus[layer][now.chosen[layer]][0]
        return Assigned((*now.chosen[:layer], choice, *now.chosen[layer + 1 :]), now.bytes + added, now.seconds - saved)

    while now.bytes <= room:
        states = reversed(list(enumerate(zip(kind, now.chosen, strict=True))))
        candidates = sorted({state: layer for layer, state in states}.values())  # of layers in equal states the first
        last = _best_step(menus, now.chosen, candidates, room - now.bytes, by_byte=False)
        best = min(best, now if last is None else after(last), key=lambda assigned: assigned.seconds)
        step = _best_step(menus, now.chosen, candidates, None, by_byte=True)
        if step is None:
            break
        now = after(step)
    return best


def _best_step(
    menus: Sequence[Menu], chosen: Sequence[int], layers: Sequence[int], left: int | None, by_byte: bool
) -> tuple[float, int, int] | None:
    """(seconds saved, layer, choice) of the choice within `left` bytes that saves the most, for each byte (Eq. 14) or
    in all; None where none saves anything."""
    best: tuple[float, int, int] | None = None
    most = 0.0
    for layer in layers:
        menu, now = menus[layer], chosen[layer]
        for choice in range(now + 1, len(menu)):
            added, saved = menu[choice][0] - menu[now][0], menu[now][1] - menu[choice][1]
            if left is not None and added > left:
                break
            worth = saved / added if by_byte else saved
            if worth > most:
                best, most = (saved, layer, choice), worth
    return best
