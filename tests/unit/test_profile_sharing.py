"""Work at the same time: what is asked of the bridge, and where its four rates go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worlds import CARD, World, model_info

from ggml_bridge.timing import MulMatCase
from ggml_bridge.timing import Sharing as Rates
from oallama.profile.link import sharing_tasks
from oallama.profile.tasks import Session
from oallama.profile.timing import Policy
from oallama.profile.wanted import wanted

RATES = Rates(first_alone=11e9, second_alone=7e9, first_with_second=5e9, second_with_first=3e9)


class Bridge:
    """Answers every question with the same rates, all four different."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.cases: list[tuple[Any, ...]] = []

    def cpu_layouts(self) -> list[str]:
        return ["CPU"]

    def share_link(self, first: MulMatCase, device: str, chunk_bytes: int, seconds: float) -> Rates:
        return self._asked(first, "link")

    def share_compute(self, first: MulMatCase, second: MulMatCase, seconds: float) -> Rates:
        return self._asked(first, second)

    def _asked(self, *workers: MulMatCase | str) -> Rates:
        cases = [worker for worker in workers if isinstance(worker, MulMatCase)]
        self.cases += [(case.device, case.layout, case.n_tokens, case.working_set_bytes) for case in cases]
        self.asked.append(tuple(worker if isinstance(worker, str) else worker.device for worker in workers))
        return RATES


def session(bridge: Bridge) -> Session:
    world = World(model=model_info(n_layer=1), card=replace(CARD, name="TEST0"), tokens=(1, 32))
    want = wanted(world.model, world.operators, world.tokens, 1 << 20)
    timed = world.with_profile(sharing=(), copy_wait=None).profile
    sizes = {(mul_mat, n): size for mul_mat, n, size in want.mul_mats}
    cases = tuple(
        replace(case, working_set_bytes=sizes[case.mul_mat, case.n_tokens])
        for case in timed.cases
        if (case.mul_mat, case.n_tokens) in sizes
    )
    return Session(bridge, "TEST0", replace(timed, cases=cases), want, 1, Policy(), lambda: 0.0)  # type: ignore[arg-type]


def test_each_rate_is_stored_as_what_it_is() -> None:
    bridge = Bridge()
    found = [task.run()["sharing"][0] for task in sharing_tasks(session(bridge))]
    assert {(row["first"], row["second"]) for row in found} == {("cpu", "device"), ("cpu", "link"), ("device", "link")}
    for row in found:
        assert row["first_alone_gb_per_s"] == pytest.approx(11)
        assert row["second_alone_gb_per_s"] == pytest.approx(7)
        assert row["first_with_second_gb_per_s"] == pytest.approx(5)
        assert row["second_with_first_gb_per_s"] == pytest.approx(3)


def test_each_worker_computes_in_a_layout_of_its_own_and_reads_memory_at_one_token() -> None:
    bridge = Bridge()
    for task in sharing_tasks(session(bridge)):
        task.run()
    assert {(device, layout) for device, layout, *_ in bridge.cases} == {("CPU", "CPU"), ("TEST0", None)}
    for _, _, n_tokens, working_set_bytes in bridge.cases:
        assert working_set_bytes > 0 if n_tokens == 1 else working_set_bytes == 0
    assert {n_tokens for _, _, n_tokens, _ in bridge.cases} == {1, 32}


def test_where_the_device_has_no_kernel_nothing_is_shared() -> None:
    made = session(Bridge())
    made = replace(made, profile=replace(made.profile, cases=()))
    assert [task.run() for task in sharing_tasks(made)] == [{}] * 6
