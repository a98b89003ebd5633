"""Durations of one sliced block's tasks: ScheInfer Eq. 4 (rates) and Eq. 15 (rates and n_g), from a profile.

A block (cost/blocks.py) is cut at the same element everywhere: CC first, then CG, GG last. `slice_times` is what our
backend does: inputs are sent once, GG runs first, what is streamed of all the block's mul-mats is copied together into
one slot of the ring and runs when it has arrived, and one join adds both sides. (Eq. 4 to the letter:
scripts/reproduce/scheinfer_testbed.py.)
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from oallama.core.types import StreamSettings
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.blocks import F32
from oallama.cost.hot_experts import hot_times
from oallama.cost.kernels import interpolate
from oallama.cost.slice_rates import NO_CROSSING, Crossing, SliceRates, both_sides
from oallama.cost.streams import BlockTimes, Step
from oallama.cost.timeline import cycle_seconds, own_cycle_seconds, runs_ahead


def slice_times(
    of: BlockCost, rates: SliceRates, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1
) -> BlockTimes:
    """The tasks of a block in a pass over n_tokens tokens, of which n_g use the CC slice on the device (CG'), and
    n_outputs give logits."""
    gap_s, gap_cpu_s = (of.gap_share * seconds for seconds in gap_times(of, n_tokens))
    return own_times(of, rates, cut, n_tokens, n_g, n_outputs).behind(gap_s, gap_cpu_s)


def gap_times(of: BlockCost, n_tokens: int) -> tuple[float, float]:
    """Seconds between two blocks, in the mean, and of these those in which the CPU works."""
    gap_s = interpolate(of.around.gap, n_tokens)
    return gap_s, min(gap_s, interpolate(of.around.gap_cpu, n_tokens))


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
        whole_s = of.gemms.cpu_s(1.0, rows) if of.around.whole is None else interpolate(of.around.whole, n_tokens)
        away_s = interpolate(of.around.away, n_tokens) if of.around.resident else 0.0
        copy_s = min(whole_s, interpolate(of.around.offload, n_tokens)) if of.around.whole is not None else 0.0
        if copy_s > 0:
            offload = (Step(copy_s, whole_s - copy_s),)
            return BlockTimes(away_s, 0.0, 0.0, offload, 0.0, interference=rates.beside(n_tokens), offloaded=True)
        return BlockTimes(away_s, 0.0, whole_s, (), 0.0, interference=rates.beside(n_tokens))
    if rows <= 0:
        return BlockTimes(0.0, 0.0, 0.0, (), 0.0)
    extent = cut.extent
    cc, cg, gg = cut.cc / extent, cut.cg / extent, cut.gg / extent
    block, link = of.block, rates.transfer

    streamed = of.gemms.read_bytes(cg, rows) + of.gemms.read_bytes(cc, n_g)
    issue_s = 0.0  # of the thread, to ask for the copies: each of them once, and once for each further piece
    if streamed and rates.issue is not None and not rates.blocking:
        n_asked = of.gemms.n_copies(cg, rows) + of.gemms.n_copies(cc, n_g) + max(0.0, streamed / rates.piece_bytes - 1)
        issue_s = n_asked * rates.issue.alpha_s + streamed * rates.issue.beta_s_per_byte

    # what is streamed is queued behind GG, so that the link's latency is waited for once
    streams = cg > 0 or prime
    n_steps = (gg > 0) + streams
    crossing = NO_CROSSING
    if gg < 1 and of.around.resident:
        # the device reads its input where it is; two launches: it adds what the thread sends, and llama.cpp goes on
        send_s, join_s = n_steps * link.launch_issue_s, link.split_s
        if cut.cc > 0:  # else nothing crosses
            send_s += link.copy_out.seconds(block.upload_bytes(extent, rows))
            join_s += link.copy_in.seconds(block.download_bytes(cut.cc, rows - n_g)) + link.split_s
        crossing = Crossing(send_s, join_s, link.launch_s)
    elif gg < 1:
        elements = extent if prime else cut.cg + cut.gg
        there = n_g if cut.is_whole else rows  # tokens that the device computes something of
        n_up, n_down = block.upload_bytes(elements, there, rows), block.download_bytes(elements, there, rows)
        crossing = rates.crossing(n_up, n_down, n_down // F32, n_steps)
    launch_s, behind_s = crossing.launch_s + crossing.staged_in_s, crossing.staged_out_s
    steps: tuple[Step, ...] = ()
    if streams:
        gpu_s = of.gemms.gpu_s(cg, rows) + of.gemms.gpu_s(cc, n_g) + behind_s
        launched = (0.0, 0.0) if gg > 0 else (launch_s, crossing.staged_in_s)
        steps = (Step(rates.weights.seconds(streamed), gpu_s, *launched, behind_s),)
    if gg > 0:
        last_s = 0.0 if streams else behind_s
        steps = (Step(0.0, of.gemms.gpu_s(gg, rows) + last_s, launch_s, crossing.staged_in_s, last_s), *steps)
    return both_sides(of, rates, crossing, steps, of.gemms.cpu_s(cc, rows - n_g), rows, issue_s)


@dataclass(slots=True)
class Pricing:
    """How slices are run: what the device and the link cost, and how far copies run ahead. Remembers what blocks of a
    kind take, and the tasks of those that are sliced, which do not depend on what lies between blocks."""

    rates: SliceRates
    streaming: StreamSettings = StreamSettings()  # noqa: RUF009 - frozen
    _tasks: dict[Hashable, tuple[BlockTimes, float | None]] = field(default_factory=dict, init=False, repr=False)
    _known: dict[Hashable, float] = field(default_factory=dict, init=False, repr=False)

    def with_slots(self, n_slots: int) -> Pricing:
        """The same with a ring of so many slots; tasks are the same."""
        other = replace(self, streaming=replace(self.streaming, n_slots=n_slots))
        other._tasks = self._tasks
        return other

    def block_times(self, of: BlockCost, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> BlockTimes:
        return slice_times(of, self.rates, cut, n_tokens, n_g, n_outputs)

    def seconds(self, of: BlockCost, cut: Cut, n_tokens: int, n_g: int = 0, n_outputs: int = 1) -> float:
        """Of one block among others like it, round after round."""
        key = (of.gemms, of.around, of.use, cut, n_tokens, n_g, n_outputs)
        seconds = self._known.get(key)
        if seconds is None:
            gap_s, gap_cpu_s = gap_times(of, n_tokens)
            own, own_s = self._own(of, cut, n_tokens, n_g, n_outputs)
            if own_s is None:
                seconds = own_cycle_seconds(own, own.gap_s + gap_s, own.gap_cpu_s + gap_cpu_s, self.streaming)
            else:
                seconds = gap_s + own_s
            self._known[key] = seconds
        return seconds

    def _own(self, of: BlockCost, cut: Cut, n_tokens: int, n_g: int, n_outputs: int) -> tuple[BlockTimes, float | None]:
        """(a block without a gap, its seconds; None: they depend on the gap, in which its copies go on)."""
        sliced = not cut.is_whole or (n_g > 0 and of.takes_n_g and not of.outputs_only)
        around: Hashable = of.around.resident if sliced else of.around
        key = (of.gemms, around, of.use if cut.n_hot else None, cut, n_tokens, n_g, n_outputs)
        found = self._tasks.get(key)
        if found is None:
            own = own_times(of, self.rates, cut, n_tokens, n_g, n_outputs)
            ahead = runs_ahead([own], self.streaming)
            found = self._tasks[key] = own, None if ahead else cycle_seconds([own], self.streaming)
        return found
