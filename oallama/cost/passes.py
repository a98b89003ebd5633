"""The forward passes of a workload."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.core.types import Workload


@dataclass(frozen=True, slots=True)
class Pass:
    """Equal forward passes: n_tokens tokens at once, with n_kv tokens in the cache including them; `count` passes, a
    fraction if a pass yields several tokens."""

    n_tokens: int
    n_kv: int
    count: float
    n_outputs: int = 1  # tokens whose logits are wanted: the last of a prompt, each generated one
    n_drafts: int = 0  # further runs of the output for MTP drafts, each over n_tokens / (n_drafts + 1) tokens


def mean_depth(workload: Workload) -> int:
    """Mean number of tokens that a generated token sees."""
    return workload.n_past + workload.n_prompt + max(1, workload.n_gen) // 2


def passes(workload: Workload, phase: str) -> tuple[Pass, ...]:
    """The forward passes of a phase: `decode` one token at the mean depth, `prefill` the whole prompt in micro-batches
    of n_ubatch, `mixed` the prompt and n_gen tokens."""
    if phase == "decode":
        return (decode_pass(workload),)
    prompt = prompt_passes(workload.n_past, workload.n_prompt, workload.n_ubatch)
    return prompt if phase == "prefill" or not workload.n_gen else (*prompt, decode_pass(workload, workload.n_gen))


def decode_pass(workload: Workload, n_gen: int = 1) -> Pass:
    """The pass of a decode step, `count` times for n_gen tokens of each answer."""
    step = workload.step
    n_drafts = step.n_draft if step.shares_output else 0
    return Pass(step.n_tokens, mean_depth(workload), n_gen / step.n_yielded, step.n_tokens, n_drafts)


def prompt_passes(n_past: int, n_prompt: int, n_ubatch: int) -> tuple[Pass, ...]:
    """The forward passes of a prompt after n_past tokens that are in the cache."""
    begins = range(0, n_prompt, n_ubatch)
    ends = [min(begin + n_ubatch, n_prompt) for begin in begins]
    return tuple(Pass(e - b, n_past + e, 1, int(e == n_prompt)) for b, e in zip(begins, ends, strict=True))
