"""Durations of one sliced block's tasks: ScheInfer Eq. 4 (rates) and Eq. 15 (rates and n_g), from a profile.

A block (cost/blocks.py) is cut at the same element everywhere: CC first, then CG, GG last. `slice_times` is what our
backend does: inputs are sent once, GG runs first, what is streamed of all the block's mul-mats is copied together into
one slot of the ring and runs when it has arrived, and one join adds both sides. (Eq. 4 to the letter:
scripts/measure/scheinfer_testbed.py.)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import sqrt

from oallama.core.errors import ProfileError
from oallama.core.profile import LinearFit, Profile
from oallama.core.types import CPU_DEVICE, MulMat, Operator
from oallama.core.units import KIB, MIB
from oallama.cost.blocks import F32, SplitBlock
from oallama.cost.experts import ExpertUse, cold_experts_read, experts_alike, miss_odds
from oallama.cost.interference import Interference, InterferenceCurve, interference_at, interference_curve
from oallama.cost.kernels import NO_TIME, Curve, Kernel, Kernels, interpolate
from oallama.cost.streams import BlockTimes, Step, run_block
from oallama.cost.timeline import Prefetch, cycle_seconds, runs_ahead
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
class Cut:
    """A block's slices, elements along its axis."""

    cc: int
    cg: int
    gg: int
    n_hot: int = 0  # experts that the device has whole, the most used ones; CC is all there is then

    @property
    def extent(self) -> int:
        return self.cc + self.cg + self.gg

    @property
    def is_whole(self) -> bool:
        """Nothing of it is on the device, or goes there."""
        return self.cg == self.gg == self.n_hot == 0


@dataclass(frozen=True, slots=True)
class Gemm:
    """One mul-mat of a block on either side."""

    mul_mat: MulMat
    bytes: int  # of the whole weight
    cpu: Kernel
    gpu: Kernel

    @property
    def routed(self) -> bool:
        return self.mul_mat.op == "MUL_MAT_ID"

    def cpu_s(self, share: float, n_tokens: int) -> float:
        return _seconds(self.cpu, share, n_tokens)

    def gpu_s(self, share: float, n_tokens: int) -> float:
        return _seconds(self.gpu, share, n_tokens)

    def read_bytes(self, share: float, n_tokens: int) -> float:
        """Of the share of the weight, what n_tokens tokens need."""
        return share * self.bytes * self.mul_mat.share_read(n_tokens) if share > 0 and n_tokens > 0 else 0.0

    def n_copies(self, share: float, n_tokens: int) -> float:
        """In which that is copied: one, of experts one for each that is routed to."""
        if share <= 0 or n_tokens <= 0:
            return 0.0
        return self.mul_mat.shape[2] * self.mul_mat.share_read(n_tokens) if self.routed else 1.0

    def copy_s(self, line: LinearFit, share: float, n_tokens: int) -> float:
        """Of these copies, one after the other."""
        return self.n_copies(share, n_tokens) * line.alpha_s + self.read_bytes(share, n_tokens) * line.beta_s_per_byte


def _seconds(kernel: Kernel, share: float, n_tokens: int) -> float:
    if share <= 0 or n_tokens <= 0:
        return 0.0
    alpha_s, rest_s = kernel.at(n_tokens)
    return alpha_s + share * rest_s


@dataclass(frozen=True, slots=True)
class Lines:
    """What a share of mul-mats takes with one number of tokens: α whatever the share, and its part of the rest (Eq. 4);
    bytes and copies of it where it is streamed."""

    cpu_alpha_s: float
    cpu_rest_s: float
    gpu_alpha_s: float
    gpu_rest_s: float
    bytes: float  # of the whole, that these tokens read
    n_copies: float  # of any share


