"""Measuring tasks of a model: its mul-mats in every CPU layout and on the device, and non-matmul work of a layer.
Each task makes a fragment of the profile. (Copies, launches and work at the same time: link.py.)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oallama.core.codec import to_json
from oallama.core.profile import Case, NonMatmulCase, NonMatmulShape, Profile
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, PLAIN_LAYOUT
from oallama.profile.merge import has_device, missing_cases, missing_non_matmul
from oallama.profile.timing import Clock, Timing, TimingPolicy, measure
from oallama.profile.wanted import (
    PASS_FLOPS,
    Wanted,
    case_label,
    cases_at,
    in_order,
    kernel_kind,
    non_matmul_label,
    non_matmul_skipped,
    too_slow,
)

if TYPE_CHECKING:
    from ggml_bridge import Bridge
    from ggml_bridge.timing import Timer

GUESSED_FLOPS, GUESSED_BYTES_PER_S = 1e11, 7.5e8  # for the progress bar: of a pass, and of all passes with their making
GUESSED_PASSES = 6
LONG_PASS_FLOPS = PASS_FLOPS / 2
LONG_PASS_CAP = 2.0  # time cap of cases with long passes, in caps of the others
GRAPH_TOKENS = 64  # a graph of rests has as many layers as make about so many tokens: a launch is a small part of it
MAX_GRAPH_LAYERS = 8
NON_MATMUL_CAP = 2.0  # time cap, in caps of a decode case

Fragment = dict[str, Any]  # a part of the profile's JSON (merge.merged)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure. `weight` is a guess of its seconds; `device` and `layout` tell who is to blame for a
    crash, and `kind` with which sort of mul-mat."""

    label: str
    weight: float
    device: str
    run: Callable[[], Fragment]
    layout: str = PLAIN_LAYOUT
    kind: str = ""


@dataclass(slots=True)
class Session:
    """One process measuring for one model."""

    bridge: Bridge
    ggml_device: str  # ggml's name of the device; CPU_DEVICE if there is none, or if it is a second CPU backend
    profile: Profile  # what is known already; its `device` is the name that cases are stored under
    want: Wanted
    n_threads: int
    policy: TimingPolicy
    clock: Clock
    known: dict[Case, float] = field(init=False)  # seconds of mul-mats; grows as they are measured

    def __post_init__(self) -> None:
        self.known = {case.key: case.seconds for case in self.profile.cases}

    @property
    def devices(self) -> list[str]:
        """Names that cases are stored under: the CPU, and the device if there is one."""
        return [CPU_DEVICE, self.profile.device] if has_device(self.profile) else [CPU_DEVICE]

    @property
    def layouts(self) -> list[str]:
        """CPU layouts that may be used."""
        return [layout for layout in self.bridge.cpu_layouts() if layout not in self.profile.broken_layouts]

    def ggml_name(self, device: str) -> str:
        """ggml's name of one of `devices`."""
        return CPU_DEVICE if device == CPU_DEVICE else self.ggml_device

    def timed(self, timer: Timer, policy: TimingPolicy) -> Timing:
        """Measure with a timer and free it."""
        try:
            return measure(timer.run, self.clock, policy)
        finally:
            timer.close()


#
# mul-mats
#


def mul_mat_tasks(session: Session) -> list[Task]:
    """One for each case that is missing, cheap ones first."""
    return [
        Task(
            case_label(case),
            session.policy.time_cap_s + _guessed_seconds(case),
            case.device,
            partial(_measure_mul_mat, session, case),
            case.layout,
            kernel_kind(case.mul_mat),
        )
        for case in in_order(missing_cases(session.profile, _candidates(session)))
    ]


def _guessed_seconds(case: Case) -> float:
    copies = max(1.0, case.working_set_bytes / case.mul_mat.bytes_read(case.n_tokens))
    flops = GUESSED_PASSES * copies * case.mul_mat.flops(case.n_tokens)
    return flops / GUESSED_FLOPS + guessed_making(case.working_set_bytes)


def guessed_making(working_set_bytes: int) -> float:
    """Seconds to make a working set, and to pass over it a few times."""
    return working_set_bytes / GUESSED_BYTES_PER_S


