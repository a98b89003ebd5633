"""Measures the link between host and device: copies, launches, device copies in a graph, and contention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from oallama.core.codec import to_json
from oallama.core.profile import Case, Contention, LinearFit, Worker
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT
from oallama.core.units import KIB, MIB
from oallama.profile.fit import NOISE_S, fit_linear
from oallama.profile.merge import LINKS, has_device, missing_contention, missing_link
from oallama.profile.tasks import Fragment, Session, Task, guessed_making
from oallama.profile.wanted import PASS_FLOPS, cases_at

if TYPE_CHECKING:
    from ggml_bridge.timing import Timer


LINK_SIZES = tuple(4 * KIB * 4**i for i in range(7))  # 4 KiB .. 16 MiB
BOUNDARY_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 8 * MIB)
N_EXCURSIONS = 8
MIN_POINTS = 3
FAR = 3.0
AGAIN = 2  # times that what is far from its line is measured again
CHUNK_BYTES = 4 * MIB
POINT_CAP = 0.4  # time cap of one point of a line, in caps of a decode case
WAIT_BYTES = 16 * MIB
CONTENTION_CAP = 1.0


def link_tasks(session: Session) -> list[Task]:
    """One task for each part of the link that is missing."""
    if not has_device(session.profile):
        return []
    bridge, device = session.bridge, session.ggml_device
    runs: dict[str, Callable[[], Fragment]] = {
        "launch_s": lambda: {"launch_s": _seconds(session, bridge.launch(device, session.n_threads))},
        "launch_issue_s": lambda: {"launch_issue_s": _seconds(session, bridge.launch_issue(device))},
        **{name: partial(_copies, session, name) for name in LINKS},
        "boundary": partial(_boundary, session),
        "copy_wait": partial(_copy_wait, session),
    }
    missing = missing_link(session.profile)
    stored_as = session.profile.device
    return [
        Task(f"{stored_as} {name.replace('_', ' ')}", 4 * _point_cap_s(session), stored_as, run)
        for name, run in runs.items()
        if name in missing
    ]


def line_over(sizes: Sequence[int], seconds_of: Callable[[int], float], slow_s: float) -> LinearFit:
    """Fit t = alpha + beta * bytes over ascending sizes.

    If one message takes longer than slow_s, larger ones are skipped, once MIN_POINTS are known. If a measured time is
    far from the line, it was disturbed: all are measured again, and the smallest time of each size counts.
    """
    points: dict[int, float] = {}
    for size in sizes:
        points[size] = seconds_of(size)
        if points[size] > slow_s and len(points) >= MIN_POINTS:
            break
    fit = fit_linear(tuple(points.items()))
    for _ in range(AGAIN):
        if not any(is_far(fit, *point) for point in points.items()):
            break
        points = {size: min(seconds, seconds_of(size)) for size, seconds in points.items()}
        fit = fit_linear(tuple(points.items()))
    return fit


def is_far(fit: LinearFit, n_bytes: int, seconds: float) -> bool:
    """Whether a fit and a measured time differ by a factor of FAR."""
    predicted_s = fit.seconds(n_bytes)
    least_s = max(min(predicted_s, seconds), NOISE_S)
    return max(predicted_s, seconds) > FAR * least_s


def _point_cap_s(session: Session) -> float:
    return POINT_CAP * session.policy.time_cap_s


def _seconds(session: Session, timer: Timer) -> float:
    return session.timed(timer, replace(session.policy, time_cap_s=_point_cap_s(session))).seconds


def _copies(session: Session, name: str) -> Fragment:
    """Fit t = alpha + beta * bytes for a copy (h2d, d2h), or for the call that starts one (issue). A device without
    pinned memory gets the fit of pageable memory for both."""
    from ggml_bridge import Unsupported

    def seconds_of(n_bytes: int, pinned: bool) -> float:
        if name.startswith("issue"):
            return _seconds(session, session.bridge.issue(session.ggml_device, pinned, n_bytes))
        timer = session.bridge.transfer(
            session.ggml_device, "d2h" if name.startswith("d2h") else "h2d", pinned, n_bytes
        )
        return _seconds(session, timer)

    try:
        fit = line_over(LINK_SIZES, partial(seconds_of, pinned=name.endswith("pinned")), _point_cap_s(session))
    except Unsupported:
        fit = line_over(LINK_SIZES, partial(seconds_of, pinned=False), _point_cap_s(session))
    return {"link": {name: to_json(fit)}}


def _boundary(session: Session) -> Fragment:
    """Fit the time that a round trip CPU -> device -> CPU adds to a graph in ggml's scheduler, by the bytes copied each
    way: the graph with round trips minus the same graph on the CPU."""

    def graph_seconds(n_bytes: int, on_cpu: bool) -> float:
        timer = session.bridge.boundary(session.ggml_device, n_bytes, N_EXCURSIONS, session.n_threads, on_cpu)
        return _seconds(session, timer)

    def seconds_of(n_bytes: int) -> float:
        return (graph_seconds(n_bytes, on_cpu=False) - graph_seconds(n_bytes, on_cpu=True)) / N_EXCURSIONS

    return {"boundary": to_json(line_over(BOUNDARY_SIZES, seconds_of, _point_cap_s(session)))}


def _copy_wait(session: Session) -> Fragment:
    from ggml_bridge import Unsupported

    try:
        return {"copy_wait": session.bridge.copy_wait(session.ggml_device, True, WAIT_BYTES)}
    except Unsupported:
        return {"copy_wait": session.bridge.copy_wait(session.ggml_device, False, WAIT_BYTES)}


#
# work at the same time
#


def contention_tasks(session: Session) -> list[Task]:
    """One task for each pair of kinds of work whose concurrent speeds are missing. They use the timings of mul-mats, so
    they come after those."""
    largest = max((n_bytes for *_, n_bytes in session.want.mul_mats), default=0)
    return [
        Task(
            f"{first} and {second} at once, {n_tokens} tokens",
            3 * CONTENTION_CAP * session.policy.time_cap_s + (guessed_making(largest) if n_tokens == 1 else 0.0),
            session.profile.device,
            partial(_contention, session, first, second, n_tokens),
        )
        for first, second, n_tokens in missing_contention(session.profile, session.want)
    ]


def _contention(session: Session, first: Worker, second: Worker, n_tokens: int) -> Fragment:
    from ggml_bridge.timing import MulMatCase

    case = _largest(session, n_tokens, on_device="device" in (first, second))
    if case is None:  # there is no kernel for any of them
        return {}

    def mul_mats(worker: Worker) -> MulMatCase:
        on_cpu = worker == "cpu"
        return MulMatCase(
            CPU_DEVICE if on_cpu else session.ggml_device,
            case.layout if on_cpu else None,
            case.mul_mat.type,
            *case.mul_mat.shape[:2],
            n_tokens=n_tokens,
            working_set_bytes=case.working_set_bytes if n_tokens == 1 else 0,
            n_threads=session.n_threads,
        )

    seconds = CONTENTION_CAP * session.policy.time_cap_s
    if second == "link":
        rates = session.bridge.link_contention(mul_mats(first), session.ggml_device, CHUNK_BYTES, seconds)
    else:
        rates = session.bridge.compute_contention(mul_mats(first), mul_mats(second), seconds)
    contention = Contention(
        first,
        second,
        n_tokens,
        first_alone_gb_per_s=rates.first_alone / 1e9,
        second_alone_gb_per_s=rates.second_alone / 1e9,
        first_with_second_gb_per_s=rates.first_with_second / 1e9,
        second_with_first_gb_per_s=rates.second_with_first / 1e9,
    )
    return {"sharing": [to_json(contention)]}


def _largest(session: Session, n_tokens: int, on_device: bool) -> Case | None:
    """The largest plain mul-mat in the CPU's fastest layout; rather one that is quick, and rotated through several
    copies. on_device: that was timed on the device too."""
    device = session.profile.device
    timed = [
        case
        for layout in session.layouts
        for case in cases_at(session.want, CPU_DEVICE, layout)
        if case.mul_mat.shape[2] == 1
        and case.n_tokens == n_tokens
        and case in session.known
        and (not on_device or replace(case, device=device, layout=DEVICE_LAYOUT) in session.known)
    ]
    return max(
        timed,
        key=lambda case: (
            case.mul_mat.flops(n_tokens) <= PASS_FLOPS,
            case.working_set_bytes > case.mul_mat.bytes,
            case.mul_mat.bytes,
            -session.known[case],
            case.layout,
        ),
        default=None,
    )