class Gemms(tuple[Gemm, ...]):
    """Mul-mats that are cut alike, one after the other. What they take is added up once for each number of tokens."""

    @cached_property
    def routed(self) -> bool:
        return any(gemm.routed for gemm in self)

    @cached_property
    def _known(self) -> dict[int, Lines]:
        return {}

    def at(self, n_tokens: int) -> Lines:
        """n_tokens: at least one."""
        if n_tokens not in self._known:
            cpu, gpu = [gemm.cpu.at(n_tokens) for gemm in self], [gemm.gpu.at(n_tokens) for gemm in self]
            self._known[n_tokens] = Lines(
                sum(alpha_s for alpha_s, _ in cpu), sum(rest_s for _, rest_s in cpu),
                sum(alpha_s for alpha_s, _ in gpu), sum(rest_s for _, rest_s in gpu),
                sum(gemm.read_bytes(1.0, n_tokens) for gemm in self),
                sum(gemm.n_copies(1.0, n_tokens) for gemm in self),
            )  # fmt: skip
        return self._known[n_tokens]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """A block, what its mul-mats cost, and what lies between it and the one before."""

    block: SplitBlock
    gemms: Gemms
    layout: str = "CPU"  # host buffer type of CC, which the gemms' CPU times are of
    gap: Curve = (
        NO_TIME  # seconds by batch size from the join before to this block's inputs: attention, norms, crossings
    )
    gap_cpu: Curve = NO_TIME  # of these, in which the CPU works
    whole: Curve | None = None  # seconds by batch size as llama.cpp runs it on the host; None: as the gemms say
    offload: Curve = NO_TIME  # of `whole`, in which llama.cpp copies the weights to the device
    outputs_only: bool = False  # behind the last attention: of a prompt it sees only tokens whose logits are wanted
    resident: bool = False  # its inputs and results are in the device's memory
    away: Curve = NO_TIME  # of such a block: seconds by batch size that llama.cpp's crossings take where it stays whole
    takes_n_g: bool = True  # CC may be streamed for some tokens: it is held in the plain layout too
    kind: Hashable = None  # of two blocks that cost the same it is the same; None: the block is like no other
    slice_kind: Hashable = None  # of blocks that cost the same where they are sliced, but for gap and gap_cpu
    use: ExpertUse | None = None  # of the layer's experts, which the device may have some of; None: it may not

    def __post_init__(self) -> None:
        if not isinstance(self.gemms, Gemms):
            object.__setattr__(self, "gemms", Gemms(self.gemms))

    @property
    def same(self) -> Hashable:
        """Equal for blocks that cost the same."""
        return id(self) if self.kind is None else self.kind

    def like(self, block: SplitBlock) -> BlockCost:
        """Another block that costs the same."""
        return BlockCost(
            block, self.gemms, self.layout, self.gap, self.gap_cpu, self.whole, self.offload, self.outputs_only,
            self.resident, self.away, self.takes_n_g, self.kind, self.slice_kind, self.use,
        )  # fmt: skip

    def used(self, use: ExpertUse, layer: int) -> BlockCost:
        """The same, whose experts are known to be used so; no other layer's are."""
        kind = None if self.kind is None else ("used", self.kind, layer)
        return replace(self, use=use, kind=kind)

    @property
    def n_expert(self) -> int:
        return self.gemms[0].mul_mat.shape[2]

    def weight_bytes(self, cut: Cut) -> int:
        """Of GG, or of whole experts, on the device."""
        if cut.n_hot:
            return sum(gemm.bytes // self.n_expert for gemm in self.gemms) * cut.n_hot
        return self.block.weight_bytes(cut.gg)

    def hot(self, n_hot: int) -> SplitBlock:
        """The block as the device computes it that has so many experts whole."""
        n_used = self.gemms[0].mul_mat.n_expert_used
        return self.block.with_rows(min(n_used, n_hot), n_used)

    @property
    def routed(self) -> bool:
        """Whether the weights that are needed are known only once the router has run."""
        return self.gemms.routed

    def cpu_s(self, share: float, n_tokens: int) -> float:
        if share <= 0 or n_tokens <= 0:
            return 0.0
        lines = self.gemms.at(n_tokens)
        return lines.cpu_alpha_s + share * lines.cpu_rest_s

    def gpu_s(self, share: float, n_tokens: int) -> float:
        if share <= 0 or n_tokens <= 0:
            return 0.0
        lines = self.gemms.at(n_tokens)
        return lines.gpu_alpha_s + share * lines.gpu_rest_s

    def read_bytes(self, share: float, n_tokens: int) -> float:
        """Of the share of the weights, what n_tokens tokens need."""
        return share * self.gemms.at(n_tokens).bytes if share > 0 and n_tokens > 0 else 0.0

    def n_copies(self, share: float, n_tokens: int) -> float:
        """In which that is copied."""
        return self.gemms.at(n_tokens).n_copies if share > 0 and n_tokens > 0 else 0.0


def block_costs(kernels: Kernels, operators: Sequence[Operator], block: SplitBlock) -> dict[str, BlockCost]:
    """A block by CPU layout of CC, in alphabetical order: the layouts in which all its mul-mats were timed. Empty where
    the device cannot compute one of them. Raises ProfileError where the CPU was not timed."""
    members = [operators[i] for i in block.operators]
    on_device = [kernels.on_device(operator) for operator in members]
    on_host = [kernels.on_host(operator) for operator in members]
    layouts = sorted(set.intersection(*map(set, on_host)))
    return {
        layout: BlockCost(
            block,
            Gemms(
                Gemm(operator.mul_mat, operator.bytes, cpu[layout], gpu)
                for operator, cpu, gpu in zip(members, on_host, on_device, strict=True)
                if gpu is not None
            ),
            layout,
        )
        for layout in layouts
        if None not in on_device
    }


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
    _beside: dict[int, Interference] = field(default_factory=dict, init=False, compare=False, repr=False)

    def beside(self, n_tokens: int) -> Interference:
        """What work at the same time leaves, computed once for each number of tokens."""
        if n_tokens not in self._beside:
            self._beside[n_tokens] = interference_at(self.interference, n_tokens)
        return self._beside[n_tokens]

    @property
    def piece_bytes(self) -> int:
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


def slice_times(
    of: BlockCost, rates: SliceRates, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1
) -> BlockTimes:
    """The tasks of a block in a pass over n_tokens tokens, of which n_g use the CC slice on the device (CG'), and
    n_outputs give logits."""
    return own_times(of, rates, cut, n_tokens, n_g, n_outputs).behind(*gap_times(of, n_tokens))


def gap_times(of: BlockCost, n_tokens: int) -> tuple[float, float]:
    """Seconds between the block before and this one, and of these those in which the CPU works."""
    gap_s = interpolate(of.gap, n_tokens)
    return gap_s, min(gap_s, interpolate(of.gap_cpu, n_tokens))


def own_times(of: BlockCost, rates: SliceRates, cut: Cut, n_tokens: int, n_g: int, n_outputs: int) -> BlockTimes:
    """As slice_times, without the gap before the block.

    Where nothing is on the device llama.cpp runs the block where it is, and there is nothing to send or to join; nor
    is there where all is GG. A block that it offloads takes the link from what is streamed. Hot experts take no part in
    n_g.
    """
    if cut.n_hot:
        return hot_times(of, rates, cut.n_hot, n_tokens, n_outputs)
    rows = n_outputs if of.outputs_only else n_tokens
    if of.outputs_only or not of.takes_n_g:
        n_g = 0
    prime = cut.cc > 0 and n_g > 0
    if cut.is_whole and not prime:
        whole_s = of.cpu_s(1.0, rows) if of.whole is None else interpolate(of.whole, n_tokens)
        away_s = interpolate(of.away, n_tokens) if of.resident else 0.0
        copy_s = min(whole_s, interpolate(of.offload, n_tokens)) if of.whole is not None else 0.0
        if copy_s > 0:
            offload = (Step(copy_s, whole_s - copy_s),)
            return BlockTimes(away_s, 0.0, 0.0, offload, 0.0, interference=rates.beside(n_tokens), offloaded=True)
        return BlockTimes(away_s, 0.0, whole_s, (), 0.0, interference=rates.beside(n_tokens))
    if rows <= 0:
        return BlockTimes(0.0, 0.0, 0.0, (), 0.0)
    extent = cut.extent
    cc, cg, gg = cut.cc / extent, cut.cg / extent, cut.gg / extent
    block, link = of.block, rates.transfer

    streamed = of.read_bytes(cg, rows) + of.read_bytes(cc, n_g)
    issue_s = 0.0  # of the thread, to ask for the copies: each of them once, and once for each further piece
    if streamed and rates.issue is not None and not rates.blocking:
        n_asked = of.n_copies(cg, rows) + of.n_copies(cc, n_g) + max(0.0, streamed / rates.piece_bytes - 1)
        issue_s = n_asked * rates.issue.alpha_s + streamed * rates.issue.beta_s_per_byte

    # what is streamed is queued behind GG, so that the link's latency is waited for once
    streams = cg > 0 or prime
    n_steps = (gg > 0) + streams
    crossing = NO_CROSSING
    if gg < 1 and of.resident:
        # the device reads its input where it is; two launches: it adds what the thread sends, and llama.cpp goes on
        send_s, join_s = n_steps * link.launch_issue_s, link.split_s
        if cut.cc > 0:  # else nothing crosses
            send_s += _fetch_s(block, link, rows)
            join_s += _lift_s(block, link, cut.cc, rows - n_g) + link.split_s
        crossing = Crossing(send_s, join_s, link.launch_s)
    elif gg < 1:
        elements = extent if prime else cut.cg + cut.gg
        there = n_g if cut.is_whole else rows  # tokens that the device computes something of
        n_up, n_down = block.upload_bytes(elements, there, rows), block.download_bytes(elements, there, rows)
        crossing = rates.crossing(n_up, n_down, n_down // F32, n_steps)
    launch_s, behind_s = crossing.launch_s + crossing.staged_in_s, crossing.staged_out_s
    steps: tuple[Step, ...] = ()
    if streams:
        gpu_s = of.gpu_s(cg, rows) + of.gpu_s(cc, n_g) + behind_s
        launched = (0.0, 0.0) if gg > 0 else (launch_s, crossing.staged_in_s)
        steps = (Step(rates.weights.seconds(streamed), gpu_s, *launched, behind_s),)
    if gg > 0:
        last_s = 0.0 if streams else behind_s
        steps = (Step(0.0, of.gpu_s(gg, rows) + last_s, launch_s, crossing.staged_in_s, last_s), *steps)
    return _together(of, rates, crossing, steps, of.cpu_s(cc, rows - n_g), rows, issue_s)


def hot_times(of: BlockCost, rates: SliceRates, n_hot: int, n_tokens: int, n_outputs: int = 1) -> BlockTimes:
    """The tasks of a block of which the device has so many experts whole, without the gap before it.

    Of each token the device computes as many rows as may be hits, whether they are or not. The CPU computes misses, one
    row each: of one token it reads their experts; of a prompt it reads those that are missed at all, or multiplies,
    whichever takes longer. How many miss differs from token to token, and the later side decides, which takes longer
    than the average number of misses would.
    """
    rows = n_outputs if of.outputs_only else n_tokens
    if rows <= 0:
        return BlockTimes(0.0, 0.0, 0.0, (), 0.0)
    use, link, n_expert = of.use or experts_alike(of.n_expert), rates.transfer, of.n_expert
    block, own = of.block, of.hot(n_hot)
    n_used = of.gemms[0].mul_mat.n_expert_used
    n_rows, miss = min(n_used, n_hot), 1.0 - use.coverage(n_hot, n_tokens)
    returned = block.returned + block.returned_each * block.extent  # of all experts of a token
    n_up, n_down = own.upload_bytes(own.extent, rows), own.download_bytes(own.extent, rows)
    joined, n_biases = n_down // F32 + miss * returned * rows, block.biases * n_hot * F32
    if of.resident:
        # input, experts and routing weights come down with one wait; what comes together here goes up, and is launched
        n_up = n_rows * rows * F32 * (2 if own.n_summed(rows) > 1 else 1)
        crossing = rates.crossing(n_up + n_biases, n_down, joined, 1)
        fetch_s = link.copy_out.seconds((block.sent + n_used) * rows * F32)
        lift_s = link.copy_in.seconds(returned // block.summed * rows * F32)
        crossing = replace(
            crossing, send_s=crossing.send_s + fetch_s, join_s=crossing.join_s + lift_s + 2 * link.split_s
        )
    else:
        crossing = rates.crossing(n_up + n_biases, n_down, joined, 1)
    behind_s = crossing.staged_out_s
    gpu_s = of.gpu_s(n_rows / n_used, rows) + behind_s
    step = Step(0.0, gpu_s, crossing.launch_s + crossing.staged_in_s, crossing.staged_in_s, behind_s)
    lines = of.gemms.at(rows)

    def made(cpu_s: float, more_s: float = 0.0) -> BlockTimes:
        late = replace(crossing, join_s=crossing.join_s + more_s)
        return _together(of, rates, late, (step,), cpu_s, rows)

    if rows > 1:
        expert_s = of.gemms.at(1).cpu_rest_s / n_used
        read_s = expert_s * cold_experts_read(n_expert - n_hot, miss * n_used, rows)
        return made(lines.cpu_alpha_s + max(miss * lines.cpu_rest_s, read_s) if miss > 0 else 0.0)
    seconds = [0.0, *(lines.cpu_alpha_s + n / n_used * lines.cpu_rest_s for n in range(1, n_used + 1))]
    odds = miss_odds(n_used, 1.0 - miss)
    average = made(sum(p * s for p, s in zip(odds, seconds, strict=True)))
    expected_s = sum(p * _alone_s(made(s)) for p, s in zip(odds, seconds, strict=True))
    return made(average.cpu_s, max(0.0, expected_s - _alone_s(average)))


def _alone_s(block: BlockTimes) -> float:
    """Until both sides are joined, nothing else on the link."""
    return run_block(block, 0.0, True, 0.0, 0.0, 0.0)[0] + block.join_s


def _together(
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
        routed=of.routed,
        issue_s=issue_s,
        interference=rates.beside(rows),
        in_s=crossing.in_s,
        waited=waited,
        out_s=crossing.out_s,
    )


def _fetch_s(block: SplitBlock, link: TransferRates, n_tokens: int) -> float:
    """Of the input of a block whose neighbours are on the device, to the host."""
    return link.copy_out.seconds(block.upload_bytes(block.extent, n_tokens))


def _lift_s(block: SplitBlock, link: TransferRates, cc: int, n_tokens: int) -> float:
    """Of what so many elements of CC make of it, back."""
    return link.copy_in.seconds(block.download_bytes(cc, n_tokens))


@dataclass(slots=True)
class Pricing:
    """How slices are run: what the device and the link cost, and how far copies run ahead.

    Remembers the tasks of sliced blocks of a kind, and their prices between the gaps that were asked for last.
    """

    rates: SliceRates
    prefetch: Prefetch = Prefetch()  # noqa: RUF009 - frozen
    _own: dict[Hashable, tuple[BlockTimes, float | None]] = field(default_factory=dict, init=False, repr=False)
    _around: tuple[Curve, Curve] = field(default=(NO_TIME, NO_TIME), init=False, repr=False)
    _gaps: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    _known: dict[Hashable, float] = field(default_factory=dict, init=False, repr=False)

    def block_times(self, of: BlockCost, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> BlockTimes:
        return slice_times(of, self.rates, cut, n_tokens, n_g, n_outputs)

    def seconds(self, of: BlockCost, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> float:
        """Of one block among others like it, round after round."""
        gap_s, gap_cpu_s = self._gap(of, n_tokens)
        if cut.n_hot:
            hot = (of.same, cut.n_hot, n_tokens, n_outputs)
            if of.kind is None or hot not in self._own:
                self._own[hot] = self._of(of, cut, n_tokens, 0, n_outputs)
            _, hot_s = self._own[hot]
            assert hot_s is not None  # nothing of it is streamed
            return gap_s + hot_s
        if of.slice_kind is None or (cut.gg == cut.cg == 0 and (n_g == 0 or of.outputs_only or not of.takes_n_g)):
            own, own_s = self._of(of, cut, n_tokens, n_g, n_outputs)
            return cycle_seconds([own.behind(gap_s, gap_cpu_s)], self.prefetch) if own_s is None else gap_s + own_s
        key = (of.slice_kind, cut.cc, cut.cg, cut.gg, n_tokens, n_g, n_outputs)
        if key not in self._own:
            self._own[key] = self._of(of, cut, n_tokens, n_g, n_outputs)
        own, own_s = self._own[key]
        if own_s is not None:
            return gap_s + own_s
        if key not in self._known:
            self._known[key] = cycle_seconds([own.behind(gap_s, gap_cpu_s)], self.prefetch)
        return self._known[key]

    def _of(self, of: BlockCost, cut: Cut, n_tokens: int, n_g: int, n_outputs: int) -> tuple[BlockTimes, float | None]:
        """(a block without a gap, its seconds; None: they depend on the gap, in which its copies go on)."""
        own = own_times(of, self.rates, cut, n_tokens, n_g, n_outputs)
        ahead = runs_ahead([own], self.prefetch)
        return own, None if ahead else cycle_seconds([own], self.prefetch)

    def _gap(self, of: BlockCost, n_tokens: int) -> tuple[float, float]:
        if of.gap is not self._around[0] or of.gap_cpu is not self._around[1]:
            self._around, self._gaps, self._known = (of.gap, of.gap_cpu), {}, {}
        if n_tokens not in self._gaps:
            self._gaps[n_tokens] = gap_times(of, n_tokens)
        return self._gaps[n_tokens]
