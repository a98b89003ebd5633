"""Measures the link between host and device: copies, crossings in a graph, and what works at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from oallama.core.types import CPU_DEVICE, DEVICE_LAYOUT, Contention, LinearFit, Sharing, Worker
from oallama.core.units import KIB, MIB
from oallama.profile.cases import Case, CaseKey, flops
from oallama.profile.fit import fit_linear
from oallama.profile.merge import LINKS, has_device, missing_link, missing_sharing
from oallama.profile.session import Fragment, Session, Task
from oallama.profile.store import fit_to_json
from oallama.profile.timing import Policy
from oallama.profile.wanted import PASS_FLOPS, cases_at

if TYPE_CHECKING:
    from ggml_bridge.timing import MulMatCase

LINK_SIZES = tuple(4 * KIB * 4**i for i in range(7))  # 4 KiB .. 16 MiB
BOUNDARY_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 8 * MIB)
N_EXCURSIONS = 8
MIN_POINTS = 3
CHUNK_BYTES = 4 * MIB
POINT_CAP = 0.4  # time cap of one point of a line, in caps of a decode case
WAIT_BYTES = 16 * MIB
CONTENTION_CAP = 2.0
SHARING_CAP = 1.0


def link_tasks(session: Session) -> list[Task]:
    """One task for each line that is missing, and one for the launch."""
    if not has_device(session.profile):
        return []
    missing = missing_link(session.profile)
    runs: dict[str, Callable[[], Fragment]] = {
        "launch_s": partial(_launch, session),
        "launch_issue_s": partial(_launch_issue, session),
        **{name: partial(_copies, session, name) for name in LINKS},
        "boundary": partial(_boundary, session),
        "copy_wait": partial(_copy_wait, session),
    }
    device = session.profile.device
    return [
        session.task(f"{device} {name.replace('_', ' ')}", 4 * POINT_CAP, device, run)
        for name, run in runs.items()
        if name in missing
    ]


def contention_tasks(session: Session, layouts: Sequence[str], known: Mapping[CaseKey, float]) -> list[Task]:
    """The contention measurement, if it is missing. known: seconds of mul-mats by the time that it runs."""
    if not has_device(session.profile) or "contention" not in missing_link(session.profile):
        return []
    run = partial(_contention, session, layouts, known)
    return [session.task("CPU and link at once", 3 * CONTENTION_CAP, session.profile.device, run)]


def sharing_tasks(session: Session, layouts: Sequence[str], known: Mapping[CaseKey, float]) -> list[Task]:
    """One task for each two kinds of work whose speeds at the same time are missing; `known` as above."""
    return [
        session.task(
            f"{first} and {second} at once, {n_tokens} tokens",
            3 * SHARING_CAP,
            session.profile.device,
            partial(_sharing, session, layouts, known, first, second, n_tokens),
        )
        for first, second, n_tokens in missing_sharing(session.profile, session.want)
    ]


def line_over(sizes: Sequence[int], seconds_of: Callable[[int], float], slow_s: float) -> LinearFit:
    """Fit t = alpha + beta * bytes over ascending sizes.

    A link so slow that one message takes longer than slow_s is spared larger ones, once MIN_POINTS are known.
    """
    points: list[tuple[int, float]] = []
    for size in sizes:
        points.append((size, seconds_of(size)))
        if points[-1][1] > slow_s and len(points) >= MIN_POINTS:
            break
    return fit_linear(points)


def _policy(session: Session) -> Policy:
    return replace(session.policy, time_cap_s=POINT_CAP * session.policy.time_cap_s)


def _launch(session: Session) -> Fragment:
    timer = session.bridge.launch(session.ggml_device, session.n_threads)
    return {"launch_s": session.timed(timer, _policy(session)).seconds}


def _launch_issue(session: Session) -> Fragment:
    timer = session.bridge.launch_issue(session.ggml_device)
    return {"launch_issue_s": session.timed(timer, _policy(session)).seconds}


def _copies(session: Session, name: str) -> Fragment:
    """The line of one kind of copy, or of what it holds up its caller. Activations go to pageable memory, so that d2h
    is measured there; a device without pinned memory gets the pageable line for both."""
    from ggml_bridge import Unsupported

    policy = _policy(session)

    def seconds_of(n_bytes: int, pinned: bool) -> float:
        if name.startswith("issue"):
            timer = session.bridge.issue(session.ggml_device, pinned, n_bytes)
        else:
            timer = session.bridge.transfer(session.ggml_device, "d2h" if name == "d2h" else "h2d", pinned, n_bytes)
        return session.timed(timer, policy).seconds

    try:
        fit = line_over(LINK_SIZES, partial(seconds_of, pinned=name.endswith("pinned")), policy.time_cap_s)
    except Unsupported:
        fit = line_over(LINK_SIZES, partial(seconds_of, pinned=False), policy.time_cap_s)
    return {"link": {name: fit_to_json(fit)}}


def _boundary(session: Session) -> Fragment:
    """What one excursion CPU -> device -> CPU adds to a graph in ggml's scheduler, by the bytes carried each way: the
    graph with excursions less the same graph all on the CPU."""
    policy = _policy(session)

    def graph_seconds(n_bytes: int, on_cpu: bool) -> float:
        timer = session.bridge.boundary(session.ggml_device, n_bytes, N_EXCURSIONS, session.n_threads, on_cpu)
        return session.timed(timer, policy).seconds

    def seconds_of(n_bytes: int) -> float:
        return (graph_seconds(n_bytes, on_cpu=False) - graph_seconds(n_bytes, on_cpu=True)) / N_EXCURSIONS

    return {"boundary": fit_to_json(line_over(BOUNDARY_SIZES, seconds_of, policy.time_cap_s))}


def _copy_wait(session: Session) -> Fragment:
    from ggml_bridge import Unsupported

    try:
        return {"copy_wait": session.bridge.copy_wait(session.ggml_device, True, WAIT_BYTES)}
    except Unsupported:
        return {"copy_wait": session.bridge.copy_wait(session.ggml_device, False, WAIT_BYTES)}


def _contention(session: Session, layouts: Sequence[str], known: Mapping[CaseKey, float]) -> Fragment:
    case = _largest(session, layouts, known)
    if case is None:
        raise ValueError("no plain mul-mat was timed on the CPU, so the contention of CPU and link cannot be measured")
    k, n, _ = case.signature.shape
    rates = session.bridge.contention(
        session.ggml_device,
        k,
        n,
        case.signature.type,
        case.layout,
        session.n_threads,
        CHUNK_BYTES,
        CONTENTION_CAP * session.policy.time_cap_s,
        case.working_set_bytes,
    )
    contention = Contention(
        cpu_alone_gb_per_s=rates.cpu_alone / 1e9,
        link_alone_gb_per_s=rates.link_alone / 1e9,
        cpu_with_link_gb_per_s=rates.cpu_with_link / 1e9,
        link_with_cpu_gb_per_s=rates.link_with_cpu / 1e9,
    )
    return {"contention": asdict(contention)}


def _sharing(
    session: Session,
    layouts: Sequence[str],
    known: Mapping[CaseKey, float],
    first: Worker,
    second: Worker,
    n_tokens: int,
) -> Fragment:
    case = _largest(session, layouts, known, n_tokens)
    if case is None:  # the device has no kernel for any of them
        return {}

    def mul_mats(worker: Worker) -> MulMatCase:
        on_cpu = worker == "cpu"
        return session.bridge.mul_mat_case(
            CPU_DEVICE if on_cpu else session.ggml_device,
            case.layout if on_cpu else None,
            case.signature.type,
            *case.signature.shape[:2],
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
    return {"sharing": [asdict(sharing)]}


def _largest(
    session: Session, layouts: Sequence[str], known: Mapping[CaseKey, float], n_tokens: int | None = None
) -> Case | None:
    """A mul-mat in its fastest layout: the largest that is rotated through several copies. n_tokens: of that batch
    size, quick, and timed on the device too."""
    device = session.profile.device
    plain = [
        (
            n_tokens is None or flops(case.signature, n_tokens) <= PASS_FLOPS,
            case.working_set_bytes > case.signature.bytes,
            case.signature.bytes,
            -seconds,
            case.layout,
            case,
        )
        for layout in layouts
        for case in cases_at(session.want, CPU_DEVICE, layout)
        if case.signature.shape[2] == 1
        and (seconds := known.get(case.key)) is not None
        and (n_tokens is None or replace(case, device=device, layout=DEVICE_LAYOUT).key in known)
        and n_tokens in (None, case.n_tokens)
    ]
    return max(plain, key=lambda item: item[:5])[5] if plain else None
