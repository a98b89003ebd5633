"""Memory of a device: its limit, what slices need beside their weights, and the budget for operators."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import ceil, floor

from oallama.core.errors import DoesNotFit
from oallama.core.types import MemoryBreakdown, Operator, StreamSettings
from oallama.core.units import MIB
from oallama.cost.activations import ComputedBlock, HotRows, activation_bytes
from oallama.cost.blocks import F32
from oallama.cost.slices import BlockType, Cut
from oallama.device.card import FLOAT_TYPES
from oallama.planner.cutting import CutBlocks, TokenTable, linear_n_g

RUNTIME_BYTES = {"CUDA": 48 * MIB, "ROCm": 48 * MIB}
"""Device bytes that an instance of a back end takes besides buffers and its pool, which no no_alloc load reports.
ggml-cuda: a cuBLAS workspace (4 MiB; 32 MiB from Hopper on: common.cuh, cublas_handle), and partial results of matrix
kernels and attention (mmq.cuh: 64 KiB per multiprocessor). Unknown for other back ends."""

CUBLAS_BYTES = 100 * MIB
"""Bytes of cuBLAS's kernels, loaded once per process: usually 70 to 100 MB."""

INTEGER_TYPES = frozenset(
    {"Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ2_XXS",
     "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS", "IQ4_NL", "MXFP4", "NVFP4"}
)  # fmt: skip
"""Types that ggml-cuda multiplies with integer kernels in large batches (mmq.cu, ggml_cuda_should_use_mmq)."""

_VOLTA = re.compile(r"V100|GV100|TITAN V\b|Xavier")
_ROW_PADDING = 512  # elements of an activation
_Q8_1 = 36 / 32  # bytes per element
_F16 = 2


def runtime_bytes(
    backend: str, description: str, operators: Sequence[Operator], n_ubatch: int, plain_attention: bool,
    n_instances: int,
) -> int:  # fmt: skip
    """Device bytes that instances of its back end take for themselves while they compute micro-batches; 0 if unknown.
    plain_attention: attention without flash attention, which uses cuBLAS.

    Each instance keeps the memory of its largest mul-mat (ggml 0.26.0, ggml-cuda.cu, ggml_cuda_pool), and aborts if
    that does not fit. The output computes one token.
    """
    base_bytes = RUNTIME_BYTES.get(backend, 0)
    if not base_bytes:
        return 0
    integers = backend == "CUDA" and not _VOLTA.search(description)
    pool = max((_pool_bytes(o, 1 if o.is_last else n_ubatch, integers) for o in operators), default=0)
    cublas = plain_attention or any(not o.is_last and not _in_integers(o, integers) for o in operators)
    return n_instances * (base_bytes + pool) + (CUBLAS_BYTES if cublas and n_instances else 0)


def _in_integers(operator: Operator, integers: bool) -> bool:
    return integers and operator.type in INTEGER_TYPES


def _pool_bytes(operator: Operator, n_tokens: int, integers: bool) -> int:
    """Bytes that a mul-mat takes from the pool. Integer kernels: its input as Q8_1 (mmq.cu). cuBLAS: input and result
    in F16, and a quantised weight in F16 (ggml-cuda.cu, ggml_cuda_mul_mat_cublas); for experts one matrix, and all rows
    once more in the order of experts (ggml_cuda_mul_mat_id). One token needs no cuBLAS."""
    k, n, _ = operator.shape
    routed = operator.routed
    rows = n_tokens * (operator.n_expert_used if routed else operator.shape[2])
    in_q8_1 = ceil(rows * ceil(k / _ROW_PADDING) * _ROW_PADDING * _Q8_1)
    if n_tokens == 1 or _in_integers(operator, integers):
        return in_q8_1
    weight = 0 if operator.type in FLOAT_TYPES else _F16 * k * n * (1 if routed else operator.shape[2])
    return weight + _F16 * rows * (k + n) + (F32 * rows * (k + n) if routed else 0)


