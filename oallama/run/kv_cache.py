"""Prefix reuse: the tokens that the KV cache holds, so that a prompt that begins with them is not evaluated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oallama.core.errors import UsageError


def common_length(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of `held` that a prompt begins with, but never the whole prompt: its last token makes the logits."""
    most = min(len(held), len(prompt) - 1)
    return next((i for i in range(most) if held[i] != prompt[i]), max(most, 0))


class KvCache:
    """Sequence 0 of a context. tokens: what was decoded into it, in order; whoever decodes adds to them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def forget(self) -> None:
        """The cache may hold anything; nothing of it is used again."""
        self.tokens.clear()

    def begin(self, context: Any, prompt: Sequence[int]) -> int:
        """Keep the tokens that `prompt` begins with, drop the others; how many were kept.

        A sliding window or a recurrent state has lost what lay before the end of the sequence: where tokens would have
        to be dropped from it nothing is kept. Raises UsageError for a model that keeps no context.
        """
        from llama_cpp import llama_cpp as api

        memory = api.llama_get_memory(context)
        if memory is None:
            raise UsageError(
                "this model keeps no context, so it cannot generate; use it for embeddings through engine.llama"
            )
        n_held, n_kept = len(self.tokens), common_length(self.tokens, prompt)
        if n_kept and api.llama_memory_seq_pos_max(memory, 0) + 1 != n_held:  # somebody else decoded
            n_kept = 0
        if 0 < n_kept < n_held and api.llama_memory_seq_pos_min(memory, 0) > 0:
            n_kept = 0
        if 0 < n_kept < n_held and not api.llama_memory_seq_rm(memory, 0, n_kept, -1):
            n_kept = 0
        if n_kept == 0:
            api.llama_memory_clear(memory, True)
        del self.tokens[n_kept:]
        return n_kept
