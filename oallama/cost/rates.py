"""Costs of copies, of device copies and of contention, from a profile.

A device copy of activations takes α + β·bytes of the profiled link (ScheInfer Eq. 3). Each split on the device adds the
time of ggml's scheduler besides the two copies, from the profiled boundary (one round trip host -> device -> host).

CPU and link share the DRAM (B_cc + B_cg <= B_dram). How much they slow each other down depends on the bytes that a
kernel reads per token, so it is measured by batch size. A device whose driver or memory is the host's also slows down
the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, permutations
from math import sqrt
from typing import NamedTuple, get_args

from oallama.core.errors import ProfileError
from oallama.core.profile import Contention, LinearFit, Profile, Worker
from oallama.core.types import CPU_DEVICE
from oallama.core.units import KIB, MIB
from oallama.cost.blocks import F32
from oallama.cost.graph import DeviceCopies
from oallama.cost.kernels import seconds_per_byte
from oallama.cost.passes import Pass
from oallama.profile.fit import fit_linear


@dataclass(frozen=True, slots=True)
class TransferRates:
    """α and β of both directions and the fixed cost of a device split, in seconds and seconds per byte."""

    copy_in: LinearFit
    copy_out: LinearFit
    split_s: float
    launch_issue_s: float = 0.0  # the part of split_s for which the launching thread is busy

    @property
    def launch_s(self) -> float:
        """Seconds from the end of the launching call until the device computes."""
        return max(0.0, self.split_s - self.launch_issue_s)

    def seconds(self, copies: DeviceCopies, n_tokens: int, n_outputs: int) -> float:
        """Seconds of these copies in one pass over n_tokens tokens with logits of n_outputs of them."""
        return (
            copies.device_splits * self.split_s
            + copies.copies_in * self.copy_in.alpha_s
            + copies.copies_out * self.copy_out.alpha_s
            + (n_tokens * copies.bytes_in_per_token + n_outputs * copies.bytes_in_per_output)
            * self.copy_in.beta_s_per_byte
            + (n_tokens * copies.bytes_out_per_token + n_outputs * copies.bytes_out_per_output)
            * self.copy_out.beta_s_per_byte
        )

    def seconds_over(self, copies: DeviceCopies, passes: Sequence[Pass]) -> float:
        return sum(p.count * self.seconds(copies, p.n_tokens, p.n_outputs) for p in passes)


NO_TRANSFER = TransferRates(LinearFit(0.0, 0.0, 1.0), LinearFit(0.0, 0.0, 1.0), 0.0)


def transfer_rates(profile: Profile) -> TransferRates:
    """The rates of a profile; all 0 without a device.

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
    """The fit of copies from one device to another, which ggml makes through pageable host memory."""
    out, back = source.link["d2h"], target.link.get("h2d_pageable") or target.link["h2d_pinned"]
    return LinearFit(out.alpha_s + back.alpha_s, out.beta_s_per_byte + back.beta_s_per_byte, min(out.r2, back.r2))


def weight_stream(profile: Profile, mapped: bool = True) -> LinearFit | None:
    """The link over which llama.cpp offloads plain host weights in large batches. A mapped file is pageable memory; if
    the file is read instead (with split operators), weights are in the device's pinned memory if it has any. None for
    devices without offload (ggml's RPC and CPU devices have no offload_op)."""
    if profile.fingerprint.get("device_backend") in (None, "RPC", "CPU"):
        return None
    pinned = None if mapped or not profile.is_pinned else profile.link.get("h2d_pinned")
    return pinned or profile.link.get("h2d_pageable")


ONE_QUEUE = 0.5
"""If a result waits for at least this share of a copy on another stream, all streams are modelled as one queue."""


@dataclass(frozen=True)
class Interference:
    """Speeds of concurrent work relative to the speed alone, 0..1. one_queue: the device does not compute during copies
    that were requested before, and a wait for the device is a wait for all copies."""

    cpu_with_device: float = 1.0
    device_with_cpu: float = 1.0
    cpu_with_link: float = 1.0
    link_with_cpu: float = 1.0
    device_with_link: float = 1.0
    link_with_device: float = 1.0
    one_queue: bool = False

    @cached_property
    def speeds(self) -> tuple[tuple[float, float, float], ...]:
        """(CPU, link, device), indexed by a bit mask of the busy ones: 1 CPU, 2 link, 4 device."""
        return tuple(self._speeds(bool(n & 1), bool(n & 2), bool(n & 4)) for n in range(8))

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
"""Interference by batch size, ascending; empty: not measured, so no interference."""

_NAMES = tuple(f"{first}_with_{second}" for first, second in permutations(get_args(Worker), 2))


def interference_curve(profile: Profile) -> InterferenceCurve:
    """The interference in a profile. Work that was faster together than alone counts as unaffected."""
    one_queue = profile.copy_wait is not None and profile.copy_wait >= ONE_QUEUE
    measured: dict[int, dict[str, float]] = {}
    for row in profile.sharing:
        if row.first != row.second:
            names = f"{row.first}_with_{row.second}", f"{row.second}_with_{row.first}"
            measured.setdefault(row.n_tokens, {}).update(zip(names, _shares(row), strict=True))
    if not measured and one_queue:
        measured[1] = {}
    return tuple(
        (n_tokens, Interference(**speeds, one_queue=one_queue)) for n_tokens, speeds in sorted(measured.items())
    )


def _shares(contention: Contention) -> tuple[float, float]:
    least = 0.01  # also for work that made no progress during the measurement
    first = contention.first_with_second_gb_per_s / contention.first_alone_gb_per_s
    second = contention.second_with_first_gb_per_s / contention.second_alone_gb_per_s
    return max(least, min(1.0, first)), max(least, min(1.0, second))


