"""Durations of one sliced block's tasks: ScheInfer Eq. 3 and 4 (rates) and Eq. 15 (rates and n_g), from a profile.

A block (cost/blocks.py) is cut at the same element everywhere: CC first, then CG, GG last. `slice_times` is what our
backend does: inputs are sent once, GG runs first, what is streamed of all the block's mul-mats is copied together into
one slot of the ring and runs when it has arrived, and one join adds both sides. In place of slices the device may have
the most used experts of a block whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import starmap
from typing import NamedTuple

from oallama.core.profile import LinearFit
from oallama.core.types import MulMat, Operator, StreamSettings
from oallama.cost.blocks import F32, Behind, SplitBlock
from oallama.cost.experts import ExpertUse, copied, experts_alike, miss_odds
from oallama.cost.kernels import NO_TIME, Curve, Kernel, Kernels, interpolate
from oallama.cost.rates import NO_COPY, CopySeconds, SliceRates
from oallama.cost.timeline import BlockTimes, DeviceStep, alone_seconds, cycle_seconds, own_cycle_seconds, runs_ahead


class Cut(NamedTuple):
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
        """CPU-only."""
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


class LinearCost(NamedTuple):
    """Seconds of a share of mul-mats with one number of tokens: α whatever the share, and its part of the rest (Eq.
    4)."""

    cpu_alpha_s: float
    cpu_linear_s: float
    gpu_alpha_s: float
    gpu_linear_s: float


class Streamed(NamedTuple):
    """What tokens have copied of mul-mats that are streamed whole."""

    bytes: float
    late_bytes: float  # of these, once the router has run
    n_copies: float  # of any share: one, of experts one for each that lie side by side


NOTHING = LinearCost(0.0, 0.0, 0.0, 0.0)
NOT_STREAMED = Streamed(0.0, 0.0, 0.0)


def _n_copies(mul_mat: MulMat, share: float, n_tokens: int) -> float:
    """Copies of this share of the experts, of which those that lie side by side come in one. Those of a single token
    are taken to lie apart."""
    n_expert = mul_mat.shape[2] if mul_mat.op == "MUL_MAT_ID" else 1
    return n_expert * share if n_tokens == 1 else share * (1.0 + (n_expert - 1) * (1.0 - share))


class Gemms(tuple[Gemm, ...]):
    """Mul-mats that are cut alike, one after the other. What they take is added up once for each number of tokens;
    no share of them, or no token, takes nothing."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def routed(self) -> bool:
        """Whether the weights that are needed are known only once the router has run."""
        return any(gemm.routed for gemm in self)

    @cached_property
    def _known(self) -> dict[int, LinearCost]:
        return {}

    @cached_property
    def _copied(self) -> dict[tuple[int, tuple[float, ...]], Streamed]:
        return {}

    def at(self, n_tokens: int) -> LinearCost:
        """n_tokens: at least one."""
        if n_tokens not in self._known:
            cpu, gpu = [gemm.cpu.at(n_tokens) for gemm in self], [gemm.gpu.at(n_tokens) for gemm in self]
            self._known[n_tokens] = LinearCost(
                sum(alpha_s for alpha_s, _ in cpu), sum(rest_s for _, rest_s in cpu),
                sum(alpha_s for alpha_s, _ in gpu), sum(rest_s for _, rest_s in gpu),
            )  # fmt: skip
        return self._known[n_tokens]

    def streamed(self, share: float, n_tokens: int, gaps: tuple[float, ...] = ()) -> Streamed:
        """What n_tokens tokens have copied where a share is streamed. gaps: of the experts, as cost/experts.py takes
        them."""
        if share <= 0 or n_tokens <= 0:
            return NOT_STREAMED
        key = n_tokens, gaps
        if key not in self._copied:
            shares = [copied(gemm.mul_mat, n_tokens, gaps) for gemm in self]
            self._copied[key] = Streamed(
                sum(gemm.bytes * sum(part) for gemm, part in zip(self, shares, strict=True)),
                sum(gemm.bytes * part.late for gemm, part in zip(self, shares, strict=True)),
                sum(_n_copies(gemm.mul_mat, sum(part), n_tokens) for gemm, part in zip(self, shares, strict=True)),
            )
        whole = self._copied[key]
        return Streamed(share * whole.bytes, share * whole.late_bytes, whole.n_copies)

    def cpu_s(self, share: float, n_tokens: int) -> float:
        linear = self._linear_cost(share, n_tokens)
        return linear.cpu_alpha_s + share * linear.cpu_linear_s

    def gpu_s(self, share: float, n_tokens: int) -> float:
        linear = self._linear_cost(share, n_tokens)
        return linear.gpu_alpha_s + share * linear.gpu_linear_s

    def read_bytes(self, share: float, n_tokens: int) -> float:
        """Bytes of the share of the weights that n_tokens tokens have copied."""
        return self.streamed(share, n_tokens).bytes

    def copy_s(self, line: LinearFit, share: float, n_tokens: int) -> float:
        """Seconds of these copies, one after the other."""
        streamed = self.streamed(share, n_tokens)
        return streamed.n_copies * line.alpha_s + streamed.bytes * line.beta_s_per_byte

    def _linear_cost(self, share: float, n_tokens: int) -> LinearCost:
        return self.at(n_tokens) if share > 0 and n_tokens > 0 else NOTHING


