"""Durations of one sliced block's tasks: ScheInfer Eq. 4 (rates) and Eq. 15 (rates and n_g).

A block (cost/blocks.py) is cut at the same element everywhere: CC first, then CG, GG last. `slice_times` is what our
backend does: inputs are sent once, GG runs first, what is streamed of all the block's mul-mats is copied together into
one slot of the ring and runs when it has arrived, and one join adds both sides. `paper_times` is Eq. 4 to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from oallama.core.types import LinearFit
from oallama.cost.beside import BesideCurve, beside_at
from oallama.cost.blocks import SplitBlock
from oallama.cost.operator_cost import Curve, interpolate
from oallama.cost.split_ffn import JOIN_BYTES, Side
from oallama.cost.timeline import BlockTimes, Step
from oallama.cost.transfer import TransferRates
from oallama.profile.cases import Signature, bytes_read

NO_GAP: Curve = ((1, 0.0),)


@dataclass(frozen=True, slots=True)
class Gemm:
    """One mul-mat of a block: by batch size, seconds of the whole weight on either side, and alpha of Eq. 3, which does
    not shrink with the slice."""

    signature: Signature
    cpu: Curve
    cpu_alpha: Curve
    gpu: Curve
    gpu_alpha: Curve

    def cpu_s(self, rate: float, n_tokens: int) -> float:
        return _seconds(self.cpu, self.cpu_alpha, rate, n_tokens)

    def gpu_s(self, rate: float, n_tokens: int) -> float:
        return _seconds(self.gpu, self.gpu_alpha, rate, n_tokens)

    def bytes_read(self, rate: float, n_tokens: int) -> float:
        """Weight bytes of a slice that n_tokens tokens need: of experts, the routed ones only."""
        return rate * bytes_read(self.signature, n_tokens) if n_tokens > 0 else 0.0

    def copy_s(self, link: LinearFit, rate: float, n_tokens: int) -> float:
        """Of a slice that n_tokens tokens need: one copy, of experts one for each that is routed to."""
        if rate <= 0 or n_tokens <= 0:
            return 0.0
        n_bytes = self.bytes_read(1.0, n_tokens)
        routed = self.signature.op == "MUL_MAT_ID"
        n_copies = self.signature.shape[2] * n_bytes / self.signature.bytes if routed else 1.0
        return n_copies * link.alpha_s + rate * n_bytes * link.beta_s_per_byte


def _seconds(whole: Curve, alpha: Curve, rate: float, n_tokens: int) -> float:
    if n_tokens <= 0:
        return 0.0
    whole_s = interpolate(whole, n_tokens)
    return Side(min(interpolate(alpha, n_tokens), whole_s), whole_s).seconds(rate)


@dataclass(frozen=True, slots=True)
class StreamedBlock:
    """A block, what its mul-mats cost, and what lies between it and the one before."""

    block: SplitBlock
    gemms: tuple[Gemm, ...]
    layout: str = "CPU"  # host buffer type of CC, which the gemms' CPU times are of
    gap: Curve = (
        NO_GAP  # seconds by batch size from the join before to this block's inputs: attention, norms, crossings
    )
    gap_cpu: Curve = NO_GAP  # of these, in which the CPU works
    whole: Curve | None = (
        None  # seconds by the pass's batch size as llama.cpp runs it on the host; None: as the gemms say
    )
    outputs_only: bool = False  # behind the last attention: of a prompt it sees only tokens whose logits are wanted
    takes_n_g: bool = True  # in an FFN: its CC may be streamed for some tokens

    @property
    def routed(self) -> bool:
        """Whether the weights that are needed are known only once the router has run."""
        return any(gemm.signature.op == "MUL_MAT_ID" for gemm in self.gemms)

    def kind(self) -> StreamedBlock:
        """This block without saying which operators it is: blocks that cost the same are of one kind."""
        return replace(self, block=replace(self.block, operators=()))


@dataclass(frozen=True, slots=True)
class StreamRates:
    """What work on the device costs beside computing."""

    weights: LinearFit  # the link that CG is streamed over
    transfer: TransferRates  # of activations; a launch takes split_s, one for each step
    join_s_per_byte: float
    kernel_launch_s: float = 0.0  # t_Launch of Eq. 3, for paper_times only
    blocking: bool = False  # the device does nothing by itself: the thread that computes CC copies and waits first
    issue: LinearFit | None = None  # for how long a copy to the device holds up that thread; None: not at all
    beside: BesideCurve = ()


@dataclass(frozen=True, slots=True)
class Rates:
    """Slicing rates of a block: r_CC + r_CG + r_GG = 1."""

    cc: float
    cg: float
    gg: float


def slice_times(
    streamed: StreamedBlock, on: StreamRates, rates: Rates, n_tokens: int, n_g: int = 0, n_outputs: int = 1
) -> BlockTimes:
    """The tasks of a block in a pass over n_tokens tokens, of which n_g use the CC slice on the device (CG'), and
    n_outputs give logits.

    Where all is GG, or nothing is on the device, there is nothing to send or to join: llama.cpp runs the block where it
    is. With r_CG = n_g = 0 the finishing time is the one of split_ffn.pass_seconds.
    """
    gap_s, rows = interpolate(streamed.gap, n_tokens), n_tokens
    gap_cpu_s = min(gap_s, interpolate(streamed.gap_cpu, n_tokens))
    if streamed.outputs_only:
        rows, n_g = n_outputs, 0
    if not streamed.takes_n_g:
        n_g = 0
    prime = rates.cc > 0 and n_g > 0
    if rates.cc >= 1 and not prime:
        return BlockTimes(gap_s, 0.0, _whole_s(streamed, n_tokens, rows), (), 0.0)
    if rows <= 0:
        return BlockTimes(gap_s, 0.0, 0.0, (), 0.0)
    n_tokens = rows
    gemms, block, copies = streamed.gemms, streamed.block, on.transfer
    steps = []
    if rates.gg > 0:
        steps.append(Step(0.0, sum(gemm.gpu_s(rates.gg, n_tokens) for gemm in gemms)))

    def copied(line: LinearFit | None) -> float:
        if line is None:
            return 0.0
        return sum(gemm.copy_s(line, rates.cg, n_tokens) + gemm.copy_s(line, rates.cc, n_g) for gemm in gemms)

    copy_s = copied(on.weights)
    if rates.cg > 0 or prime:
        gpu_s = sum(gemm.gpu_s(rates.cg, n_tokens) + gemm.gpu_s(rates.cc, n_g) for gemm in gemms)
        steps.append(Step(copy_s, gpu_s))
    send_s = join_s = 0.0
    if rates.gg < 1:
        elements = round((1.0 if prime else rates.cg + rates.gg) * block.extent)
        there = n_tokens if rates.cg + rates.gg > 0 else n_g  # tokens that the device computes something of
        joined = (block.returned + block.returned_each * elements) * there * JOIN_BYTES
        send_s = copies.copy_in.seconds(block.upload_bytes(elements, there)) + len(steps) * copies.launch_issue_s
        join_s = copies.copy_out.seconds(block.download_bytes(elements, there)) + joined * on.join_s_per_byte
        steps[0] = Step(steps[0].copy_s, steps[0].gpu_s, copies.launch_s)
    if on.blocking:
        send_s += sum(step.copy_s + step.launch_s + step.gpu_s for step in steps)
        steps = []
    return BlockTimes(
        gap_s=gap_s,
        send_s=send_s,
        cpu_s=sum(gemm.cpu_s(rates.cc, n_tokens - n_g) for gemm in gemms),
        steps=tuple(steps),
        join_s=join_s,
        cpu_bytes=sum(gemm.bytes_read(rates.cc, n_tokens - n_g) for gemm in gemms),
        copy_bytes_per_s=1 / on.weights.beta_s_per_byte if on.weights.beta_s_per_byte else 0.0,
        routed=streamed.routed,
        issue_s=0.0 if on.blocking else copied(on.issue),
        beside=beside_at(on.beside, n_tokens),
        gap_cpu_s=gap_cpu_s,
    )


def _whole_s(streamed: StreamedBlock, n_tokens: int, rows: int) -> float:
    if streamed.whole is not None:
        return interpolate(streamed.whole, n_tokens)
    return sum(gemm.cpu_s(1.0, rows) for gemm in streamed.gemms)  # 0 of no rows


def paper_times(
    streamed: StreamedBlock, on: StreamRates, rates: Rates, n_tokens: int, n_g: int = 0, n_outputs: int = 1
) -> BlockTimes:
    """Eq. 4, and with n_g > 0 Eq. 15: one launch for each kernel and each copy, on a stream of its own; CG and GG of a
    mul-mat computed together once its copy has arrived; sending and joining cost nothing.

    alpha_C2G counts only where something is copied, as in Eq. 10, and CG' only where n_g > 0; what is streamed for CG'
    is r_CC of the weight (Eq. 15 writes all of it, which is the same at r_GG = 0). n_outputs is not in the paper.
    """
    prime = rates.cc > 0 and n_g > 0
    n_launches = 2 * (rates.cg > 0) + 2 * prime + (rates.gg > 0)
    steps = tuple(
        Step(
            gemm.copy_s(on.weights, rates.cg, n_tokens) + gemm.copy_s(on.weights, rates.cc, n_g),
            gemm.gpu_s(rates.cg, n_tokens) + gemm.gpu_s(rates.gg, n_tokens) + gemm.gpu_s(rates.cc, n_g),
            n_launches * on.kernel_launch_s,
        )
        for gemm in streamed.gemms
    )
    cpu_s = sum(gemm.cpu_s(rates.cc, n_tokens - n_g) for gemm in streamed.gemms)
    return BlockTimes(interpolate(streamed.gap, n_tokens), 0.0, cpu_s, steps, 0.0)
