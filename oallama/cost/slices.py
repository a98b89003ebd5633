"""Durations of one sliced block's tasks: ScheInfer Eq. 3 and 4, and Eq. 15 with n_g, from a profile.

All mul-mats of a block (cost/blocks.py) are cut at the same element: CC first, then CG, GG last. `slice_times` models
the split back end: it sends inputs once, runs GG first, copies CG of all the block's mul-mats together into one slot of
the ring, runs CG when it has arrived, and joins both sides once. Instead of slices the device may hold the most used
experts of a block whole (`hot_times`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import starmap
from typing import NamedTuple

from oallama.core.types import PLAIN_LAYOUT, MulMat, Operator, StreamSettings
from oallama.cost.blocks import F32, Relation, SplitBlock
from oallama.cost.experts import ExpertCoverage, copied, experts_alike, miss_odds
from oallama.cost.kernels import NO_TIME, Curve, Kernel, Kernels, added, interpolate
from oallama.cost.rates import NO_COPY, CopySeconds, SliceRates
from oallama.cost.timeline import (
    NO_TASKS,
    BlockTimes,
    DeviceTask,
    alone_seconds,
    cycle_seconds,
    runs_ahead,
    single_block_cycle_seconds,
)


class Cut(NamedTuple):
    """A block's slices, elements along its axis."""

    cc: int
    cg: int
    gg: int
    n_hot: int = 0  # number of hot experts; then cc is the whole extent

    @property
    def extent(self) -> int:
        return self.cc + self.cg + self.gg

    @property
    def is_uncut(self) -> bool:
        """CPU-only: the block is not sliced."""
        return self.cg == self.gg == self.n_hot == 0


@dataclass(frozen=True, slots=True)
class Gemm:
    """One mul-mat of a block, with its kernels on both sides."""

    mul_mat: MulMat
    bytes: int  # of the whole weight
    cpu: Kernel
    gpu: Kernel


class LinearCost(NamedTuple):
    """Seconds of mul-mats at one batch size (Eq. 4): a share s of their weights takes alpha + s * linear."""

    cpu_alpha_s: float
    cpu_linear_s: float
    gpu_alpha_s: float
    gpu_linear_s: float


class Streamed(NamedTuple):
    """Copies to the device for a batch, of mul-mats that are streamed."""

    bytes: float
    late_bytes: float  # the part of them that is known only once the router has run
    n_copies: float  # one per weight; of experts one per group of adjacent ones; the same for any share


NOT_STREAMED = Streamed(0.0, 0.0, 0.0)


def _n_copies(mul_mat: MulMat, share: float, n_tokens: int) -> float:
    """Number of copies of this share of the experts: adjacent experts are one copy. Those of a single token are assumed
    not to be adjacent."""
    n_expert = mul_mat.shape[2] if mul_mat.routed else 1
    return n_expert * share if n_tokens == 1 else share * (1.0 + (n_expert - 1) * (1.0 - share))