def usable(capacity: int, fill: float, runtime: int) -> int:
    """Bytes that a placement may take: fill * capacity, or less if the rest of the capacity is smaller than
    `runtime`."""
    return max(0, min(int(fill * capacity), capacity - runtime))


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device with norms and KV of all layers on it and every operator on the host, by a no_alloc load."""

    capacity: int  # --vram, or the free memory
    fill: float  # share of it that may be used (OATO Algorithm 1, line 16: 0.90)
    kv: int
    compute: int
    other_weights: int  # norms and biases
    n_layer: int
    operators_limit: int | None = None  # --gpu-weights as bytes
    runtime: int = 0  # runtime_bytes of llama.cpp's instance of the device's back end
    runtime_beside: int = 0  # runtime_bytes of llama.cpp's and the split back end's instances

    @property
    def limit(self) -> int:
        return usable(self.capacity, self.fill, self.runtime)

    @property
    def beside_split(self) -> DeviceMemory:
        """The same with the split back end's instance besides llama.cpp's."""
        return replace(self, runtime=self.runtime_beside)

    def of_layers(self, n_layer: int) -> DeviceMemory:
        """The same for a device with at most n_layer of the layers."""
        share = n_layer / max(1, self.n_layer)
        return replace(self, kv=int(share * self.kv), other_weights=int(share * self.other_weights), n_layer=n_layer)

    def budget(self, first_device_layer: int) -> int:
        """Bytes left beside norms and KV of the layers from first_device_layer on; negative: these do not fit.

        Assumes that layers have equal KV and other tensors. For models with different layers (sliding windows, hybrids)
        that costs another round of verification, not a wrong plan.
        """
        share = (self.n_layer - first_device_layer) / max(1, self.n_layer)
        return self.limit - self.compute - int(share * (self.kv + self.other_weights))

    def expected(self, first_device_layer: int, own_bytes: int) -> int:
        """Bytes that a placement is expected to take, with the layers from first_device_layer on and own_bytes of
        operators and slices on the device."""
        return self.limit - self.budget(first_device_layer) + own_bytes

    def operator_budget(self, first_device_layer: int) -> int:
        """Bytes left for whole operators, which need norms and KV of their layer on the device."""
        if first_device_layer > self.n_layer:
            return 0
        return for_weights(self.budget(first_device_layer), self.operators_limit)


def for_weights(budget: int, limit: int | None, used: int = 0) -> int:
    """Bytes of the budget that weights may take. limit: cap on all weights on the device (--gpu-weights); used: weights
    that are placed already."""
    return budget if limit is None else min(budget, limit - used)


ENOUGH_USED = 0.99
"""A search ends with a placement that uses at least this share of the limit. On 5,000 drawn devices it then takes 2.3
loads on average; with 1.0 it takes 3.3 and uses 0.1 % more of the limit."""

SHRINK = 0.01
"""Share of the limit by which the budget shrinks further, doubled each time, if a smaller placement still does not fit:
weights moved to the host may need as much memory on the device again, to be offloaded. Without it no placement fits on
439 of those devices."""


class CorrectedMemory:
    """The device's memory, corrected by the memory that verified placements take. llama.cpp's compute buffers depend on
    the placement: on the host operators that it offloads, and on the side of the output. So a first placement may leave
    memory unused, or not fit; once both have occurred, the correction is bisected."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._first = memory
        self._extra = 0  # the correction: further bytes of compute buffers to expect
        self._fits: int | None = None  # the smallest correction with which a placement fitted
        self._fails: int | None = None  # the largest correction with which none fitted
        self._in_a_row = 0  # placements in a row that did not fit

    @property
    def memory(self) -> DeviceMemory:
        """The corrected memory to propose a placement for."""
        return replace(self._first, compute=self._first.compute + self._extra)

    def learn(self, first_device_layer: int, own_bytes: int, real: MemoryBreakdown) -> bool:
        """Correct the memory by the breakdown of a placement proposed with it. Returns False if another proposal would
        not use the device better."""
        error = real.limit - real.spare - self._first.expected(first_device_layer, own_bytes)
        if real.spare < 0:
            self._fails = self._extra if self._fails is None else max(self._fails, self._extra)
            self._in_a_row += 1
            correction = error + int(SHRINK * real.limit) * (2 ** (self._in_a_row - 1) - 1)
        else:
            self._fits = self._extra if self._fits is None else min(self._fits, self._extra)
            self._in_a_row = 0
            correction = error
            if real.limit - real.spare >= ENOUGH_USED * real.limit:
                return False
        if self._fits is not None:
            if self._fails is not None and not self._fails < correction < self._fits:
                correction = (self._fails + self._fits) // 2
            if correction >= self._fits:
                return False
        self._extra = correction
        return True


