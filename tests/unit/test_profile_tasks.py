"""What the profiler asks of ggml for each case, and what it makes of the answers: on a machine that is a formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from worlds import ATTENTION, model_info, weight

from ggml_bridge import OutOfMemory, Unsupported
from oallama.core.profile import Profile
from oallama.core.types import Operator
from oallama.core.units import MIB
from oallama.profile.link import LINK_SIZES, N_EXCURSIONS, link_tasks
from oallama.profile.merge import empty, merged
from oallama.profile.tasks import GRAPH_TOKENS, Session, mul_mat_tasks, rest_tasks
from oallama.profile.timing import Policy
from oallama.profile.wanted import wanted

LAUNCH_S, LAUNCH_ISSUE_S, ISSUE_S = 1e-5, 2e-6, 1e-6
COPY_S = {("h2d", True): (1e-6, 1e-10), ("h2d", False): (2e-6, 3e-10), ("d2h", True): (3e-6, 2e-10),
          ("d2h", False): (4e-6, 4e-10)}  # fmt: skip
GRAPH_S, EXCURSION = 1e-3, (5e-5, 1e-9)
COPY_WAIT = 0.25

N_USED = 2
EXPERTS = [
    weight(role=role, k=k, n=n, layer=0, n_expert=8, used=N_USED)
    for role, k, n in (("ffn_up_exps", 256, 64), ("ffn_down_exps", 64, 256))
]
OPERATORS: list[Operator] = [
    *(weight(role=role, k=256, n=n, layer=0) for role, n in zip(ATTENTION, (256, 64, 64, 256), strict=True)),
    *EXPERTS,
    weight(role="output", k=256, n=3200),
]
MODEL = model_info(n_layer=1, n_embd=256)


@dataclass
class FakeTimer:
    """Takes the same seconds each time, as the clock can tell."""

    seconds: float
    machine: Machine
    n_runs: int = 0

    def run(self, n: int) -> list[float]:
        self.n_runs += n
        self.machine.now += n * self.seconds
        return [self.seconds] * n

    def close(self) -> None:
        self.machine.n_open -= 1


@dataclass
class Machine:
    """A bridge to a machine on which everything takes what a formula says, `slowdown` times as long.

    refused: layouts and devices that have no kernel; pinned: whether the device has pinned memory; least_bytes: of
    working sets that there is no memory for.
    """

    refused: tuple[str, ...] = ()
    pinned: bool = True
    least_bytes: float = float("inf")
    slowdown: float = 1.0
    now: float = 0.0
    n_open: int = 0
    asked: list[tuple[Any, ...]] = field(default_factory=list)  # of mul-mats
    timers: list[FakeTimer] = field(default_factory=list)

    def timer(self, seconds: float) -> Any:
        self.n_open += 1
        self.timers.append(FakeTimer(self.slowdown * seconds, self))
        return self.timers[-1]

    def cpu_layouts(self) -> list[str]:
        return ["CPU", "CPU_REPACK"]

    def layout_supports(self, layout: str, type_name: str, k: int, n: int, e: int, routed: int) -> bool:
        return routed == 0 and n > 64

    def mul_mat(self, device: str, layout: str | None, type_name: str, k: int, n: int, e: int, routed: int,
                n_tokens: int, working_set_bytes: int, n_threads: int) -> Any:  # fmt: skip
        self.asked.append((device, layout, (k, n, e), routed, n_tokens, working_set_bytes))
        if layout in self.refused or device in self.refused:
            raise Unsupported(f"no kernel in {layout or device}")
        if working_set_bytes >= self.least_bytes:
            raise OutOfMemory("no memory")
        return self.timer(mul_mat_s(device, layout, (k, n, e), n_tokens))

    def layer_rest(
        self,
        device: str,
        n_tokens: int,
        n_kv: int,
        n_layer: int,
        n_threads: int,
        flash_attn: bool,
        *types: str,
        **of: int,
    ) -> Any:
        if device in self.refused:
            raise Unsupported("no kernel of attention")
        assert n_layer * n_tokens <= GRAPH_TOKENS or n_layer == 1
        return self.timer(rest_s(device, n_kv, flash_attn))

    def launch(self, device: str, n_threads: int) -> Any:
        return self.timer(LAUNCH_S)

    def launch_issue(self, device: str) -> Any:
        return self.timer(LAUNCH_ISSUE_S)

    def transfer(self, device: str, way: str, pinned: bool, n_bytes: int) -> Any:
        if pinned and not self.pinned:
            raise Unsupported("no pinned memory")
        alpha_s, beta_s = COPY_S[way, pinned]
        return self.timer(alpha_s + beta_s * n_bytes)

    def issue(self, device: str, pinned: bool, n_bytes: int) -> Any:
        return self.timer(ISSUE_S if pinned else ISSUE_S + COPY_S["h2d", False][1] * n_bytes)

    def boundary(self, device: str, n_bytes: int, n_excursions: int, n_threads: int, on_cpu: bool) -> Any:
        alpha_s, beta_s = EXCURSION
        return self.timer(GRAPH_S + (0.0 if on_cpu else n_excursions * (alpha_s + beta_s * n_bytes)))

    def copy_wait(self, device: str, pinned: bool, n_bytes: int) -> float:
        assert n_bytes >= MIB, "a copy long enough to be waited for"
        if pinned and not self.pinned:
            raise Unsupported("no pinned memory")
        return COPY_WAIT


def mul_mat_s(device: str, layout: str | None, shape: Sequence[int], n_tokens: int) -> float:
    k, n, _ = shape
    rate = {"CPU": 1e9, "CPU_REPACK": 2e9, None: 4e9}[layout]
    return 1e-6 * (1 if layout else 3) + k * n * (1 + 0.1 * n_tokens) / rate


def rest_s(device: str, n_kv: int, flash_attn: bool) -> float:
    return (1e-7 if device == "CPU" else 1e-8) * n_kv * (1 if flash_attn else 2)


def session(
    machine: Machine,
    known: Profile | None = None,
    device: str = "TEST0",
    operators: Sequence[Operator] = OPERATORS,
    tokens: Sequence[int] = (1, 32),
    **more: Any,
) -> Session:
    want = wanted(MODEL, operators, tokens, MIB)
    profile = replace(empty({}), device=device) if known is None else known
    return Session(machine, device, profile, want, 1, Policy(), lambda: machine.now, **more)  # type: ignore[arg-type]


def measured(machine: Machine, made: Session) -> Profile:
    """The profile after all copies, mul-mats and rests."""
    fragments = [task.run() for task in (*link_tasks(made), *mul_mat_tasks(made), *rest_tasks(made))]
    assert machine.n_open == 0, "each timer was freed"
    return merged(made.profile, fragments)


def test_each_case_is_timed_where_it_has_a_kernel_and_nothing_is_left() -> None:
    machine = Machine()
    made = session(machine)
    profile = measured(machine, made)
    for case in profile.cases:
        layout = None if case.device == "TEST0" else case.layout
        assert case.seconds == pytest.approx(mul_mat_s(case.device, layout, case.mul_mat.shape, case.n_tokens))
    found = {(case.device, case.layout, case.mul_mat, case.n_tokens) for case in profile.cases}
    mul_mats = {op.mul_mat for op in OPERATORS}
    for mul_mat in mul_mats:
        assert {("CPU", "CPU", mul_mat, n) for n in (1, 32)} <= found
        assert {("TEST0", "device", mul_mat, n) for n in (1, 32)} <= found
        repacked = mul_mat.op == "MUL_MAT" and mul_mat.shape[1] > 64
        assert (("CPU", "CPU_REPACK", mul_mat, 1) in found) is repacked
    for _, _, shape, routed, *_ in machine.asked:
        assert routed == (N_USED if shape[2] > 1 else 0)
    again = session(machine, profile)
    assert not profile.skipped and not profile.warnings
    assert mul_mat_tasks(again) == rest_tasks(again) == link_tasks(again) == []


def test_the_rest_of_a_layer_is_timed_at_each_depth_and_way_of_attention() -> None:
    machine = Machine()
    profile = measured(machine, session(machine))
    assert {rest.device for rest in profile.rest} == {"CPU", "TEST0"}
    assert len({rest.n_kv for rest in profile.rest}) > 2
    for rest in profile.rest:
        assert rest.shape is not None
        assert rest.seconds == pytest.approx(rest_s(rest.device, rest.n_kv, rest.shape.flash_attn))


def test_lines_of_the_link_are_those_of_its_copies() -> None:
    machine = Machine()
    profile = measured(machine, session(machine))
    for name, (way, pinned) in {"h2d_pinned": ("h2d", True), "h2d_pageable": ("h2d", False),
                                "d2h_pinned": ("d2h", True), "d2h": ("d2h", False)}.items():  # fmt: skip
        line = profile.link[name]
        assert (line.alpha_s, line.beta_s_per_byte) == pytest.approx(COPY_S[way, pinned])
        assert [size for size, _ in line.points] == list(LINK_SIZES)
    assert profile.link["issue_pinned"].alpha_s == pytest.approx(ISSUE_S)
    assert profile.link["issue_pageable"].beta_s_per_byte == pytest.approx(COPY_S["h2d", False][1])
    assert (profile.launch_s, profile.launch_issue_s) == pytest.approx((LAUNCH_S, LAUNCH_ISSUE_S))
    assert profile.copy_wait == COPY_WAIT
    boundary = profile.boundary
    assert boundary is not None and N_EXCURSIONS > 1
    assert (boundary.alpha_s, boundary.beta_s_per_byte) == pytest.approx(EXCURSION), "of one excursion, less the graph"


def test_the_first_case_is_timed_again_at_the_end() -> None:
    machine = Machine()
    made = session(machine)
    *tasks, again = mul_mat_tasks(made)
    fragments = [task.run() for task in tasks]
    assert again.run() == {}
    for slowdown, said in ((1.1, None), (1.3, "30% slower"), (0.5, "50% faster")):
        machine.slowdown = slowdown
        found = again.run()
        assert found == {} if said is None else said in found["warnings"][0] and "--refresh" in found["warnings"][0]
    first = fragments[0]["cases"][0]
    assert machine.asked[-1][0] == "CPU" and machine.asked[-1][2] == tuple(first["shape"])


@pytest.mark.parametrize(("n_tokens", "n_runs"), [(1, 1 + 5), (64, 3)])
def test_long_passes_are_run_less_often(n_tokens: int, n_runs: int) -> None:
    """Without a run that only warms up, as making the timer ran two passes; here a run takes 0.02 s."""
    shape = (8192, 65536, 1)
    machine = Machine(slowdown=0.02 / mul_mat_s("CPU", "CPU", shape, n_tokens))
    made = session(machine, device="CPU", operators=[weight(role="output", k=shape[0], n=shape[1])], tokens=(n_tokens,))
    mul_mat_tasks(made)[0].run()
    assert machine.timers[0].n_runs == n_runs
