"""Measures the link between host and device: copies, launches, crossings in a graph, and work at the same time;
and fits lines through what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from oallama.core.codec import to_json
from oallama.core.profile import Case, LinearFit, Sharing, Worker
from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT
from oallama.core.units import KIB, MIB
from oallama.profile.merge import LINKS, has_device, missing_link, missing_sharing
from oallama.profile.tasks import Fragment, Session, Task, guessed_making
from oallama.profile.wanted import PASS_FLOPS, cases_at

if TYPE_CHECKING:
    from ggml_bridge.timing import MulMatCase, Timer


LINK_SIZES = tuple(4 * KIB * 4**i for i in range(7))  # 4 KiB .. 16 MiB
BOUNDARY_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 8 * MIB)
N_EXCURSIONS = 8
MIN_POINTS = 3
FAR = 3.0
AGAIN = 2  # times that what is far from its line is measured again
CHUNK_BYTES = 4 * MIB
POINT_CAP = 0.4  # time cap of one point of a line, in caps of a decode case
WAIT_BYTES = 16 * MIB
SHARING_CAP = 1.0


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

    A link so slow that one message takes longer than slow_s is spared larger ones, once MIN_POINTS are known. Where the
    line is far from a measured time, something disturbed that: all are measured again, and the least of each counts.
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
    """Whether a line predicts FAR times as long as was measured, or the other way round."""
    predicted_s = fit.seconds(n_bytes)
    least_s = max(min(predicted_s, seconds), NOISE_S)
    return max(predicted_s, seconds) > FAR * least_s


def _point_cap_s(session: Session) -> float:
    return POINT_CAP * session.policy.time_cap_s


def _seconds(session: Session, timer: Timer) -> float:
    return session.timed(timer, replace(session.policy, time_cap_s=_point_cap_s(session))).seconds


def _copies(session: Session, name: str) -> Fragment:
    """Fit t = alpha + beta * bytes for a copy (h2d, d2h), or for how long the call that starts one takes (issue).
    A device without pinned memory gets the fit of pageable memory for both."""
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
    """Fit what one excursion CPU -> device -> CPU adds to a graph in ggml's scheduler, by the bytes carried each way:
    the graph with excursions less the same graph all on the CPU."""

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


def sharing_tasks(session: Session) -> list[Task]:
    """One task for each two kinds of work whose speeds at the same time are missing. They use what was measured of
    mul-mats, so they come after these."""
    largest = max((n_bytes for *_, n_bytes in session.want.mul_mats), default=0)
    return [
        Task(
            f"{first} and {second} at once, {n_tokens} tokens",
            3 * SHARING_CAP * session.policy.time_cap_s + (guessed_making(largest) if n_tokens == 1 else 0.0),
            session.profile.device,
            partial(_sharing, session, first, second, n_tokens),
        )
        for first, second, n_tokens in missing_sharing(session.profile, session.want)
    ]


def _sharing(session: Session, first: Worker, second: Worker, n_tokens: int) -> Fragment:
    case = _largest(session, n_tokens, on_device="device" in (first, second))
    if case is None:  # there is no kernel for any of them
        return {}

    def mul_mats(worker: Worker) -> MulMatCase:
        on_cpu = worker == "cpu"
        return session.bridge.mul_mat_case(
            CPU_DEVICE if on_cpu else session.ggml_device,
            case.layout if on_cpu else None,
            case.mul_mat.type,
            *case.mul_mat.shape[:2],
            n_tokens,
            case.working_set_bytes if n_tokens == 1 else 0,
            session.n_threads,
        )

    seconds = SHARING_CAP * session.policy.time_cap_s
    if second == "link":
        rates = session.bridge.share_link(mul_mats(first), session.ggml_device, CHUNK_BYTES, seconds)
    else:
        rates = session.bridge.share_compute(mul_mats(first), mul_mats(second), seconds)
    sharing = Sharing(
        first,
        second,
        n_tokens,
        first_alone_gb_per_s=rates.first_alone / 1e9,
        second_alone_gb_per_s=rates.second_alone / 1e9,
        first_with_second_gb_per_s=rates.first_with_second / 1e9,
        second_with_first_gb_per_s=rates.second_with_first / 1e9,
    )
    return {"sharing": [to_json(sharing)]}


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


#
# lines through measured points
#


ITERATIONS = 30
TRUSTED = 0.25
"""Relative residual up to which a point counts fully; beyond it its pull no longer grows (Huber)."""

NOISE_S = 1e-6
"""Times are not known better than this."""


def fit_linear(points: Sequence[tuple[int, float]]) -> LinearFit:
    """Least squares of the relative error, so that a 4 KiB message counts as much as a 16 MiB one.

    points: (bytes, median seconds), at least two different sizes. A time may be a difference that noise made zero or
    negative: residuals are relative to the fitted time, and points far off pull no harder than near ones
    (iteratively reweighted least squares with Huber's weights).
    alpha and beta are times and never negative: where the free optimum is, the best fit with that term at 0 is taken.
    r2 is 1 - (residuals / spread), each relative to the fitted time, every point counting fully.

    Raises ValueError where the points cannot determine a line.
    """
    if len({size for size, _ in points}) < 2:
        raise ValueError("a linear fit needs at least two different sizes")
    ordered = sorted((int(size), float(seconds)) for size, seconds in points)  # float sums depend on order
    scale = _rising(ordered)
    trust = [1.0] * len(ordered)
    alpha = beta = 0.0
    for _ in range(ITERATIONS):
        weights = [w / s**2 for w, s in zip(trust, scale, strict=True)]
        alpha, beta = _weighted_line(ordered, weights)
        scale = [max(alpha + beta * x, NOISE_S) for x, _ in ordered]
        off = [abs(t - alpha - beta * x) / s for (x, t), s in zip(ordered, scale, strict=True)]
        trust = [1.0 if r <= TRUSTED else TRUSTED / r for r in off]
    return LinearFit(alpha, beta, _r2(ordered, [1 / s**2 for s in scale], alpha, beta), tuple(ordered))


def _rising(ordered: Sequence[tuple[int, float]]) -> list[float]:
    """A first guess of the times: the largest so far, as more bytes never take less time."""
    rising: list[float] = []
    for _, seconds in ordered:
        rising.append(max(seconds, rising[-1] if rising else NOISE_S))
    return rising


def _weighted_line(points: Sequence[tuple[int, float]], weights: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta) >= 0 of least squares."""
    rows = [(w, x, t) for w, (x, t) in zip(weights, points, strict=True)]
    total = sum(w for w, _, _ in rows)
    mean_x = sum(w * x for w, x, _ in rows) / total
    mean_t = sum(w * t for w, _, t in rows) / total
    beta = sum(w * (x - mean_x) * (t - mean_t) for w, x, t in rows) / sum(w * (x - mean_x) ** 2 for w, x, _ in rows)
    alpha = mean_t - beta * mean_x
    if beta < 0:
        return max(0.0, mean_t), 0.0
    if alpha < 0:
        return 0.0, max(0.0, sum(w * x * t for w, x, t in rows) / sum(w * x * x for w, x, _ in rows))
    return alpha, beta


def _r2(points: Sequence[tuple[int, float]], weights: Sequence[float], alpha: float, beta: float) -> float:
    mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / sum(weights)
    residual = sum(w * (t - alpha - beta * x) ** 2 for w, (x, t) in zip(weights, points, strict=True))
    spread = sum(w * (t - mean) ** 2 for w, (_, t) in zip(weights, points, strict=True))
    return 1.0 - residual / spread if spread > 0 else 1.0
