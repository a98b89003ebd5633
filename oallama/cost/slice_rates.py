"""What work on the device costs beside computing: copies of weights, crossings of activations, joins."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from oallama.core.errors import ProfileError
from oallama.core.profile import LinearFit, Profile
from oallama.core.types import CPU_DEVICE
from oallama.core.units import KIB, MIB
from oallama.cost.block_cost import BlockCost
from oallama.cost.blocks import F32
from oallama.cost.interference import Interference, InterferenceCurve, interference_at, interference_curve
from oallama.cost.streams import BlockTimes, Step
from oallama.cost.transfer import TransferRates, transfer_rates
from oallama.profile.fit import fit_linear

JOIN_BYTES = 3 * F32
"""Of memory that the join moves for each element: it reads both sides' results and writes one."""

WEIGHT_COPY_BYTES = 256 * KIB
"""Copies of weights are from here on as large as that. What a line over all sizes makes of them is off by as much as
caches are faster than memory: on a local RPC worker 64 KiB pass at 20 GB/s, 4 MiB at 2."""


MIN_PIECE_BYTES, MAX_PIECE_BYTES = 64 * KIB, 8 * MIB
BYTES_PER_WAIT = 32 * MIB
"""Of weights that are copied for each activation that waits for a piece; pieces grow with its root only."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """What a block's inputs and results take, seconds."""

    send_s: float = 0.0  # of the thread that computes CC
    join_s: float = 0.0
    launch_s: float = 0.0  # of the device's graph
    staged_in_s: float = 0.0  # copies that go on while the thread does
    staged_out_s: float = 0.0
    in_s: float = 0.0  # of send_s: copies that the thread waits for
    out_s: float = 0.0  # of join_s


NO_CROSSING = Crossing()


@dataclass(frozen=True, slots=True)
class SliceRates:
    """What work on the device costs beside computing."""

    weights: LinearFit  # the link that CG is streamed over
    transfer: TransferRates  # of activations; a launch takes split_s, one for each step
    join_s_per_byte: float  # of memory that the CPU reads or writes
    blocking: bool = False  # the device does nothing by itself: the thread that computes CC copies and waits first
    issue: LinearFit | None = None  # for how long a copy to the device holds up that thread; None: not at all
    interference: InterferenceCurve = ()
    staged: bool = False  # activations go through pinned memory: the thread does not wait for their copies
    piece_bytes: int = field(init=False)  # of weights that are asked for at once

    def __post_init__(self) -> None:
        object.__setattr__(self, "piece_bytes", self._best_piece())

    def beside(self, n_tokens: int) -> Interference:
        """What work at the same time leaves, in batches of so many tokens."""
        return interference_at(self.interference, n_tokens)

    def _best_piece(self) -> int:
        """Of weights that are asked for at once.

        A device copies one thing at a time. An activation that comes meanwhile waits for half a piece on average, P/2r
        at r bytes a second; asking takes the thread a seconds a piece, a B/P for B bytes. P = sqrt(2 a r B) makes the
        least of the sum.
        """
        if not self.issue or not self.weights.beta_s_per_byte:
            return MIN_PIECE_BYTES
        wanted = sqrt(2 * self.issue.alpha_s / self.weights.beta_s_per_byte * BYTES_PER_WAIT)
        return max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, int(wanted) // (4 * KIB) * (4 * KIB)))

    def crossing(self, n_up: int, n_down: int, joined: float, n_steps: int) -> Crossing:
        """Of so many bytes, joined elements and launches."""
        link = self.transfer
        send_s = self.staging_s(n_up) + n_steps * link.launch_issue_s
        join_s = joined * JOIN_BYTES * self.join_s_per_byte
        in_s, out_s = link.copy_in.seconds(n_up), link.copy_out.seconds(n_down)
        if self.staged:
            return Crossing(send_s, join_s, link.launch_s, in_s, out_s)
        return Crossing(send_s + in_s, join_s + out_s, link.launch_s, in_s=in_s, out_s=out_s)

    def staging_s(self, n_bytes: float) -> float:
        """Of the thread, until activations are on their way from pinned memory: moved there, and asked for piece by
        piece; 0 where they are sent from where they are."""
        if not self.staged:
            return 0.0
        issue_s = self.issue.alpha_s if self.issue else 0.0
        return 2 * n_bytes * self.join_s_per_byte + max(1.0, n_bytes / MIB) * issue_s


def both_sides(
    of: BlockCost,
    rates: SliceRates,
    crossing: Crossing,
    steps: tuple[Step, ...],
    cpu_s: float,
    rows: int,
    issue_s: float = 0.0,
) -> BlockTimes:
    """Both sides of a block. A device that does nothing by itself is waited for before the CPU begins."""
    send_s, waited = crossing.send_s, ()
    if rates.blocking:
        send_s += sum(step.copy_s + step.launch_s + step.gpu_s for step in steps)
        steps, waited = (), steps
    return BlockTimes(
        gap_s=0.0,
        send_s=send_s,
        cpu_s=cpu_s,
        steps=steps,
        join_s=crossing.join_s,
        routed=of.gemms.routed,
        issue_s=issue_s,
        interference=rates.beside(rows),
        in_s=crossing.in_s,
        waited=waited,
        out_s=crossing.out_s,
    )


def slice_rates(profile: Profile) -> SliceRates:
    """CG lies in pinned memory; pageable memory is what is left where the device has none. Raises ProfileError where no
    link was measured."""
    link, pinned = profile.link, profile.is_pinned
    weights = link.get("h2d_pinned" if pinned else "h2d_pageable") or link.get("h2d_pageable")
    if weights is None:
        raise ProfileError("the profile has no link to a device; run `oallama profile` with --device")
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
    """The line of large copies, where enough of them were measured."""
    points = [(n_bytes, seconds) for n_bytes, seconds in line.points if n_bytes >= WEIGHT_COPY_BYTES]
    return fit_linear(points) if len(points) > 2 else line
