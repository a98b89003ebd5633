"""Costs of copies, of device copies and of contention, from a profile.

One device copy of activations costs what the profiled link says for its bytes (ScheInfer Eq. 3: t = α + β·bytes); each
split on the device adds what ggml's scheduler needs beside the two copies, taken from the profiled boundary (one
excursion host -> device -> host).

CPU and link share the DRAM (B_cc + B_cg <= B_dram), so what they leave each other depends on the bytes that a kernel
reads for each token, and is measured by batch size. A device whose driver or memory is the host's takes from the CPU as
well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

from oallama.core.errors import ProfileError
from oallama.core.profile import Contention, LinearFit, Profile, Worker
from oallama.core.types import CPU_DEVICE
from oallama.core.units import KIB, MIB
from oallama.cost.blocks import F32
from oallama.cost.graph import DeviceCopies
from oallama.cost.passes import Pass
from oallama.profile.fit import fit_linear


@dataclass(frozen=True, slots=True)
class TransferRates:
    """α and β of both directions and the fixed cost of a device split, in seconds and seconds per byte."""

    copy_in: LinearFit
    copy_out: LinearFit
    split_s: float
    launch_issue_s: float = 0.0  # of split_s, what passes before the thread that launches can go on

    @property
    def launch_s(self) -> float:
        """Seconds from the moment that the launching thread goes on until the device computes."""
        return max(0.0, self.split_s - self.launch_issue_s)

    def seconds(self, moved: DeviceCopies, n_tokens: int, n_outputs: int) -> float:
        """One pass over n_tokens, of which n_outputs give logits."""
        return (
            moved.device_splits * self.split_s
            + moved.copies_in * self.copy_in.alpha_s
            + moved.copies_out * self.copy_out.alpha_s
            + (n_tokens * moved.bytes_in_per_token + n_outputs * moved.bytes_in_per_output)
            * self.copy_in.beta_s_per_byte
            + (n_tokens * moved.bytes_out_per_token + n_outputs * moved.bytes_out_per_output)
            * self.copy_out.beta_s_per_byte
        )

    def over(self, moved: DeviceCopies, passes: Sequence[Pass]) -> float:
        return sum(p.count * self.seconds(moved, p.n_tokens, p.n_outputs) for p in passes)


NO_TRANSFER = TransferRates(LinearFit(0.0, 0.0, 1.0), LinearFit(0.0, 0.0, 1.0), 0.0)


def transfer_rates(profile: Profile) -> TransferRates:
    """The rates of a profile; without a device, nothing counts.

    Activations are copied from and to pinned memory if the device has any: llama.cpp keeps the CPU's activations in it
    if it was given the device, and the split back end stages there. A profile without d2h_pinned is priced as it was
    measured, in pageable memory.
    """
    if not profile.link:
        return NO_TRANSFER
    if "d2h_pinned" in profile.link:
        copy_in, copy_out = profile.link["h2d_pinned"], profile.link["d2h_pinned"]
    else:
        copy_in = profile.link.get("h2d_pageable") or profile.link["h2d_pinned"]
        copy_out = profile.link["d2h"]
    issue_s = profile.launch_issue_s or 0.0
    if profile.boundary is None:
        return TransferRates(copy_in, copy_out, profile.launch_s, issue_s)
    split_s = max(0.0, profile.boundary.alpha_s - copy_in.alpha_s - copy_out.alpha_s)
    return TransferRates(copy_in, copy_out, split_s, issue_s)


def between_devices(source: Profile, target: Profile) -> LinearFit:
    """A copy from one device to another, which ggml makes through pageable host memory."""
    out, back = source.link["d2h"], target.link.get("h2d_pageable") or target.link["h2d_pinned"]
    return LinearFit(out.alpha_s + back.alpha_s, out.beta_s_per_byte + back.beta_s_per_byte, min(out.r2, back.r2))


def weight_stream(profile: Profile, mapped: bool = True) -> LinearFit | None:
    """The link llama.cpp streams plain host weights over for large batches. A mapped file is pageable memory; where it
    is read instead (beside weights of the split back end), weights lie in the device's pinned memory if it has any.
    None for devices that take no such work (ggml's RPC and CPU devices have no offload_op)."""
    if profile.fingerprint.get("device_backend") in (None, "RPC", "CPU"):
        return None
    pinned = None if mapped or not profile.is_pinned else profile.link.get("h2d_pinned")
    return pinned or profile.link.get("h2d_pageable")


ONE_QUEUE = 0.5
"""Share of a copy on another stream that a result waits for, from which on all streams are taken as one queue."""


@dataclass(frozen=True, slots=True)
class Interference:
    """Shares of the speed alone that are left, 0..1. one_queue: the device computes nothing while a copy that was asked
    for before is under way, and a wait for the device is one for all copies."""

    cpu_with_device: float = 1.0
    device_with_cpu: float = 1.0
    cpu_with_link: float = 1.0
    link_with_cpu: float = 1.0
    device_with_link: float = 1.0
    link_with_device: float = 1.0
    one_queue: bool = False
    speeds: tuple[tuple[float, float, float], ...] = field(init=False, compare=False, repr=False)  # of CPU, link and
    # device, as shares of what each does alone, by those that are busy: 1 the CPU, 2 the link, 4 the device, added up

    def __post_init__(self) -> None:
        busy = ((bool(n & 1), bool(n & 2), bool(n & 4)) for n in range(8))
        object.__setattr__(self, "speeds", tuple(self._speeds(*which) for which in busy))

    def _speeds(self, cpu: bool, link: bool, device: bool) -> tuple[float, float, float]:
        cpu_speed = link_speed = device_speed = 1.0
        if cpu and link:
            cpu_speed, link_speed = self.cpu_with_link, self.link_with_cpu
        if cpu and device:
            cpu_speed, device_speed = min(cpu_speed, self.cpu_with_device), self.device_with_cpu
        if link and device:
            link_speed = min(link_speed, self.link_with_device)
            device_speed = min(device_speed, self.device_with_link)
        return cpu_speed, link_speed, device_speed


NO_INTERFERENCE = Interference()

InterferenceCurve = tuple[tuple[int, Interference], ...]
"""Interference by batch size, ascending; empty: nothing was measured, nobody slows anybody down."""

_FIELDS: Mapping[tuple[Worker, Worker], tuple[str, str]] = {
    ("cpu", "device"): ("cpu_with_device", "device_with_cpu"),
    ("cpu", "link"): ("cpu_with_link", "link_with_cpu"),
    ("device", "link"): ("device_with_link", "link_with_device"),
}
_NAMES = tuple(name for pair in _FIELDS.values() for name in pair)


def interference_curve(profile: Profile) -> InterferenceCurve:
    """The interference in a profile. A side that was faster together than alone counts as unaffected."""
    one_queue = profile.copy_wait is not None and profile.copy_wait >= ONE_QUEUE
    measured: dict[int, dict[str, float]] = {}
    for contention in profile.sharing:
        names = _FIELDS.get((contention.first, contention.second))
        if names is not None:
            measured.setdefault(contention.n_tokens, {}).update(zip(names, _shares(contention), strict=True))
    if not measured and one_queue:
        measured[1] = {}
    return tuple((n_tokens, Interference(**left, one_queue=one_queue)) for n_tokens, left in sorted(measured.items()))


def _shares(contention: Contention) -> tuple[float, float]:
    least = 0.01  # what was starved for as long as it was watched did not stand still for ever
    first = contention.first_with_second_gb_per_s / contention.first_alone_gb_per_s
    second = contention.second_with_first_gb_per_s / contention.second_alone_gb_per_s
    return max(least, min(1.0, first)), max(least, min(1.0, second))


@cache
def interference_at(curve: InterferenceCurve, n_tokens: int) -> Interference:
    """Linear between two batch sizes, constant beyond them."""
    if not curve:
        return NO_INTERFERENCE
    for (n0, at0), (n1, at1) in pairwise(curve):
        if n_tokens < n1:
            part = max(0.0, (n_tokens - n0) / (n1 - n0))
            mixed = {name: (1 - part) * getattr(at0, name) + part * getattr(at1, name) for name in _NAMES}
            return Interference(**mixed, one_queue=at0.one_queue)
    return curve[-1][1]


JOIN_BYTES = 3 * F32
"""Bytes of memory that the join moves for each element: it reads both sides' results and writes one."""

WEIGHT_COPY_BYTES = 256 * KIB
"""Copies of weights are from here on as large as that. What a line over all sizes makes of them is off by as much as
caches are faster than memory: on a local RPC worker 64 KiB pass at 20 GB/s, 4 MiB at 2."""


MIN_PIECE_BYTES, MAX_PIECE_BYTES = 64 * KIB, 8 * MIB
BYTES_PER_WAIT = 32 * MIB
"""Bytes of weights copied for each activation that waits for a piece; pieces grow with its root only."""


class CopySeconds(NamedTuple):
    """Seconds to copy a block's inputs and results."""

    send_s: float = 0.0  # of the thread that computes CC
    join_s: float = 0.0
    launch_s: float = 0.0  # of the device's graph
    staged_in_s: float = 0.0  # copies that go on while the thread does
    staged_out_s: float = 0.0


NO_COPY = CopySeconds()


@dataclass(frozen=True, slots=True)
class SliceRates:
    """Costs of work on the device, except computing."""

    weights: LinearFit  # the link that CG is streamed over
    transfer: TransferRates  # of activations; each step adds launch_issue_s, the first waits for the rest of split_s
    join_s_per_byte: float  # of memory that the CPU reads or writes
    blocking: bool = False  # the device does nothing by itself: the thread that computes CC copies and waits first
    issue: LinearFit | None = None  # for how long a copy to the device holds up that thread; None: not at all
    interference: InterferenceCurve = ()
    staged: bool = False  # activations go through pinned memory: the thread does not wait for their copies
    piece_bytes: int = field(init=False)  # of weights that are asked for at once

    def __post_init__(self) -> None:
        object.__setattr__(self, "piece_bytes", self._best_piece())

    def interference_at(self, n_tokens: int) -> Interference:
        """Interference in batches of n_tokens."""
        return interference_at(self.interference, n_tokens)

    def _best_piece(self) -> int:
        """Bytes of weights per copy request.

        A device copies one thing at a time. An activation that comes meanwhile waits for half a piece on average, P/2r
        at r bytes a second; asking takes the thread a seconds a piece, a B/P for B bytes. P = sqrt(2 a r B) makes the
        least of the sum.
        """
        if not self.issue or not self.weights.beta_s_per_byte:
            return MIN_PIECE_BYTES
        wanted = sqrt(2 * self.issue.alpha_s / self.weights.beta_s_per_byte * BYTES_PER_WAIT)
        return max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, int(wanted) // (4 * KIB) * (4 * KIB)))

    def copy_seconds(self, n_up: int, n_down: int, joined: float, n_steps: int, n_copies: int = 1) -> CopySeconds:
        """Seconds of a device copy with so many bytes up, in so many copies, and down (0: nothing is copied back),
        joined elements and launches."""
        link = self.transfer
        send_s = self.staging_s(n_up, n_copies) + n_steps * link.launch_issue_s
        join_s = joined * JOIN_BYTES * self.join_s_per_byte
        in_s = link.copy_in.seconds(n_up) + (n_copies - 1) * link.copy_in.alpha_s
        out_s = link.copy_out.seconds(n_down) if n_down else 0.0
        if self.staged:
            return CopySeconds(send_s, join_s, link.launch_s, in_s, out_s)
        return CopySeconds(send_s + in_s, join_s + out_s, link.launch_s)

    @property
    def issue_s(self) -> float:
        """Seconds of the thread to ask for a copy that it does not wait for."""
        return self.issue.alpha_s if self.staged and self.issue else 0.0

    def staging_s(self, n_bytes: float, n_copies: int = 1) -> float:
        """Seconds of the thread until activations are on their way from pinned memory: it moves them there and asks for
        them piece by piece. 0 where they are sent from where they are."""
        if not self.staged:
            return 0.0
        return 2 * n_bytes * self.join_s_per_byte + max(n_copies, n_bytes / MIB) * self.issue_s


def slice_rates(profile: Profile) -> SliceRates:
    """CG lies in pinned memory; pageable memory is what is left where the device has none. Raises ProfileError if no
    link was measured."""
    link, pinned = profile.link, profile.is_pinned
    weights = link.get("h2d_pinned" if pinned else "h2d_pageable") or link.get("h2d_pageable")
    if weights is None:
        raise ProfileError("the profile has no link times; run `oallama profile` with --device")
    issue = link.get("issue_pinned" if pinned and "h2d_pinned" in link else "issue_pageable")
    fastest_gb_per_s = max((case.gb_per_s for case in profile.cases if case.device == CPU_DEVICE), default=0.0)
    return SliceRates(
        _large(weights),
        transfer_rates(profile),
        1 / (fastest_gb_per_s * 1e9) if fastest_gb_per_s else 0.0,
        blocking=profile.is_blocking,
        issue=_large(issue) if issue else None,
        interference=interference_curve(profile),
        staged=pinned and "d2h_pinned" in link and not profile.is_blocking,
    )


def _large(line: LinearFit) -> LinearFit:
    """The fit of large copies, if enough of them were measured."""
    points = [(n_bytes, seconds) for n_bytes, seconds in line.points if n_bytes >= WEIGHT_COPY_BYTES]
    return fit_linear(points) if len(points) > 2 else line