@dataclass(frozen=True)
class BlockContext:
    """What lies around a block: curves of seconds by batch size."""

    inter_block: Curve = NO_TIME  # from the join before to this block's inputs: attention, norms; the mean of all
    inter_block_cpu: Curve = NO_TIME  # of these, in which the CPU works
    whole: Curve | None = None  # as llama.cpp runs the block on the host; None: as the gemms say
    offload: Curve = NO_TIME  # of `whole`, in which llama.cpp copies the weights to the device
    resident: bool = False  # the block's inputs and results are in the device's memory
    copies_if_whole: Curve = NO_TIME  # of such a block: what llama.cpp's device copies take where it stays whole


@dataclass(frozen=True)
class BlockType:
    """A kind of block: its mul-mats, layout and context. Blocks of one type have the same price. Hashed once."""

    block: SplitBlock
    gemms: Gemms
    layout: str = "CPU"  # host buffer type of CC, which the gemms' CPU times are of
    context: BlockContext = BlockContext()
    outputs_only: bool = False  # behind the last attention: of a prompt it sees only tokens whose logits are wanted
    takes_n_g: bool = True  # CC may be streamed for some tokens: it is held in the plain layout too
    use: ExpertUse | None = None  # of the layer's experts, which the device may have some of; None: it may not

    def __post_init__(self) -> None:
        if not isinstance(self.gemms, Gemms):
            object.__setattr__(self, "gemms", Gemms(self.gemms))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.gemms, self.context, self.use, self.layout, self.outputs_only, self.takes_n_g))

    @cached_property
    def in_split(self) -> BlockType:
        """The same type in the split back end, even if nothing of it is on the device."""
        return replace(self, context=replace(self.context, whole=None))

    @cached_property
    def without_context(self) -> BlockType:
        """The type that prices a sliced block's own tasks: of its context only where its inputs are counts."""
        return replace(self, context=BlockContext(resident=self.context.resident))

    def behind(self, behind: Behind) -> BlockType:
        """The same type, computed so with the block before it."""
        return replace(self, block=replace(self.block, behind=behind))

    @cached_property
    def all_host(self) -> Cut:
        """The cut that leaves all of it on the host."""
        return Cut(self.block.extent, 0, 0)

    @property
    def n_expert(self) -> int:
        return self.gemms[0].mul_mat.shape[2]

    def weight_bytes(self, cut: Cut) -> int:
        """Bytes of GG, or of whole experts, on the device."""
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


@dataclass(frozen=True, slots=True)
class Block:
    """Operators that are sliced as one."""

    operators: tuple[int, ...]
    types: tuple[BlockType, ...]  # one for each host layout of CC
    inter_block_share: float = 1.0  # of the mean inter-block time between blocks, what lies before this one

    def in_layout(self, layout: str | None) -> BlockType | None:
        return next((kind for kind in self.types if kind.layout == layout), None)


