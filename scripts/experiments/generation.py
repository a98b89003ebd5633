"""Generations of an engine as samples, and what they start from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Sample = dict[str, float]


def prompt_of(n_tokens: int, n_vocab: int, seed: int = 7) -> list[int]:
    """Random tokens, none of the special ones at the vocabulary's beginning."""
    import numpy as np

    return [int(token) for token in np.random.default_rng(seed).integers(3, min(n_vocab, 1000), n_tokens)]


def lasting_prompt(engine: Any, n_prompt: int, n_gen: int) -> list[int]:
    """A prompt that the model continues for n_gen tokens without ending. Exits where there is none."""
    for seed in range(100):
        prompt = prompt_of(n_prompt, engine.n_vocab, seed)
        if engine.generate(prompt, max_tokens=n_gen, temperature=0.0).n_gen == n_gen:
            return prompt
    raise SystemExit(f"the model always ends before {n_gen} tokens; lower -n")


def generations(engine: Any, prompt: list[int], n_gen: int, rounds: int) -> list[Sample]:
    """TTFT and TPOT of each of `rounds` generations, after one more; where operators are split, also a token's seconds
    in launching, CC, waiting and joining, and its phases. Exits where the model ends at once."""
    rows = []
    for seed in range(rounds + 1):
        made = engine.generate(prompt, max_tokens=n_gen, temperature=0.0, seed=seed)
        if seed and made.n_gen > 1:
            row = {"ttft_s": made.ttft_s, "tpot_s": made.tpot_s}
            if (stats := engine.split_stats) is not None:
                row |= {**stats.per_token(), "phases": stats.decode.n_phases / max(1, stats.n_decoded)}
            rows.append(row)
    if not rows:
        raise SystemExit("the model ends at once: there is nothing to time")
    return rows


def best_layout(operator: Any, cc: int) -> str:
    """The first CPU buffer type that llama.cpp would take for a slice of `cc` elements of the operator."""
    from oallama.device.load_params import load_bridge
    from oallama.model.cut import cut_axis

    bridge = load_bridge()
    k, n, e = operator.shape
    columns, rows = (cc, n) if cut_axis(operator) == "cols" else (k, cc)
    used = operator.n_expert_used if operator.op == "MUL_MAT_ID" else 0
    layouts = bridge.cpu_layouts()
    return str(next(x for x in layouts if bridge.layout_supports(x, operator.type, columns, rows, e, used)))


@contextmanager
def pinned(cpus: tuple[int, ...]) -> Iterator[None]:
    """All threads of this process on these CPUs; a worker stays where its --device says. Nothing without CPUs."""
    from oallama.bench.child import pin_threads

    everywhere = tuple(os.sched_getaffinity(0))
    pin_threads(cpus)
    try:
        yield
    finally:
        pin_threads(everywhere)
