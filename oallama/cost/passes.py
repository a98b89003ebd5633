"""The forward passes of a workload."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import Workload


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: n_tokens computed at once while n_kv tokens are in the cache, its own among them; `count`
    times."""

    n_tokens: int
    n_kv: int
    count: int
    n_outputs: int = 1  # tokens whose logits are wanted: the last of a prompt, each generated one


def mean_depth(workload: Workload) -> int:
    """Tokens that a generated one sees on average."""
    return workload.n_past + workload.n_prompt + max(1, workload.n_gen) // 2


def passes(workload: Workload, phase: str) -> tuple[Pass, ...]:
    """The forward passes that a phase counts: `decode` one token at the mean depth, `prefill` the whole prompt in
    micro-batches of n_ubatch, `mixed` the prompt and n_gen tokens."""
    if phase == "decode":
        return (Pass(1, mean_depth(workload), 1),)
    n_gen = 0 if phase == "prefill" else workload.n_gen
    return passes_at(workload.n_past, workload.n_prompt, n_gen, workload.n_ubatch)


def passes_at(n_past: int, n_prompt: int, n_gen: int, n_ubatch: int) -> tuple[Pass, ...]:
    """The forward passes of a prompt and a generation behind n_past tokens that are in the cache already."""
    made = []
    done = 0
    while done < n_prompt:
        n = min(n_ubatch, n_prompt - done)
        made.append(Pass(n, n_past + done + n, 1, int(done + n == n_prompt)))
        done += n
    if n_gen:
        made.append(Pass(1, n_past + n_prompt + n_gen // 2, n_gen))
    return tuple(made)