def block_types(kernels: Kernels, operators: Sequence[Operator], block: SplitBlock) -> tuple[BlockType, ...]:
    """A block in each CPU layout of CC in which all its mul-mats were timed, in alphabetical order. Empty where the
    device cannot compute one of them. Raises ProfileError if the CPU was not timed."""
    members = [operators[i] for i in block.operators]
    on_device = [kernel for operator in members if (kernel := kernels.on_device(operator)) is not None]
    on_host = [kernels.on_host(operator) for operator in members]
    if len(on_device) < len(members):
        return ()
    return tuple(
        BlockType(
            replace(block, operators=()),
            Gemms(
                Gemm(operator.mul_mat, operator.bytes, cpu[layout], gpu)
                for operator, cpu, gpu in zip(members, on_host, on_device, strict=True)
            ),
            layout,
        )
        for layout in sorted(set.intersection(*map(set, on_host)))
    )


def both_sides(
    rates: SliceRates,
    copies: CopySeconds,
    steps: tuple[DeviceStep, ...],
    cpu_s: float,
    rows: int,
    issue_s: float = 0.0,
    late_s: float = 0.0,
) -> BlockTimes:
    """Both sides of a block. If device calls are synchronous, the CPU waits for the device before it begins."""
    interference, send_s, join_s = rates.interference_at(rows), copies.send_s, copies.join_s
    if rates.blocking:
        wait_s = sum(step.copy_s + step.launch_s + step.gpu_s for step in steps)
        return BlockTimes(0.0, send_s, cpu_s, (), join_s, late_s, issue_s, 0.0, interference, wait_s)
    return BlockTimes(0.0, send_s, cpu_s, steps, join_s, late_s, issue_s, 0.0, interference)


def hot_times(kind: BlockType, rates: SliceRates, n_hot: int, n_tokens: int, n_outputs: int = 1) -> BlockTimes:
    """The tasks of a block of which the device has so many experts whole, without the inter-block time before it.

    The CPU computes misses, one row each: of one token it reads their experts; of a prompt it reads those that are
    missed at all, or multiplies, whichever takes longer. How many miss differs from token to token, and the later side
    decides, which takes longer than the average number of misses would. Where experts follow, some misses are fetched,
    as many as the link brings, and the device computes, while the CPU computes the others; and of a token that misses
    few, the CPU computes some hits, so that both sides end together. Of several tokens the device then computes no row
    in vain, and each comes back by itself, half of them at least while others are computed. Of a token it computes as
    many rows as may be hits, whether they are or not: those in vain read a hit's expert once more.
    """
    rows = n_outputs if kind.outputs_only else n_tokens
    if rows <= 0:
        return BlockTimes(0.0, 0.0, 0.0, (), 0.0)
    use, n_expert, n_used = kind.use or experts_alike(kind.n_expert), kind.n_expert, kind.gemms[0].mul_mat.n_expert_used
    n_rows, miss = min(n_used, n_hot - use.follows), 1.0 - use.coverage(n_hot, n_tokens)
    packed = use.follows and rows > 1
    copies = _hot_copies(kind, rates, n_hot, rows, miss, packed, n_rows)
    behind_s, launch_s = copies.staged_out_s, copies.launch_s + copies.staged_in_s
    each_s = rates.weights.seconds(sum(gemm.bytes for gemm in kind.gemms) / n_expert)

    def times_of(cpu_s: float, gpu_s: float, more_s: float = 0.0) -> BlockTimes:
        late = copies._replace(join_s=copies.join_s + more_s)
        return both_sides(rates, late, (DeviceStep(0.0, gpu_s + behind_s, launch_s),), cpu_s, rows)

    if rows > 1:
        cpu_s, left = _misses_of_batch(kind, n_hot, rows, miss, packed, each_s, behind_s)
        return times_of(cpu_s, kind.gemms.gpu_s(1.0 - left * miss if packed else n_rows / n_used, rows))

    def sides(by_cpu: int, fetched: int) -> tuple[float, float]:
        """Seconds of the CPU's rows, and of the others, behind what is fetched."""
        gpu_s = fetched * each_s + kind.gemms.gpu_s(max(1, n_used - by_cpu) / n_used, 1)
        return kind.gemms.cpu_s(by_cpu / n_used, 1), gpu_s

    def fastest(n_missed: int) -> tuple[float, float, float]:
        """Seconds of a token that misses so many, and of these on either side."""
        least = max(n_missed, n_used - n_rows)  # rows that the CPU computes where nothing is fetched
        shares = [(least, 0)]
        if use.follows:
            shares += [(by_cpu, 0) for by_cpu in range(least + 1, n_used + 1)]
            shares += [(least - x, x) for x in range(1, min(n_missed, n_hot - 1, least - (n_used - n_rows)) + 1)]
        return min((alone_seconds(times_of(*both)), *both) for both in starmap(sides, shares))

    odds = miss_odds(n_used, 1.0 - miss, use.spread or 0.0)
    taken = [fastest(n_missed) for n_missed in range(n_used + 1)]
    expected_s, cpu_s, gpu_s = (
        sum(p * s for p, s in zip(odds, each, strict=True)) for each in zip(*taken, strict=True)
    )
    return times_of(cpu_s, gpu_s, max(0.0, expected_s - alone_seconds(times_of(cpu_s, gpu_s))))