class Gemms(tuple[Gemm, ...]):
    """Mul-mats of a block, which have the same cut and run one after another. Their times are added up once for each
    number of tokens. An empty share, or no tokens, takes 0 s."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def _known(self) -> dict[int, LinearCost]:
        return {}

    @cached_property
    def _copied(self) -> dict[tuple[int, tuple[float, ...]], Streamed]:
        return {}

    def at(self, n_tokens: int) -> LinearCost:
        """Seconds at n_tokens (at least 1)."""
        if n_tokens not in self._known:
            cpu, gpu = [gemm.cpu.at(n_tokens) for gemm in self], [gemm.gpu.at(n_tokens) for gemm in self]
            self._known[n_tokens] = LinearCost(
                sum(alpha_s for alpha_s, _ in cpu), sum(rest_s for _, rest_s in cpu),
                sum(alpha_s for alpha_s, _ in gpu), sum(rest_s for _, rest_s in gpu),
            )  # fmt: skip
        return self._known[n_tokens]

    def streamed(self, share: float, n_tokens: int, gaps: tuple[float, ...] = ()) -> Streamed:
        """Copies for n_tokens tokens if a share of each weight is streamed. gaps: as in cost/experts.py."""
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
        if share <= 0 or n_tokens <= 0:
            return 0.0
        linear = self.at(n_tokens)
        return linear.cpu_alpha_s + share * linear.cpu_linear_s

    def gpu_s(self, share: float, n_tokens: int) -> float:
        if share <= 0 or n_tokens <= 0:
            return 0.0
        linear = self.at(n_tokens)
        return linear.gpu_alpha_s + share * linear.gpu_linear_s


@dataclass(frozen=True)
class BlockContext:
    """The context of a block: curves of seconds by batch size."""

    inter_block: Curve = NO_TIME  # from the last join to this block's inputs (attention, norms): the mean of all blocks
    inter_block_cpu: Curve = NO_TIME  # the part of inter_block in which the CPU works
    host_attention: Curve = NO_TIME  # added to both if the split back end runs the block though it is not sliced
    whole: Curve | None = None  # of the unsliced block under llama.cpp on the host; None: the sum of the gemms
    offload: Curve = NO_TIME  # the part of `whole` in which llama.cpp copies the weights to the device
    resident: bool = False  # the block's inputs and results are in the device's memory
    host_input: bool = False  # of a resident block: its input is in host memory, and is copied to the device
    copies_if_whole: Curve = NO_TIME  # of a resident block: llama.cpp's device copies if it is not sliced


@dataclass(frozen=True)
class BlockType:
    """A kind of block: its mul-mats, layout and context. Blocks of one type have the same price. Hashed once."""

    block: SplitBlock
    gemms: Gemms
    layout: str = PLAIN_LAYOUT  # host buffer type of CC, which the gemms' CPU times are of
    context: BlockContext = BlockContext()
    outputs_only: bool = False  # after the last attention: it computes only tokens whose logits are wanted
    takes_n_g: bool = True  # CC may be streamed for some tokens: it is in the plain layout, or in that one too
    use: ExpertCoverage | None = None  # use of the layer's experts; None: the block may not have hot experts
    gaps: tuple[float, ...] = ()  # as in cost/experts.py, of experts that are streamed

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.gemms, self.context, self.use, self.layout, self.outputs_only, self.takes_n_g))

    @cached_property
    def in_split(self) -> BlockType:
        """The same type, run by the split back end even if it is not sliced. The split back end then runs all blocks
        around attention, too, so that llama.cpp does not offload attention."""
        context = self.context
        inter_block = added(context.inter_block, context.host_attention)
        inter_block_cpu = added(context.inter_block_cpu, context.host_attention)
        context = replace(
            context, whole=None, inter_block=inter_block, inter_block_cpu=inter_block_cpu, host_attention=NO_TIME
        )
        return replace(self, context=context)

    @cached_property
    def without_context(self) -> BlockType:
        """The same type without its context, except `resident`: enough to price a sliced block's own tasks."""
        return replace(self, context=BlockContext(resident=self.context.resident))

    def with_relation(self, relation: Relation) -> BlockType:
        """The same type with another relation to the block before it (cost/blocks.py, Relation)."""
        return replace(self, block=replace(self.block, relation=relation))

    @cached_property
    def all_host(self) -> Cut:
        """The cut with everything on the host."""
        return Cut(self.block.extent, 0, 0)

    @property
    def n_expert(self) -> int:
        return self.gemms[0].mul_mat.shape[2]

    def weight_bytes(self, cut: Cut) -> int:
        """Bytes of GG, or of hot experts, on the device."""
        if cut.n_hot:
            return sum(gemm.bytes // self.n_expert for gemm in self.gemms) * cut.n_hot
        return self.block.weight_bytes(cut.gg)

    def hot(self, n_hot: int) -> SplitBlock:
        """The block as the device computes it with n_hot hot experts."""
        n_used = self.gemms[0].mul_mat.n_expert_used
        return self.block.with_rows(min(n_used, n_hot), n_used)


@dataclass(frozen=True, slots=True)
class Block:
    """Operators that are sliced together."""

    operators: tuple[int, ...]
    types: tuple[BlockType, ...]  # one for each host layout of CC
    inter_block_share: float = 1.0  # inter-block time before it, relative to the mean of all blocks

    def in_layout(self, layout: str | None) -> BlockType | None:
        return next((block_type for block_type in self.types if block_type.layout == layout), None)


def block_types(kernels: Kernels, operators: Sequence[Operator], block: SplitBlock) -> tuple[BlockType, ...]:
    """The types of a block: one for each CPU layout in which all its mul-mats were timed, in alphabetical order. Empty
    if the device cannot compute one of them. Raises ProfileError if the CPU was not timed."""
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
    steps: tuple[DeviceTask, ...],
    cpu_s: float,
    rows: int,
    issue_s: float = 0.0,
    late_s: float = 0.0,
) -> BlockTimes:
    """Tasks of both sides of a block. If device calls are synchronous, the thread waits for the device before CC."""
    return BlockTimes(
        send_s=copies.send_s,
        cpu_s=cpu_s,
        steps=() if rates.blocking else steps,
        join_s=copies.join_s,
        late_s=late_s,
        issue_s=issue_s,
        interference=rates.interference_at(rows),
        wait_s=sum(step.copy_s + step.launch_s + step.gpu_s for step in steps) if rates.blocking else 0.0,
    )


