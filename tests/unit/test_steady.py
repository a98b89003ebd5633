"""The closed form of a round against the recursion that it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slicing_cases import contentions

from oallama.core.types import Contention
from oallama.cost.steady import steady_seconds
from oallama.cost.timeline import BlockTimes, Prefetch, Step, cycle_seconds

SECONDS = st.one_of(st.just(0.0), st.floats(1e-4, 1e-2))


@st.composite
def blocks(draw: st.DrawFn) -> BlockTimes:
    """At most one copy a round; GG, if there is some, first."""
    copy_s, launch_s, cpu_s = draw(SECONDS), draw(SECONDS), draw(SECONDS)
    streamed = Step(copy_s, draw(SECONDS), launch_s)
    steps = draw(st.sampled_from([(), (streamed,), None]))
    if steps is None:
        steps = (Step(0.0, draw(SECONDS), launch_s), Step(copy_s, draw(SECONDS)))
    reads = cpu_s * draw(st.floats(0, 60e9))
    return BlockTimes(
        draw(SECONDS), draw(SECONDS), cpu_s, steps, draw(SECONDS), reads, draw(st.floats(1e9, 30e9)),
        draw(st.booleans()),
    )  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(blocks(), st.sampled_from(["layer", "continuous"]), st.sampled_from([1, 2, 4, None]))
def test_without_contention_it_is_the_cycle(block: BlockTimes, ahead: str, n_slots: int | None) -> None:
    prefetch = Prefetch(ahead, n_slots)  # type: ignore[arg-type]
    assert steady_seconds(block, prefetch, None) == pytest.approx(cycle_seconds([block], prefetch), rel=1e-6)


@settings(deadline=None, max_examples=300)
@given(blocks(), contentions())
def test_within_a_layer_it_is_the_cycle_with_contention_too(block: BlockTimes, shared: Contention) -> None:
    prefetch = Prefetch("layer", 2)
    assert steady_seconds(block, prefetch, shared) == pytest.approx(cycle_seconds([block], prefetch, shared), rel=1e-6)


@settings(deadline=None, max_examples=300)
@given(blocks(), contentions(), st.sampled_from([1, 2, 4]))
def test_running_ahead_with_contention_it_is_close(block: BlockTimes, shared: Contention, n_slots: int) -> None:
    """Where a copy just fits or just does not, the recursion may settle in another rhythm; never far."""
    prefetch = Prefetch("continuous", n_slots)
    assert steady_seconds(block, prefetch, shared) == pytest.approx(cycle_seconds([block], prefetch, shared), rel=0.15)


def test_several_copies_a_round_are_left_to_the_recursion() -> None:
    block = BlockTimes(1e-3, 0.0, 2e-3, (Step(1e-3, 2e-3, 1e-4),) * 3, 0.0)
    for prefetch in (Prefetch("layer", None), Prefetch("continuous", 2)):
        assert steady_seconds(block, prefetch, None) == cycle_seconds([block], prefetch)