def _hot_copies(
    kind: BlockType, rates: SliceRates, n_hot: int, rows: int, miss: float, packed: bool, n_rows: int
) -> CopySeconds:
    """Device copies of such a block; the biases of experts in slots are there since before. miss: share of its experts'
    uses; packed: the device computes no row in vain; n_rows: else of each token, what it computes."""
    block, hot_block, link, n_used = kind.block, kind.hot(n_hot), rates.transfer, kind.gemms[0].mul_mat.n_expert_used
    returned = block.returned + block.returned_each * block.extent  # of all experts of a token
    n_up, n_down = hot_block.upload_bytes(hot_block.extent, rows), hot_block.download_bytes(hot_block.extent, rows)
    joined, n_biases, n_copies = n_down // F32 + miss * returned * rows, 0, 2  # slots and weights are one
    n_numbers = n_rows * rows * (2 if hot_block.n_summed(rows) > 1 else 1)
    if packed:
        n_down, joined, n_biases = returned * rows * F32 // 2, returned * rows, block.biases * kind.n_expert * F32
        n_numbers = n_used * rows * (3 if block.biases else 2)
        n_copies = 4 + len(kind.gemms) if block.biases else 3
    if kind.context.resident:
        n_up, n_copies = n_numbers * F32, n_copies - 1
        if not packed:
            n_up, n_down, joined = 2 * n_rows * rows * F32, 0, miss * returned * rows
    copies = rates.copy_seconds(n_up + n_biases, n_down, joined, 1, n_copies)
    if not kind.context.resident:
        return copies
    # input, experts and routing weights come down in copies of their own with one wait; what the host has goes up, is
    # launched and added
    send_s = copies.send_s + link.copy_out.seconds((block.sent + n_used) * rows * F32) + 2 * link.copy_in.alpha_s
    join_s = copies.join_s + link.copy_in.seconds(returned // block.summed * rows * F32) + 2 * link.split_s
    return copies._replace(send_s=send_s, join_s=join_s)


def _misses_of_batch(
    kind: BlockType, n_hot: int, rows: int, miss: float, fetches: bool, each_s: float, behind_s: float
) -> tuple[float, float]:
    """(seconds of the missed experts of several tokens, share of their rows that the CPU computes). fetches: the link
    brings those with the most rows, each in each_s; the device computes them, and copies their results for behind_s."""
    if miss <= 0:
        return 0.0, 1.0
    mul_mat, linear = kind.gemms[0].mul_mat, kind.gemms.at(rows)
    expert_s = kind.gemms.at(1).cpu_linear_s / mul_mat.n_expert_used
    left = (kind.use or experts_alike(kind.n_expert)).left(mul_mat, n_hot, rows)
    n_missed, _ = left[0]

    def shared(n_experts: float, of_rows: float) -> tuple[float, float, float]:
        """(seconds of all, of the CPU and the link where the CPU has so much to do, the share of the rows). It reads
        the experts, or multiplies, whichever takes longer."""
        cpu_s = linear.cpu_alpha_s + max(of_rows * miss * linear.cpu_linear_s, n_experts * expert_s)
        both_s = max(cpu_s if n_experts > 0 else 0.0, (n_missed - n_experts) * each_s)
        return max(both_s, kind.gemms.gpu_s(1.0 - of_rows * miss, rows) + behind_s), both_s, of_rows

    _, both_s, of_rows = min(starmap(shared, left if fetches else left[:1]))
    return both_s, of_rows


def inter_block_times(kind: BlockType, n_tokens: int) -> tuple[float, float]:
    """Seconds between two blocks, in the mean, and of these those in which the CPU works."""
    inter_block_s = interpolate(kind.context.inter_block, n_tokens)
    return inter_block_s, min(inter_block_s, interpolate(kind.context.inter_block_cpu, n_tokens))


def slice_times(
    kind: BlockType, rates: SliceRates, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1
) -> BlockTimes:
    """The tasks of a block in a pass over n_tokens tokens, of which n_g use the CC slice on the device (CG'), and
    n_outputs give logits, without the inter-block time before it.

    Where nothing is on the device llama.cpp runs the block where it is, and there is nothing to send or to join; nor
    is there where all is GG. A block that it offloads takes the link from what is streamed. Hot experts take no part in
    n_g.
    """
    if cut.n_hot:
        return hot_times(kind, rates, cut.n_hot, n_tokens, n_outputs)
    rows = n_outputs if kind.outputs_only else n_tokens
    if kind.outputs_only or not kind.takes_n_g:
        n_g = 0
    prime = cut.cc > 0 and n_g > 0
    if cut.is_whole and not prime:
        return _whole_times(kind, rates, n_tokens, rows)
    if rows <= 0:
        return BlockTimes(0.0, 0.0, 0.0, (), 0.0)
    extent = cut.extent
    cc, cg, gg = cut.cc / extent, cut.cg / extent, cut.gg / extent
    block = kind.block

    # of CC too what all tokens use, not only the last n_g
    gaps = () if kind.use is None else kind.use.gaps
    parts = [kind.gemms.streamed(share, rows, gaps) for share in (cg, cc if prime else 0.0)]
    streamed, late_bytes = sum(part.bytes for part in parts), sum(part.late_bytes for part in parts)
    copy_s = rates.weights.seconds(streamed)
    late_s = copy_s * late_bytes / streamed if streamed else 0.0
    issue_s = 0.0  # of the thread, to ask for the copies: each of them once, and once for each further piece
    if streamed and rates.issue is not None and not rates.blocking:
        n_asked = sum(part.n_copies for part in parts) + max(0.0, streamed / rates.piece_bytes - 1)
        issue_s = n_asked * rates.issue.alpha_s + streamed * rates.issue.beta_s_per_byte

    # what is streamed is queued behind GG, so that the link's latency is waited for once
    streams = cg > 0 or prime
    n_steps = (gg > 0) + streams
    copies, wait_s = NO_COPY, 0.0
    if gg < 1 and kind.context.resident:
        copies, wait_s = _resident_copy(kind, rates, cut, rows, rows - n_g, n_steps)
    elif gg < 1:
        elements = extent if prime else cut.cg + cut.gg
        n_device = n_g if cut.is_whole else rows  # tokens that the device computes something of
        n_up, n_down = block.upload_bytes(elements, n_device, rows), block.download_bytes(elements, n_device, rows)
        copies = rates.copy_seconds(n_up, n_down, n_down // F32, n_steps)
    launch_s, behind_s = copies.launch_s + copies.staged_in_s, copies.staged_out_s
    steps: tuple[DeviceStep, ...] = ()
    if streams:
        gpu_s = kind.gemms.gpu_s(cg, rows) + kind.gemms.gpu_s(cc, n_g) + behind_s
        steps = (DeviceStep(copy_s, gpu_s, 0.0 if gg > 0 else launch_s),)
    if gg > 0:
        gpu_s = kind.gemms.gpu_s(gg, rows) + (0.0 if streams else behind_s)
        steps = (DeviceStep(0.0, gpu_s, launch_s), *steps)
    cpu_s = wait_s + kind.gemms.cpu_s(cc, rows - n_g)
    return both_sides(rates, copies, steps, cpu_s, rows, issue_s, late_s)


def _resident_copy(
    kind: BlockType, rates: SliceRates, cut: Cut, rows: int, n_host: int, n_steps: int
) -> tuple[CopySeconds, float]:
    """(copies of a block that lives on the device, seconds that the thread then waits for its input): the device reads
    the input where it is; two launches, as it adds what the thread sends, and llama.cpp goes on. n_host: tokens that
    the thread computes CC of."""
    block, link = kind.block, rates.transfer
    send_s, join_s, wait_s = n_steps * link.launch_issue_s, link.split_s, 0.0
    if cut.cc > 0:  # else nothing crosses
        input_s = link.copy_out.seconds(block.upload_bytes(cut.extent, n_host, rows))
        if rates.staged:  # the device is launched while the thread's input is on its way to pinned memory
            wait_s = max(0.0, input_s - send_s)
        else:
            send_s += input_s
        join_s += link.copy_in.seconds(block.download_bytes(cut.cc, n_host)) + link.split_s
    return CopySeconds(send_s, join_s, link.launch_s), wait_s


def _whole_times(kind: BlockType, rates: SliceRates, n_tokens: int, rows: int) -> BlockTimes:
    """The tasks of a block of which nothing is on the device."""
    whole_s = kind.gemms.cpu_s(1.0, rows) if kind.context.whole is None else interpolate(kind.context.whole, n_tokens)
    away_s = interpolate(kind.context.copies_if_whole, n_tokens) if kind.context.resident else 0.0
    copy_s = min(whole_s, interpolate(kind.context.offload, n_tokens)) if kind.context.whole is not None else 0.0
    if copy_s > 0:
        offload = (DeviceStep(copy_s, whole_s - copy_s),)
        return BlockTimes(away_s, 0.0, 0.0, offload, 0.0, interference=rates.interference_at(n_tokens), offloaded=True)
    return BlockTimes(away_s, 0.0, whole_s, (), 0.0, interference=rates.interference_at(n_tokens))


class Pricing:
    """How slices are run: what the device and the link cost, and how far copies run ahead."""

    def __init__(self, rates: SliceRates, streaming: StreamSettings = StreamSettings()) -> None:  # noqa: B008 - frozen
        self.rates, self.streaming = rates, streaming
        self.inter_block_times = cache(inter_block_times)
        self.tasks = cache(self._tasks)
        self.seconds = cache(self._seconds)

    def with_slots(self, n_slots: int) -> Pricing:
        """The same with a ring of so many slots; tasks are the same."""
        other = Pricing(self.rates, replace(self.streaming, n_slots=n_slots))
        other.inter_block_times, other.tasks = self.inter_block_times, self.tasks
        return other

    def block_times(
        self, kind: BlockType, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1, inter_block_share: float = 1.0
    ) -> BlockTimes:
        """The tasks of a block after its share of the inter-block time."""
        inter_block_s, inter_block_cpu_s = self.inter_block_times(kind, n_tokens)
        times = slice_times(kind, self.rates, cut, n_tokens, n_g, n_outputs)
        return times.behind(inter_block_share * inter_block_s, inter_block_share * inter_block_cpu_s)

    def _seconds(self, kind: BlockType, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> float:
        """Steady-state seconds per block."""
        inter_block_s, inter_block_cpu_s = self.inter_block_times(kind, n_tokens)
        sliced = not cut.is_whole or (n_g > 0 and kind.takes_n_g and not kind.outputs_only)
        times, times_s = self.tasks(kind.without_context if sliced else kind, cut, n_tokens, n_g, n_outputs)
        if times_s is None:
            return own_cycle_seconds(
                times, times.inter_block_s + inter_block_s, times.inter_block_cpu_s + inter_block_cpu_s, self.streaming
            )
        return inter_block_s + times_s

    def _tasks(
        self, kind: BlockType, cut: Cut, n_tokens: int, n_g: int, n_outputs: int
    ) -> tuple[BlockTimes, float | None]:
        """(a block without a inter-block time, its seconds; None: they depend on the inter-block time, in which its
        copies go on)."""
        times = slice_times(kind, self.rates, cut, n_tokens, n_g, n_outputs)
        return times, None if runs_ahead([times], self.streaming) else cycle_seconds([times], self.streaming)
