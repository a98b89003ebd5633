"""What the CPU, the device and the link leave each other: from a profile, and between batch sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from split_cases import World, ffn

from oallama.core.profile import Profile, Sharing
from oallama.cost.rates import NO_INTERFERENCE, Interference, interference_at, interference_curve
from oallama.profile.store import profile_from_json, profile_to_json


def profile(*sharing: Sharing, copy_wait: float | None = None) -> Profile:
    return replace(World().profile(ffn(0)), sharing=sharing, copy_wait=copy_wait)


def test_a_profile_from_before_slows_nobody_down() -> None:
    assert interference_curve(profile()) == () and interference_at((), 17) == NO_INTERFERENCE


def test_shares_are_speeds_together_over_speeds_alone() -> None:
    curve = interference_curve(
        profile(
            Sharing("cpu", "device", 1, 20.0, 50.0, 15.0, 40.0),
            Sharing("device", "link", 1, 50.0, 10.0, 25.0, 12.0),  # nothing lost by the link
            Sharing("cpu", "link", 32, 2.0, 10.0, 1.0, 0.0),
        )
    )
    assert [n_tokens for n_tokens, _ in curve] == [1, 32]
    assert curve[0][1] == Interference(0.75, 0.8, device_with_link=0.5, link_with_device=1.0)
    assert curve[1][1].cpu_with_link == 0.5
    assert 0 < curve[1][1].link_with_cpu <= 0.01, "starved while it was watched, but not for ever"


def test_cpu_and_link_are_known_from_their_contention_where_nothing_else_was_measured() -> None:
    old = {"cpu_alone_gb_per_s": 40.0, "link_alone_gb_per_s": 20.0, "cpu_with_link_gb_per_s": 30.0,
           "link_with_cpu_gb_per_s": 15.0}  # fmt: skip
    curve = interference_curve(profile_from_json({**profile_to_json(profile()), "contention": old}))
    assert (curve[0][1].cpu_with_link, curve[0][1].link_with_cpu) == (0.75, 0.75)
    assert interference_at(curve, 512) == NO_INTERFERENCE, "many tokens for each byte leave the link its speed"
    newer = profile_to_json(profile(Sharing("cpu", "link", 1, 2.0, 2.0, 1.0, 2.0)))
    both = profile_from_json({**newer, "contention": old})
    assert interference_at(interference_curve(both), 1) == Interference(cpu_with_link=0.5)


@pytest.mark.parametrize(("wait", "one_queue"), [(None, False), (0.0, False), (0.2, False), (0.9, True), (1.0, True)])
def test_one_queue_is_what_makes_results_wait_for_copies(wait: float | None, one_queue: bool) -> None:
    assert interference_at(interference_curve(profile(copy_wait=wait)), 8).one_queue is one_queue
    shared = profile(Sharing("cpu", "link", 1, 2.0, 2.0, 1.0, 1.0), copy_wait=wait)
    assert interference_at(interference_curve(shared), 8).one_queue is one_queue


def test_between_batch_sizes_it_is_linear_and_beyond_them_constant() -> None:
    curve = ((2, Interference(0.5, one_queue=True)), (6, Interference(1.0, one_queue=True)))
    found = [interference_at(curve, n).cpu_with_device for n in (1, 2, 3, 4, 6, 512)]
    assert found == [0.5, 0.5, 0.625, 0.75, 1.0, 1.0]
    assert all(interference_at(curve, n).one_queue for n in (1, 4, 512))