def memory_breakdown(
    capacity: int, fill: float, weights_gpu: int, weights_host: int, kv: int, compute: int, staging: int = 0,
    runtime: int = 0,
) -> MemoryBreakdown:  # fmt: skip
    """The memory breakdown of these bytes on the device; a negative `spare` means that they do not fit."""
    limit = usable(capacity, fill, runtime)
    spare = limit - weights_gpu - kv - compute - staging
    return MemoryBreakdown(capacity, fill, limit, weights_gpu, weights_host, kv, compute, staging, spare, runtime)


def summed(devices: tuple[MemoryBreakdown, ...], weights_host: int) -> MemoryBreakdown:
    """The memory breakdown of several devices."""
    names = ("capacity", "limit", "weights_gpu", "kv", "compute", "staging", "spare", "runtime")
    sums = {name: sum(getattr(device, name) for device in devices) for name in names}
    return MemoryBreakdown(fill=devices[0].fill, weights_host=weights_host, devices=devices, **sums)


#
# a vision projector beside a plan: whole on the device where there is room, else whole on the CPU
#


def vram_beside(limit: int, fill: float, n_bytes: int, device: str, what: str, remedy: str) -> int:
    """The capacity to plan with so that n_bytes of the limit stay free. Raises DoesNotFit, naming `what` and the
    remedy, if no memory is left."""
    if n_bytes >= limit:
        raise DoesNotFit(n_bytes, limit, device, what, remedy)
    return floor((limit - n_bytes) / fill)


SLOT_PADDING = 512  # bytes that one weight may take in a slot beyond its own: alignment, and what kernels read past it


def most_n_g(table: TokenTable, n_ubatch: int) -> int:
    """Largest n_g of any batch, before n_g_at lowers it to groups of rows."""
    return max((linear_n_g(table, n) for n in {n_ubatch, *(n for n, _ in table if n <= n_ubatch)}), default=0)


def ring_bytes(cut_blocks: CutBlocks, streaming: StreamSettings, n_ubatch: int, n_g: int) -> int:
    """Bytes of the ring for streamed weights. cut_blocks: in the order in which they run. n_g: most tokens of a batch
    that CC is streamed for. A slot holds what a segment streams. Two slots lie at the two ends of the ring, so the ring
    is as long as the largest two consecutive segments (the first follows the last). With any other number of slots,
    each is counted as large as the largest segment."""
    return _ring_bytes(_runs(cut_blocks, n_ubatch, n_g), streaming, n_g)


def _ring_bytes(runs: Sequence[Run], streaming: StreamSettings, n_g: int) -> int:
    slots = cache(
        lambda run: [sum(slot_bytes(*cut_block, n_g) for cut_block in segment) for segment in _by_segment(run)]
    )
    sizes = [size for run in runs for size in slots(run) if size]
    if not sizes:
        return 0
    if streaming.n_slots != 2:
        return streaming.n_slots * max(sizes)
    return sizes[0] if len(sizes) == 1 else max(map(sum, pairwise([*sizes, sizes[0]])))