@cache
def interference_at(curve: InterferenceCurve, n_tokens: int) -> Interference:
    """Interference at a batch size: linear between measured ones, constant outside them."""
    if not curve:
        return NO_INTERFERENCE
    for (n0, at0), (n1, at1) in pairwise(curve):
        if n_tokens < n1:
            part = max(0.0, (n_tokens - n0) / (n1 - n0))
            mixed = {name: (1 - part) * getattr(at0, name) + part * getattr(at1, name) for name in _NAMES}
            return Interference(**mixed, one_queue=at0.one_queue)
    return curve[-1][1]


JOIN_BYTES = 3 * F32
"""Bytes of memory traffic of the join per element: it reads both sides' results and writes one."""

WEIGHT_COPY_BYTES = 256 * KIB
"""Least size of the copies that are fitted for weights. Smaller ones are faster, as they fit caches: on a local RPC
worker 64 KiB are copied at 20 GB/s, 4 MiB at 2."""


MIN_PIECE_BYTES, MAX_PIECE_BYTES = 64 * KIB, 8 * MIB
BYTES_PER_WAIT = 32 * MIB
"""Bytes of weights copied per activation that waits for a piece; pieces grow with its square root."""


class CopySeconds(NamedTuple):
    """Seconds to copy a block's inputs and results."""

    send_s: float = 0.0  # of the thread, before CC
    join_s: float = 0.0  # of the thread, after CC
    launch_s: float = 0.0  # of the device's graph
    staged_in_s: float = 0.0  # copies to the device for which the thread does not wait
    staged_out_s: float = 0.0  # copies back for which the thread does not wait


NO_COPY = CopySeconds()


@dataclass(frozen=True)
class SliceRates:
    """Costs of slices, except computing: copies, launches, joins, contention."""

    weights: LinearFit  # the link over which CG is streamed
    transfer: TransferRates  # of activations; each step adds launch_issue_s, the first also the rest of split_s
    cpu_s_per_byte: float  # of memory that the CPU reads or writes
    blocking: bool = False  # device calls are synchronous: the thread copies and waits before it computes CC
    issue: LinearFit | None = None  # seconds of the thread to request a copy to the device; None: 0
    interference: InterferenceCurve = ()
    staged: bool = False  # activations go through pinned memory: the thread does not wait for their copies
    device_s_per_byte: float = 0.0  # of memory that the device reads or writes

    def interference_at(self, n_tokens: int) -> Interference:
        """Interference in batches of n_tokens."""
        return interference_at(self.interference, n_tokens)

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of weights per copy request, P.

        A device makes one copy at a time. An activation waits for half a piece on average: P/2r seconds at r bytes per
        second. A request takes the thread `a` seconds: a B/P seconds for B bytes. P = sqrt(2 a r B) minimises the sum.
        """
        if not self.issue or not self.weights.beta_s_per_byte:
            return MIN_PIECE_BYTES
        wanted = sqrt(2 * self.issue.alpha_s / self.weights.beta_s_per_byte * BYTES_PER_WAIT)
        return max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, int(wanted) // (4 * KIB) * (4 * KIB)))

    def copy_seconds(self, n_up: int, n_down: int, joined: float, n_steps: int, n_copies: int = 1) -> CopySeconds:
        """Seconds to send n_up bytes in n_copies copies, fetch n_down bytes, join `joined` elements, and launch n_steps
        graphs. With staging the thread moves activations to pinned memory and requests their copies piece by piece."""
        link = self.transfer
        send_s = n_steps * link.launch_issue_s
        join_s = joined * JOIN_BYTES * self.cpu_s_per_byte
        in_s = link.copy_in.seconds(n_up) + (n_copies - 1) * link.copy_in.alpha_s
        out_s = link.copy_out.seconds(n_down) if n_down else 0.0
        if self.staged:
            staging_s = 2 * n_up * self.cpu_s_per_byte + max(n_copies, n_up / MIB) * self.issue_s
            return CopySeconds(staging_s + send_s, join_s, link.launch_s, in_s, out_s)
        return CopySeconds(send_s + in_s, join_s + out_s, link.launch_s)

    @property
    def issue_s(self) -> float:
        """Seconds of the thread to request a copy for which it does not wait."""
        return self.issue.alpha_s if self.staged and self.issue else 0.0


def slice_rates(profile: Profile) -> SliceRates:
    """The rates of a profile. CG is in pinned memory if the device has any, else in pageable memory. Raises
    ProfileError if no link was measured."""
    link, pinned = profile.link, profile.is_pinned
    weights = link.get("h2d_pinned" if pinned else "h2d_pageable") or link.get("h2d_pageable")
    if weights is None:
        raise ProfileError("the profile has no link times; run `oallama profile` with --device")
    issue = link.get("issue_pinned" if pinned and "h2d_pinned" in link else "issue_pageable")
    return SliceRates(
        _large(weights),
        transfer_rates(profile),
        seconds_per_byte(profile, CPU_DEVICE),
        blocking=profile.is_blocking,
        issue=_large(issue) if issue else None,
        interference=interference_curve(profile),
        staged=pinned and "d2h_pinned" in link and not profile.is_blocking,
        device_s_per_byte=seconds_per_byte(profile, profile.device),
    )


def _large(line: LinearFit) -> LinearFit:
    """The fit of large copies, if enough of them were measured."""
    points = [(n_bytes, seconds) for n_bytes, seconds in line.points if n_bytes >= WEIGHT_COPY_BYTES]
    return fit_linear(points) if len(points) > 2 else line
