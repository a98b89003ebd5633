"""Policies by name, and one of a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import CARD, HOST, SMALL, weights_of

from oallama import Placer
from oallama.core.errors import UsageError
from oallama.core.options import Options
from oallama.core.types import Attention, Workload
from oallama.core.units import MIB
from oallama.place.decide import POLICIES, policy_named
from oallama.place.placement import Placement, placed_whole, whole_bytes
from oallama.place.policies import registry
from oallama.place.policies.registry import Policy, Room, policy
from oallama.place.problem import LoadBytes, Problem
from oallama.profile.described import described

pytestmark = pytest.mark.usefixtures("small_cards")


@pytest.fixture
def own() -> Iterator[Policy]:
    """As a user would write it."""

    @policy("first-come", "operators in graph order, until the device is full")
    def first_come(problem: Problem, room: Room) -> Iterable[Placement]:
        first = room.first_device_layer
        left, there = room.operator_bytes(first), []
        for operator, layer in zip(problem.operators, problem.graph.operator_layer, strict=True):
            there.append(layer >= first and operator.bytes <= left)
            left -= operator.bytes if there[-1] else 0
        yield placed_whole(room.costs, there, first)

    yield first_come
    del registry.POLICIES[first_come.name]


@pytest.fixture
def placer() -> Placer:
    """On a card with room for half of the model, without any load."""
    of = SMALL
    made = weights_of(of)
    total = sum(operator.bytes for operator in made)
    found = Placer(of, made, (), Options(vram=total // 2 + 4 * MIB), described(HOST, CARD, of, made, (1, 32, 512)))

    def taken(load: Workload, placed: Placement, attention: Attention) -> LoadBytes:
        there = whole_bytes(made, placed.on_device)
        return LoadBytes(there, total - there, 0, MIB, 8 << 30)

    loads: Any = SimpleNamespace(taken=taken, together=nullcontext, check_host=lambda *_: None)
    found.dry_loads = loads
    return found


def test_a_policy_of_ones_own_is_planned_by_like_any_other(own: Policy, placer: Placer) -> None:
    plan = placer.plan(own)
    assert plan.policy == "first-come" and plan.memory.spare >= 0
    there = [operator.gg == 1 for operator in plan.operators]
    assert there[0] and not all(there)
    assert plan.operators == placer.plan("first-come").operators


@pytest.mark.parametrize("name", [name for name in (*POLICIES, "fit") if name not in ("fiddler", "experts")])
def test_every_policy_is_planned_by_its_name(name: str, placer: Placer) -> None:
    plan = placer.plan(name, n_prompt=64, n_gen=32)
    assert plan.policy == name or name == "auto"
    assert plan.memory.spare >= 0


def test_policies_say_what_they_do_and_help_and_docs_name_each() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    for one in registry.POLICIES.values():
        assert one.help and f"`{one.name}`" in page, one.name


def test_an_unknown_policy_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="choose one of auto, oato, scheinfer, split, experts, layers, cpu, hetegen"):
        policy_named("magic")