def staging_bytes(cut_blocks: CutBlocks, streaming: StreamSettings, n_ubatch: int, n_g: int) -> int:
    """Bytes of the ring, of activations for the largest run of blocks that the device computes, and of the biases of
    experts in slots. cut_blocks, n_g: as in ring_bytes. llama.cpp may reserve memory for the logits of all n_ubatch
    tokens, so the FFN after the last attention counts like the others; the logits themselves are computed in chunks of
    tokens."""
    in_slots = sum(
        block_type.block.biases * cut.n_hot * F32 for block_type, cut in cut_blocks
    )  # outside the activations
    runs = _runs(cut_blocks, n_ubatch, n_g)
    segments = (
        tuple(tuple(_part(*cut_block, n_g) for cut_block in segment) for segment in _by_segment(run))
        for run in set(runs)
    )
    activations = max((activation_bytes(run, n_ubatch, n_g) for run in segments), default=0)
    return _ring_bytes(runs, streaming, n_g) + activations + in_slots


Run = tuple[tuple[BlockType, Cut], ...]
"""Blocks that the split back end computes together."""


def _runs(cut_blocks: CutBlocks, n_ubatch: int, n_g: int) -> list[Run]:
    """Group the blocks with a part on the device into runs. A run ends where llama.cpp computes between two blocks."""
    runs: list[Run] = []
    run: list[tuple[BlockType, Cut]] = []
    for block_type, cut in cut_blocks:
        on_device = cut.n_hot or _streamed(block_type, cut, n_g) or 0 < cut.gg < block_type.block.extent
        starts_run = not block_type.block.relation or (
            block_type.block.relation == "sum" and run and not _sums(*run[-1], n_ubatch)
        )
        if run and (starts_run or not on_device):
            runs.append(tuple(run))
            run.clear()
        if on_device:
            run.append((block_type, cut))
    return [*runs, tuple(run)] if run else runs


def _sums(block_type: BlockType, cut: Cut, n_ubatch: int) -> bool:
    """Whether the split back end adds up the results of a block's experts."""
    return block_type.block.summed > 1 if cut.n_hot else block_type.block.n_summed(n_ubatch) > 1


def _by_segment(run: Run) -> Iterator[Run]:
    """Yield the blocks of each segment of a run."""
    begins = [i for i, (block_type, _) in enumerate(run) if i == 0 or block_type.block.begins_segment]
    yield from (run[begin:end] for begin, end in pairwise([*begins, len(run)]))


def _part(block_type: BlockType, cut: Cut, n_g: int) -> ComputedBlock:
    """The device's part of a block."""
    ids = block_type.gemms[0].mul_mat.n_routed
    if cut.n_hot:
        follows = block_type.use is not None and block_type.use.follows and cut.n_hot > 1
        hot = HotRows(ids, min(ids, cut.n_hot - follows), block_type.n_expert, follows)
        return ComputedBlock(block_type.block, 0, resident=block_type.context.resident, hot=hot)
    late = _streamed(block_type, cut, n_g) - cut.cg
    context = block_type.context
    return ComputedBlock(block_type.block, cut.gg, cut.cg, late, cut.cc, context.resident, context.host_input, ids)


def _streamed(block_type: BlockType, cut: Cut, n_g: int) -> int:
    """Elements of CG, and of CG' for the largest batch. Blocks with hot experts stream nothing."""
    if cut.n_hot:
        return 0
    return cut.cg + (cut.cc if n_g and block_type.takes_n_g else 0)


def slot_bytes(block_type: BlockType, cut: Cut, n_g: int) -> int:
    """Bytes of a slot of the ring for what this block streams."""
    streamed = _streamed(block_type, cut, n_g)
    if not streamed:
        return 0
    return ceil(block_type.block.bytes * streamed / block_type.block.extent / SLOT_PADDING) * SLOT_PADDING + _padding(
        block_type
    )


def most_streamed(block_type: BlockType, n_bytes: int) -> int:
    """Elements of a block whose weights fit a slot of n_bytes."""
    whole = max(0, n_bytes - _padding(block_type)) // SLOT_PADDING * SLOT_PADDING
    return whole * block_type.block.extent // block_type.block.bytes


def _padding(block_type: BlockType) -> int:
    return len(block_type.gemms) * SLOT_PADDING * 2  # CG and CG' of each weight
