"""Bytes of activations on the device while it computes a run of blocks, as ggml's allocator lays them out.

The split back end has one graph for a run (ggml_bridge/native/split/program.cpp). All its inputs lie first, and
results that it copies back stay until the run ends. Anything else is freed after its last reader; allocation is best
fit. In each segment GG and hot experts of all blocks come first, then what is launched several times, CG, and CG'.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from oallama.cost.blocks import F32, SplitBlock

LEAST_PACKED, NUMBER_ALIGNMENT = 64, 64
"""Rows of a launch that need no second one, and numbers that those of a launch are rounded up to
(ggml_bridge/native/split/build_routed.cpp, program.h)."""


class HotRows(NamedTuple):
    """Rows of tokens' experts that the device computes, as it has some experts whole."""

    n_used: int
    n_device: int  # of these at most
    n_expert: int
    follows: bool  # the rows of a batch are packed, and launched by parts

    def most(self, n_tokens: int) -> int:
        """Rows that are computed at once."""
        unpacked, n_rows = self.n_device * n_tokens, self.n_used * n_tokens
        return min(n_rows, max(LEAST_PACKED, (unpacked + 1) // 2)) if self.packed(n_tokens) else unpacked

    def packed(self, n_tokens: int) -> bool:
        return self.follows and n_tokens > 1

    def numbers(self, n_tokens: int) -> int:
        """Slots of packed rows, or whose they are, of all launches."""
        n_rows = self.n_used * n_tokens
        return n_rows + NUMBER_ALIGNMENT * (self.n_expert + 3 + n_rows // self.most(n_tokens))


class ComputedBlock(NamedTuple):
    """Slices or hot experts of a block that the device computes."""

    block: SplitBlock
    gg: int
    cg: int = 0
    late: int = 0  # elements of CC, for the last n_g tokens (CG')
    on_host: int = 0  # elements of CC
    resident: bool = False  # its inputs and results are in the device's memory
    host_input: bool = False  # of a resident block: its input is on the host
    n_ids: int = 0  # experts of a token, whose ids lie apart there
    hot: HotRows | None = None  # in place of slices


@lru_cache(maxsize=2**14)
def activation_bytes(run: tuple[tuple[ComputedBlock, ...], ...], n_tokens: int, n_g: int = 0) -> int:
    """Bytes for the segments of a run, of n_tokens tokens, with CC of the last n_g of them."""
    n_sent_bytes, nodes = 0, list[_Node]()
    for segment in run:
        sides: tuple[list[_Node], ...] = ([], [], [], [])  # GG, packed rows, CG, CG'
        results: list[_Node] = []
        n_sent = 0  # tokens of the input that were sent for the blocks before
        for part in segment:
            if part.hot is not None:
                n_sent_bytes += _sent_hot_bytes(part, part.hot, n_tokens)
                results += _compute_hot(part, part.hot, n_tokens, sides)
                continue
            if part.block.relation != "input":
                n_sent = 0
            n_read = _at_once(part.block, n_tokens) if part.gg + part.cg else n_g
            n_sent_bytes += _sent_bytes(part, n_tokens, n_g, n_read, sends_input=n_read > n_sent)
            n_sent = max(n_sent, n_read)
            results += _compute(part, n_tokens, n_g, sides)
        for side in sides:
            nodes += side
        if segment[0].resident:
            nodes += [_Node(0, (result,)) for result in results]  # added to what is there already
        else:
            for result in results:
                result.stays = True
    return n_sent_bytes + _allocated_bytes(nodes)


def _sent_bytes(part: ComputedBlock, n_tokens: int, n_g: int, n_read: int, sends_input: bool) -> int:
    """Bytes that are sent before the device computes. n_read: tokens whose input the device reads. sends_input: the
    input must be sent, as earlier blocks of the run sent fewer tokens."""
    block, n_tokens = part.block, _at_once(part.block, n_tokens)
    elements = part.gg + part.cg
    biases = block.biases_each * (elements + part.late)
    weights = block.summed * n_read if block.n_summed(n_tokens) > 1 else 0
    inputs = block.sent * n_read if sends_input else 0
    if part.resident:
        cc = part.on_host if elements else 0  # whole rows go where they belong
        host_rows = block.returned_each * cc * (n_tokens - (n_g if part.late else 0))
        return ((inputs if part.host_input else 0) + biases + part.n_ids * n_tokens + host_rows) * F32
    sliced = block.sent_each * (elements * n_tokens + part.late * n_g)
    return (inputs + sliced + weights + biases) * F32


def _compute(part: ComputedBlock, n_tokens: int, n_g: int, sides: Sequence[list[_Node]]) -> list[_Node]:
    """Append the nodes of each side. Returns the nodes whose results are copied back; those of a resident block are
    added on the device."""
    n_tokens = _at_once(part.block, n_tokens)
    n_batch = n_tokens
    results: list[_Node | None] = []
    gg_side, _, cg_side, late_side = sides
    slices = (gg_side, part.gg, n_tokens), (cg_side, part.cg, n_tokens), (late_side, part.late, n_g)
    for side, elements, n in slices:
        results.append(_side(part, elements, n, n_batch, side) if elements and n else None)
    if not part.block.returned:
        return [node for node in results if node is not None]
    gg, cg, late = results
    total = gg or cg
    if gg is not None and cg is not None:
        total = _Node(cg.n_bytes, (gg, cg), in_place=True)
        cg_side.append(total)
    if late is None:
        return [total] if total is not None else []
    if total is None:
        return [late]
    last = _Node(late.n_bytes, (late, total), in_place=True)
    late_side.append(last)
    return [total, last] if n_g < n_tokens else [last]


def _side(part: ComputedBlock, elements: int, n_tokens: int, n_batch: int, nodes: list[_Node]) -> _Node:
    """Append the nodes that compute so many elements of one side. Returns the last one."""
    block = part.block
    reads: tuple[_Node, ...] = ()
    if block.hidden_each:
        reads = (_hidden(block, block.hidden_each * elements * n_tokens, (), nodes),)
        if not block.returned:
            return reads[0]
    elif part.resident and block.sent_each and elements < block.extent:  # columns of what is there, made contiguous
        reads = (_Node(block.sent_each * elements * n_tokens * F32),)
        nodes += reads
    nodes.append(_Node((block.returned + block.returned_each * elements) * n_tokens * F32, reads))
    if block.n_summed(n_batch) > 1:
        nodes.append(_Node(block.returned // block.summed * n_tokens * F32, (nodes[-1],)))
    return nodes[-1]


def _hidden(block: SplitBlock, n_values: int, reads: tuple[_Node, ...], nodes: list[_Node]) -> _Node:
    """Append the nodes that make hidden values. Without a gate the activation takes the place of what it reads."""
    n_bytes = n_values * F32
    if block.gate == "apart":
        reads = _Node(n_bytes, reads), _Node(n_bytes, reads)
        nodes += reads
    elif block.gate == "fused":
        reads = (_Node(2 * n_bytes, reads),)
        nodes += reads
    nodes.append(_Node(n_bytes, reads))
    return nodes[-1]


def _sent_hot_bytes(part: ComputedBlock, hot: HotRows, n_tokens: int) -> int:
    """Bytes sent to the device for the rows of hot experts; biases of experts in slots have their own memory."""
    block = part.block
    inputs = 0 if part.resident else (block.sent - hot.n_used) * n_tokens
    if hot.packed(n_tokens):
        n_kinds = 3 if block.biases else 2
        return (inputs + n_kinds * hot.numbers(n_tokens) + block.biases * hot.n_expert) * F32
    return (inputs + hot.n_device * n_tokens * (2 if _sums_hot(part, hot, n_tokens) else 1)) * F32


def _compute_hot(part: ComputedBlock, hot: HotRows, n_tokens: int, sides: Sequence[list[_Node]]) -> list[_Node]:
    """Append the nodes of a block's hot experts, and return what is copied back or added."""
    block, rows, packed = part.block, hot.most(n_tokens), hot.packed(n_tokens)
    nodes = sides[1 if packed else 0]
    reads: tuple[_Node, ...] = ()
    if packed:
        reads = (_Node((block.sent - hot.n_used) * rows * F32),)  # gathered
        nodes += reads
    hidden = _hidden(block, block.hidden_each // hot.n_used * block.extent * rows, reads, nodes)
    nodes.append(_Node(block.returned // hot.n_used * rows * F32, (hidden,), stays=packed))
    if hot.n_device > 1 and _sums_hot(part, hot, n_tokens):
        nodes.append(_Node(block.returned // hot.n_used * n_tokens * F32, (nodes[-1],)))
    return [nodes[-1]]


def _sums_hot(part: ComputedBlock, hot: HotRows, n_tokens: int) -> bool:
    """Whether the device adds up a token's rows: they are many, or the sum is added to what is there."""
    if hot.packed(n_tokens) or part.block.summed == 1:
        return False
    return part.resident or part.block.with_rows(hot.n_device, hot.n_used).n_summed(n_tokens) > 1


def _at_once(block: SplitBlock, n_tokens: int) -> int:
    return min(n_tokens, block.chunk or n_tokens)


@dataclass(eq=False, slots=True)
class _Node:
    """One operation of the device's graph. in_place: its result takes the place of the first that it reads."""

    n_bytes: int
    reads: tuple[_Node, ...] = ()
    in_place: bool = False
    stays: bool = False
    n_readers: int = 0
    offset: int = 0


def _allocated_bytes(nodes: Sequence[_Node]) -> int:
    """Bytes of the memory that the allocator needs for nodes that are computed in this order."""
    for node in nodes:
        for source in node.reads:
            source.n_readers += 1
    memory = _Memory()
    for node in nodes:
        first = node.reads[0] if node.in_place else None
        taken_over = first is not None and first.n_readers == 1 and not first.stays
        node.offset = first.offset if first is not None and taken_over else memory.take(node.n_bytes)
        for source in node.reads:
            source.n_readers -= 1
            if not source.n_readers and not source.stays and not (taken_over and source is first):
                memory.give(source.offset, source.n_bytes)
    return memory.most


class _Memory:
    """Memory that grows at its end."""

    def __init__(self) -> None:
        self.most = 0
        self._end = 0
        self._holes: list[tuple[int, int]] = []  # (begin, end), ascending

    def take(self, n_bytes: int) -> int:
        """Return where so many bytes begin."""
        fits = [hole for hole in self._holes if hole[1] - hole[0] >= n_bytes]
        if not fits:
            begin = self._end
            self._end += n_bytes
            self.most = max(self.most, self._end)
            return begin
        begin, end = min(fits, key=lambda hole: hole[1] - hole[0])
        self._holes.remove((begin, end))
        if begin + n_bytes < end:
            insort(self._holes, (begin + n_bytes, end))
        return begin

    def give(self, begin: int, n_bytes: int) -> None:
        """Give bytes back, to the hole next to them where there is one."""
        end = begin + n_bytes
        for hole in [hole for hole in self._holes if end == hole[0] or hole[1] == begin]:
            self._holes.remove(hole)
            begin, end = min(begin, hole[0]), max(end, hole[1])
        if end == self._end:
            self._end = begin
        elif begin < end:
            insort(self._holes, (begin, end))