def _candidates(session: Session) -> list[Case]:
    """List every case that this machine may have a kernel for."""
    cases = [
        case
        for layout in session.layouts
        for case in cases_at(session.want, CPU_DEVICE, layout)
        if layout == PLAIN_LAYOUT or _layout_supports(session, case)
    ]
    if has_device(session.profile):
        cases += cases_at(session.want, session.profile.device, DEVICE_LAYOUT)
    return cases


def _layout_supports(session: Session, case: Case) -> bool:
    mul_mat = case.mul_mat
    return session.bridge.layout_supports(case.layout, mul_mat.type, *mul_mat.shape, mul_mat.n_routed)


def _measure_mul_mat(session: Session, case: Case) -> Fragment:
    """Time one case, or say why not."""
    from ggml_bridge import OutOfMemory, Unsupported

    reason = too_slow(case, session.known)
    if reason is None:
        try:
            timing = _time_mul_mat(session, case)
        except (OutOfMemory, Unsupported) as error:
            reason = str(error)
        else:
            session.known[case] = timing.seconds
            return {"cases": [to_json(case.measured(timing.samples, timing.seconds))]}
    return {"skipped": [to_json(case.skipped(reason))]}


def _time_mul_mat(session: Session, case: Case) -> Timing:
    from ggml_bridge import OutOfMemory

    mul_mat, policy = case.mul_mat, session.policy
    mul_mats_in_pass = case.working_set_bytes / mul_mat.bytes_read(case.n_tokens)
    if mul_mats_in_pass * mul_mat.flops(case.n_tokens) > LONG_PASS_FLOPS:
        # making the timer ran two passes, which is warm enough
        policy = replace(_fewer(policy, LONG_PASS_CAP), warmup_runs=0)

    def timed(working_set_bytes: int) -> Timing:
        timer = session.bridge.mul_mat(
            session.ggml_name(case.device),
            None if case.layout == DEVICE_LAYOUT else case.layout,
            mul_mat.type,
            *mul_mat.shape,
            mul_mat.n_routed,
            case.n_tokens,
            working_set_bytes,
            session.n_threads,
            mul_mat.input_f32,
        )
        return session.timed(timer, policy)

    try:
        return timed(case.working_set_bytes)
    except OutOfMemory:
        return timed(0)  # a single copy of the weight


def _fewer(policy: TimingPolicy, caps: float) -> TimingPolicy:
    """The policy for slow runs: more time, and three samples are enough."""
    return replace(policy, time_cap_s=caps * policy.time_cap_s, min_repeats=min(3, policy.min_repeats))


#
# the rest of a layer
#


def non_matmul_tasks(session: Session) -> list[Task]:
    """One for each batch size, KV depth and attention mode that is missing on the CPU and on the device."""
    return [
        Task(
            non_matmul_label(device, n_tokens, n_kv, shape),
            NON_MATMUL_CAP * session.policy.time_cap_s,
            device,
            partial(_measure_non_matmul, session, device, n_tokens, n_kv, shape),
        )
        for device in session.devices
        for n_tokens, n_kv, shape in missing_non_matmul(session.profile, session.want, device)
    ]


def _measure_non_matmul(session: Session, device: str, n_tokens: int, n_kv: int, shape: NonMatmulShape) -> Fragment:
    """Time one case, or say why not."""
    from ggml_bridge import OutOfMemory, Unsupported

    try:
        timer = session.bridge.layer_rest(
            session.ggml_name(device),
            n_tokens,
            n_kv,
            max(1, min(session.want.n_layer, MAX_GRAPH_LAYERS, GRAPH_TOKENS // n_tokens)),
            session.n_threads,
            shape.flash_attn,
            shape.type_k.upper(),
            shape.type_v.upper(),
            n_embd=shape.n_embd,
            n_head=shape.n_head,
            n_head_kv=shape.n_head_kv,
            head_dim_k=shape.n_embd_head_k,
            head_dim_v=shape.n_embd_head_v,
            n_ff=shape.n_ff,
        )
    except (OutOfMemory, Unsupported) as error:
        return {"skipped": [to_json(non_matmul_skipped(device, n_tokens, n_kv, shape, str(error)))]}
    timing = session.timed(timer, _fewer(session.policy, NON_MATMUL_CAP))
    return {"rest": [to_json(NonMatmulCase(device, n_tokens, n_kv, timing.seconds, shape, timing.samples))]}