def hot_times(block_type: BlockType, rates: SliceRates, n_hot: int, n_tokens: int, n_outputs: int = 1) -> BlockTimes:
    """The tasks of a block with n_hot hot experts, without the inter-block time before it.

    The CPU computes misses, one row each. For one token it reads the missed experts; for a prompt it takes the longer
    of reading all missed experts and of multiplying. The number of misses differs from token to token, and the slower
    side decides, so the mean time is longer than the time of the mean number of misses.

    If experts follow the conversation, the device fetches and computes some misses, as many as the link brings while
    the CPU computes the others. Of a token with few misses the CPU computes some hits, so that both sides end together.
    For several tokens the device computes no spare rows. It takes several launches, and copies the rows of each back
    before the next. For one token it computes as many rows as may be hits; a spare row reads a hit's expert once more.
    """
    rows = n_outputs if block_type.outputs_only else n_tokens
    if rows <= 0:
        return NO_TASKS
    use, n_used = block_type.use or experts_alike(block_type.n_expert), block_type.gemms[0].mul_mat.n_expert_used
    n_rows, miss = min(n_used, n_hot - use.follows), 1.0 - use.coverage(n_hot, n_tokens)
    packed = use.follows and rows > 1
    copies = _hot_copies(block_type, rates, n_hot, rows, miss, packed, n_rows)
    staged_out_s, launch_s = copies.staged_out_s, copies.launch_s + copies.staged_in_s

    def times_of(cpu_s: float, gpu_s: float, more_s: float = 0.0) -> BlockTimes:
        late = copies._replace(join_s=copies.join_s + more_s)
        return both_sides(rates, late, (DeviceTask(0.0, gpu_s + staged_out_s, launch_s),), cpu_s, rows)

    if rows > 1:
        divided = _divided_misses(block_type, rates, use, n_hot, rows, miss)
        if not packed:
            return times_of(next(divided)[0], block_type.gemms.gpu_s(n_rows / n_used, rows))
        return times_of(*min(divided, key=lambda sides: (max(sides[0], sides[1] + staged_out_s), sides)))

    fetch_s, request_s = _fetch_seconds(block_type, rates)

    def sides(by_cpu: int, fetched: int) -> tuple[float, float]:
        """(seconds of the thread: requests and its rows; of the device's rows after their fetches)."""
        gpu_s = fetched * fetch_s + block_type.gemms.gpu_s(max(1, n_used - by_cpu) / n_used, 1)
        return fetched * request_s + block_type.gemms.cpu_s(by_cpu / n_used, 1), gpu_s

    def fastest(n_missed: int) -> tuple[float, float, float]:
        """(least seconds of a token with n_missed misses, the CPU's and the device's part of them)."""
        least = max(n_missed, n_used - n_rows)  # rows that the CPU computes if none is fetched
        shares = [(least, 0)]
        if use.follows:
            shares += [(by_cpu, 0) for by_cpu in range(least + 1, n_used + 1)]
            shares += [(least - x, x) for x in range(1, min(n_missed, n_hot - 1, least - (n_used - n_rows)) + 1)]
        return min((alone_seconds(times_of(*side_times)), *side_times) for side_times in starmap(sides, shares))

    odds = miss_odds(n_used, 1.0 - miss, use.spread or 0.0)
    fastest_by_misses = [fastest(n_missed) for n_missed in range(n_used + 1)]
    expected_s, cpu_s, gpu_s = (
        sum(p * s for p, s in zip(odds, values, strict=True)) for values in zip(*fastest_by_misses, strict=True)
    )
    return times_of(cpu_s, gpu_s, max(0.0, expected_s - alone_seconds(times_of(cpu_s, gpu_s))))


