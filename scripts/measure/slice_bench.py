"""Plans cut by hand, their traces, and what a trace says of blocks.

t_fin of a block is from the launch of its device part to the end of its join.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from experiments.generation import lasting_prompt, pinned
from experiments.traces import trace_of

from ggml_bridge.split import Span, TraceOf
from oallama import Placer, Plan
from oallama.core.types import PLAIN_LAYOUT, FlashAttention, StreamSettings, Workload
from oallama.cost.block_cost import BlockCost, Cut
from oallama.cost.blocks import is_ffn
from oallama.cost.timeline import PAPER
from oallama.device.load_params import load_bridge
from oallama.place.cuts import n_g_at
from oallama.place.decide import decide_as_given
from oallama.place.placed import cpu
from oallama.place.problem import costs_of
from oallama.place.slice_plan import SlicePlan
from oallama.place.slicer import Slicer
from oallama.place.staging import staging_bytes

ATTENTION: FlashAttention = "on"
CALLER = ("launch", "host", "wait", "ahead", "join")
"""Steps of the thread that computes CC."""


class SliceBench:
    """A model, its solver and what is asked of both."""

    def __init__(self, options: argparse.Namespace) -> None:
        (path,), (threads,) = options.files, options.threads
        self.options = options
        self.placer = Placer.load(path, device=options.device, threads=threads, flash_attn=ATTENTION)
        self.load = self.placer.workload(options.n_prompt, options.n_gen)
        self._solve()

    def _solve(self) -> None:
        streaming = PAPER if self.options.prefetch == "layer" else StreamSettings(n_slots=self.options.slots)
        self.problem = self.placer.problem(ATTENTION)
        self.slicer = Slicer(self.problem, self.load, streaming)
        self.on_cpu = cpu(costs_of(self.problem, self.load, "mixed", llama_uses_device=False))

    def refresh(self) -> None:
        """Profile the machine anew."""
        self.placer.profile(refresh=True)
        self._solve()

    def sliced(self, gg: float, cg: float, n_g: int) -> SlicePlan:
        """Every FFN cut alike at the nearest granules, in the layout that is fastest in decode, CC kept twice for n_g
        where that cannot be streamed."""
        layers: list[tuple[BlockCost, Cut]] = []
        for layouts in self.slicer.blocks(self.on_cpu):
            fastest = min(layouts.values(), key=lambda b: b.gemms.cpu_s(1.0, 1))
            extent, step = fastest.block.extent, fastest.block.step
            cc = extent if gg + cg == 0 or not self.cuts(fastest) else round((1 - gg - cg) * extent / step) * step
            streamed = min(round(cg * extent / step) * step, extent - cc) if cc < extent else 0
            if gg < 0.5 / (extent / step):
                streamed = extent - cc
            layers.append((fastest, Cut(cc, streamed, extent - cc - streamed)))
        table = ((least_tokens(self.load), 0), (self.load.n_prompt, n_g)) if n_g else ()
        twice = bool(table) and any(block.layout != PLAIN_LAYOUT for block, _ in layers)
        made = tuple(layers)
        weights = sum(block.block.bytes * cut.gg // block.block.extent for block, cut in made)
        staging = staging_bytes(made, self.slicer.on.streaming, self.load.n_ubatch, n_g)
        return self.slicer.priced(made, table, twice, weights, staging)

    def cuts(self, block: BlockCost) -> bool:
        """Whether it is a layer's FFN, and not the output, attention or experts that have no slices."""
        return block.takes_n_g and is_ffn(self.problem.operators[block.block.operators[0]])

    def predicted_t_fin(self, plan: SlicePlan, n_tokens: int) -> float:
        """Of the FFNs that see every token, in the last of three rounds."""
        rounds = 1 if n_tokens > 1 else 3
        ends = self.slicer.timeline(plan, n_tokens, rounds).block_ends_s
        last = [0.0, *ends][-len(plan.layers) - 1 :]
        n_g = n_g_at(plan.token_assignment, n_tokens)
        return median(
            last[i + 1] - last[i] - self.slicer.on.block_times(block, cut, n_tokens, n_g, 1).gap_s
            for i, (block, cut) in enumerate(plan.layers)
            if self.cuts(block) and (n_tokens == 1 or not block.outputs_only)
        )

    def traced(self, plan: SlicePlan, watched: TraceOf | None = None) -> list[Span]:
        """The steps of options.rounds runs, after one that is thrown away. watched: what is; all that can be."""
        options, split = self.options, load_bridge().split()
        with self.placer.engine(self._plan_of(plan)) as engine, pinned(options.cpus):
            prompt = lasting_prompt(engine, options.n_prompt, options.n_gen)
            split.start_trace(watched=watched or trace_of(options.device))
            for _ in range(options.rounds):
                engine.generate(prompt, max_tokens=options.n_gen, temperature=0.0)
            return split.stop_trace()

    def _plan_of(self, plan: SlicePlan) -> Plan:
        placed = self.slicer.placed(self.on_cpu, plan)
        return self.placer._plan_of(decide_as_given(self.problem, placed, self.load, "manual"), ATTENTION)


def least_tokens(load: Workload) -> int:
    """Below this many tokens n_g is 0."""
    return max(2, load.n_prompt // 2)


def phases_of(spans: Sequence[Span], n_tokens: int) -> dict[int, list[Span]]:
    """Steps by phase, of FFNs in passes over so many tokens."""
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.n_tokens == n_tokens and "ffn" in span.name:
            found[span.phase].append(span)
    return dict(found)


def t_fin(steps: Sequence[Span]) -> float:
    own = [s for s in steps if s.step in CALLER]
    return max(s.end_s for s in own) - min(s.begin_s for s in own)


def one_pass(spans: Sequence[Span], n_tokens: int) -> list[Span]:
    """The last pass over so many tokens, or the last but one: copies for the pass after it are then seen too. It begins
    with the first block, which is the only one that all passes begin with, and ends where the next pass begins."""
    starts = {s.phase: s for s in sorted(spans, key=lambda s: s.begin_s, reverse=True)}
    first = starts[min(starts)].name
    begins = sorted(phase for phase, span in starts.items() if span.name == first)
    passes = [(b, e) for b, e in zip(begins, [*begins[1:], max(starts) + 1], strict=True)
              if starts[b].n_tokens == n_tokens]  # fmt: skip
    begin, end = passes[max(-2, -len(passes))]
    return sorted((s for s in spans if begin <= s.phase < end), key=lambda s: s.begin_s)


def busy(spans: Sequence[Span], steps: Sequence[str]) -> float:
    return sum(s.end_s - s.begin_s for s in spans if s.step in steps)