def _hot_copies(
    block_type: BlockType, rates: SliceRates, n_hot: int, rows: int, miss: float, packed: bool, n_rows: int
) -> CopySeconds:
    """Copies of a block with hot experts; biases of experts in slots are already on the device. miss: share of the uses
    that miss; packed: the device computes no spare rows; n_rows: rows per token that it computes otherwise."""
    block, hot_block, link = block_type.block, block_type.hot(n_hot), rates.transfer
    n_used = block_type.gemms[0].mul_mat.n_expert_used
    returned = block.returned + block.returned_each * block.extent  # of all experts of a token
    n_up, n_down = hot_block.upload_bytes(hot_block.extent, rows), hot_block.download_bytes(hot_block.extent, rows)
    joined, n_biases, n_copies = n_down // F32 + miss * returned * rows, 0, 2  # slots and weights are one
    n_numbers = n_rows * rows * (2 if hot_block.n_summed(rows) > 1 else 1)
    if packed:
        n_down, joined, n_biases = returned * rows * F32, returned * rows, block.biases * block_type.n_expert * F32
        n_numbers = n_used * rows * (3 if block.biases else 2)
        n_copies = 4 + len(block_type.gemms) if block.biases else 3
    if block_type.context.resident:
        n_up, n_copies = n_numbers * F32, n_copies - 1
        if not packed:
            n_up, n_down, joined = 2 * n_rows * rows * F32, 0, miss * returned * rows
    copies = rates.copy_seconds(n_up + n_biases, n_down, joined, 1, n_copies)
    if not block_type.context.resident:
        return copies
    # down: input, ids and routing weights, three copies and one wait; up: the host's sum, which the device adds
    send_s = copies.send_s + link.copy_out.seconds((block.sent + n_used) * rows * F32) + 2 * link.copy_in.alpha_s
    join_s = copies.join_s + link.copy_in.seconds(returned // block.summed * rows * F32) + 2 * link.split_s
    return copies._replace(send_s=send_s, join_s=join_s)


def _fetch_seconds(block_type: BlockType, rates: SliceRates) -> tuple[float, float]:
    """(seconds of the link, of the thread that requests it) to fetch a missed expert."""
    n_bytes = sum(gemm.bytes for gemm in block_type.gemms) / block_type.n_expert
    return rates.weights.seconds(n_bytes), len(block_type.gemms) * rates.issue_s


def _divided_misses(
    block_type: BlockType, rates: SliceRates, use: ExpertCoverage, n_hot: int, rows: int, miss: float
) -> Iterator[tuple[float, float]]:
    """(seconds of the thread: requests and the CPU's rows; of the device) for several tokens, if it fetches 0, 1, … all
    of the missed experts. use: of the layer's experts; miss: share of the rows that miss.

    The device computes hits first, then fetched experts, those with the most rows, in launches of half of the slots
    that these replace, while experts of the next launch are copied (split/experts.h). If the batch uses experts in
    these slots too, theirs are computed first. So a launch more has its start-up times, and the last one waits for the
    link.
    """
    block, mul_mat, linear = block_type.block, block_type.gemms[0].mul_mat, block_type.gemms.at(rows)
    fetch_s, request_s = _fetch_seconds(block_type, rates)
    remaining = use.misses_by_rows(mul_mat, n_hot, rows) if miss > 0 else [(0.0, 0.0)]
    # a row is gathered and gets its biases
    row_s = 2 * (block.sent - mul_mat.n_expert_used + block.biases) * F32 * rates.device_s_per_byte
    n_idle = n_hot - sum(use.used(mul_mat, rows)[:n_hot])  # slots whose experts the batch does not use

    def computed_by_cpu_s(n_experts: float, of_rows: float) -> float:
        """Seconds of the CPU for n_experts experts with of_rows of the rows that miss: their share of the seconds of
        all experts, in the batch that gives each expert as many rows. With few rows each, a row may take longer."""
        if n_experts <= 0:
            return 0.0
        share = n_experts / block_type.n_expert
        batch = max(1.0, of_rows * miss * rows / share)  # tokens
        n_tokens = round(batch)
        return linear.cpu_alpha_s + share * block_type.gemms.at(n_tokens).cpu_linear_s * batch / n_tokens

    def computed_by_device_s(of_rows: float) -> float:
        """Seconds of the device for this share of all rows."""
        return block_type.gemms.gpu_s(of_rows, rows) + of_rows * rows * mul_mat.n_expert_used * row_s

    def sides(n_experts: float, of_rows: float) -> tuple[float, float]:
        """The same if the CPU computes n_experts experts with of_rows of the rows that miss."""
        cpu_s, n_fetched = computed_by_cpu_s(n_experts, of_rows), remaining[0][0] - n_experts
        rows_s = computed_by_device_s(1.0 - of_rows * miss)
        if n_fetched <= 0:
            return cpu_s, rows_s
        half = max(1.0, min(n_fetched, max(n_idle, (n_hot + 1) / 2)) / 2)
        waits = half > n_idle  # for hits in the slots that are replaced
        n_more = n_fetched / half + 2 * waits  # launches
        first_s = waits * computed_by_device_s(1.0 - miss) * half / n_hot
        last_s = (1.0 - of_rows) * miss * linear.gpu_linear_s * min(1.0, half / n_fetched)
        thread_s = n_fetched * request_s + n_more * (rates.transfer.launch_issue_s + rates.issue_s)
        rows_s += n_more * (rates.transfer.launch_s + rates.transfer.copy_out.alpha_s + linear.gpu_alpha_s)
        return thread_s + cpu_s, max(rows_s, first_s + n_fetched * fetch_s + last_s)

    return (sides(*share) for share in remaining)


def inter_block_times(block_type: BlockType, n_tokens: int) -> tuple[float, float]:
    """(mean seconds between two blocks, the part of them in which the CPU works)."""
    inter_block_s = interpolate(block_type.context.inter_block, n_tokens)
    return inter_block_s, min(inter_block_s, interpolate(block_type.context.inter_block_cpu, n_tokens))


def slice_times(
    block_type: BlockType, rates: SliceRates, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1
) -> BlockTimes:
    """The tasks of a block in a pass over n_tokens tokens, without the inter-block time before it. n_g: tokens for
    which the device computes CC (CG'); n_outputs: tokens whose logits are wanted.

    llama.cpp runs a block that is not sliced, without sends and joins; a block that is all GG has none either. A block
    that llama.cpp offloads takes the link from streamed slices. Blocks with hot experts have no n_g.
    """
    if cut.n_hot:
        return hot_times(block_type, rates, cut.n_hot, n_tokens, n_outputs)
    rows = n_outputs if block_type.outputs_only else n_tokens
    if block_type.outputs_only or not block_type.takes_n_g:
        n_g = 0
    prime = cut.cc > 0 and n_g > 0
    if cut.is_uncut and not prime:
        return _whole_times(block_type, rates, n_tokens, rows)
    if rows <= 0:
        return NO_TASKS
    extent = cut.extent
    cc, cg, gg = cut.cc / extent, cut.cg / extent, cut.gg / extent
    block = block_type.block

    # of CC, too, the experts that all tokens use, not only the last n_g
    parts = [block_type.gemms.streamed(share, rows, block_type.gaps) for share in (cg, cc if prime else 0.0)]
    streamed, late_bytes = sum(part.bytes for part in parts), sum(part.late_bytes for part in parts)
    copy_s = rates.weights.seconds(streamed)
    late_s = copy_s * late_bytes / streamed if streamed else 0.0
    issue_s = 0.0  # of the thread, to request the copies: once per copy, and once per further piece
    if streamed and rates.issue is not None and not rates.blocking:
        n_requests = sum(part.n_copies for part in parts) + max(0.0, streamed / rates.piece_bytes - 1)
        issue_s = n_requests * rates.issue.alpha_s + streamed * rates.issue.beta_s_per_byte

    # CG is queued after GG, so that the thread waits for the link's latency once
    streams = cg > 0 or prime
    n_steps = (gg > 0) + streams
    copies, wait_s = NO_COPY, 0.0
    if gg < 1 and block_type.context.resident:
        copies, wait_s = _resident_copy(block_type, rates, cut, rows, rows - n_g, n_steps)
    elif gg < 1:
        elements = extent if prime else cut.cg + cut.gg
        n_device = n_g if cut.is_uncut else rows  # tokens that the device computes a part of
        n_up, n_down = block.upload_bytes(elements, n_device, rows), block.download_bytes(elements, n_device, rows)
        copies = rates.copy_seconds(n_up, n_down, n_down // F32, n_steps)
    host_bytes, device_bytes = block.weighed_bytes(rows)
    host_sum_s, device_sum_s = host_bytes * rates.cpu_s_per_byte, device_bytes * rates.device_s_per_byte
    if block.after and not device_bytes:
        after_s = rates.device_s_per_byte if block_type.context.resident else rates.cpu_s_per_byte
        copies = copies._replace(join_s=copies.join_s + rows * block.after * after_s)
    launch_s, staged_out_s = copies.launch_s + copies.staged_in_s, copies.staged_out_s
    steps: tuple[DeviceTask, ...] = ()
    if streams:
        gpu_s = block_type.gemms.gpu_s(cg, rows) + block_type.gemms.gpu_s(cc, n_g) + staged_out_s
        gpu_s += ((cg > 0) * rows + prime * n_g) * device_sum_s
        steps = (DeviceTask(copy_s, gpu_s, 0.0 if gg > 0 else launch_s),)
    if gg > 0:
        gpu_s = block_type.gemms.gpu_s(gg, rows) + rows * device_sum_s + (0.0 if streams else staged_out_s)
        steps = (DeviceTask(0.0, gpu_s, launch_s), *steps)
    cpu_s = wait_s + block_type.gemms.cpu_s(cc, rows - n_g) + (cc > 0) * (rows - n_g) * host_sum_s
    return both_sides(rates, copies, steps, cpu_s, rows, issue_s, late_s)


def _resident_copy(
    block_type: BlockType, rates: SliceRates, cut: Cut, rows: int, n_host: int, n_steps: int
) -> tuple[CopySeconds, float]:
    """(copies of a block that lives on the device, seconds that the thread waits for its input). The device reads the
    input in place, and adds the host's part of the result in a second launch. n_host: tokens of CC."""
    block, link = block_type.block, rates.transfer
    send_s, join_s, wait_s = n_steps * link.launch_issue_s, link.split_s, 0.0
    if cut.cc > 0:  # else no activations are copied
        input_s = link.copy_out.seconds(block.upload_bytes(cut.extent, n_host, rows))
        if rates.staged:  # the device is launched while the thread's input is on its way to pinned memory
            wait_s = max(0.0, input_s - send_s)
        else:
            send_s += input_s
        join_s += link.copy_in.seconds(block.download_bytes(cut.cc, n_host)) + link.split_s
    return CopySeconds(send_s, join_s, link.launch_s), wait_s


def _whole_times(block_type: BlockType, rates: SliceRates, n_tokens: int, rows: int) -> BlockTimes:
    """The tasks of a block that is not sliced."""
    context, copy_s = block_type.context, 0.0
    if context.whole is None:
        whole_s = block_type.gemms.cpu_s(1.0, rows)
    else:
        whole_s = interpolate(context.whole, n_tokens)
        copy_s = min(whole_s, interpolate(context.offload, n_tokens))
    away_s = interpolate(context.copies_if_whole, n_tokens) if context.resident else 0.0
    if copy_s > 0:
        offload = (DeviceTask(copy_s, whole_s - copy_s),)
        return BlockTimes(away_s, steps=offload, interference=rates.interference_at(n_tokens), offloaded=True)
    return BlockTimes(away_s, cpu_s=whole_s, interference=rates.interference_at(n_tokens))


class Pricing:
    """Prices of blocks, cached: rates of device and link, and settings of the ring."""

    def __init__(self, rates: SliceRates, streaming: StreamSettings = StreamSettings()) -> None:  # noqa: B008 - frozen
        self.rates, self.streaming = rates, streaming
        self.inter_block_times = cache(inter_block_times)
        self.tasks = cache(self._tasks)
        self.seconds = cache(self._seconds)

    def with_slots(self, n_slots: int) -> Pricing:
        """The same prices with a ring of n_slots slots; shares the cached tasks."""
        pricing = Pricing(self.rates, replace(self.streaming, n_slots=n_slots))
        pricing.inter_block_times, pricing.tasks = self.inter_block_times, self.tasks
        return pricing

    def block_times(
        self,
        block_type: BlockType,
        cut: Cut,
        n_tokens: int,
        n_g: int = 0,
        n_outputs: int = 1,
        inter_block_share: float = 1.0,
    ) -> BlockTimes:
        """The tasks of a block, with its share of the inter-block time before them."""
        inter_block_s, inter_block_cpu_s = self.inter_block_times(block_type, n_tokens)
        times = slice_times(block_type, self.rates, cut, n_tokens, n_g, n_outputs)
        return times.with_inter_block_time(inter_block_share * inter_block_s, inter_block_share * inter_block_cpu_s)

    def _seconds(self, block_type: BlockType, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> float:
        """Steady-state seconds per block."""
        inter_block_s, inter_block_cpu_s = self.inter_block_times(block_type, n_tokens)
        sliced = not cut.is_uncut or (n_g > 0 and block_type.takes_n_g and not block_type.outputs_only)
        times, times_s = self.tasks(block_type.without_context if sliced else block_type, cut, n_tokens, n_g, n_outputs)
        if times_s is None:
            return single_block_cycle_seconds(
                times, times.inter_block_s + inter_block_s, times.inter_block_cpu_s + inter_block_cpu_s, self.streaming
            )
        return inter_block_s + times_s

    def _tasks(
        self, block_type: BlockType, cut: Cut, n_tokens: int, n_g: int, n_outputs: int
    ) -> tuple[BlockTimes, float | None]:
        """(the tasks of a block without inter-block time, their seconds). Seconds None: they depend on the inter-block
        time, as copies run during it."""
        times = slice_times(block_type, self.rates, cut, n_tokens, n_g, n_outputs)
        return times, None if runs_ahead([times], self.streaming) else cycle_seconds([times], self.streaming)
