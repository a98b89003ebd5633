"""A batch of one sequence, at given positions and with the logits that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Logits = Literal["none", "last", "all"]


class Batch:
    """A llama_batch of sequence 0 that is refilled for every decode. capacity: tokens, at most n_batch."""

    def __init__(self, capacity: int) -> None:
        import numpy as np
        from llama_cpp import llama_cpp as api

        self._api = api
        self._batch = api.llama_batch_init(capacity, 0, 1)
        view = np.ctypeslib.as_array
        self._token = view(self._batch.token, shape=(capacity,))
        self._position = view(self._batch.pos, shape=(capacity,))
        self._wanted = view(self._batch.logits, shape=(capacity,))
        view(self._batch.n_seq_id, shape=(capacity,))[:] = 1
        for i in range(capacity):
            self._batch.seq_id[i][0] = 0
        self._count = np.arange(capacity, dtype=np.int32)

    def decode(self, context: Any, tokens: Sequence[int], first_position: int, logits: Logits) -> None:
        """Run tokens at positions from first_position on, and keep the logits of none, the last, or all of them."""
        n_tokens = len(tokens)
        self._batch.n_tokens = n_tokens
        self._token[:n_tokens] = tokens
        self._position[:n_tokens] = self._count[:n_tokens] + first_position
        self._wanted[:n_tokens] = logits == "all"
        if logits == "last":
            self._wanted[n_tokens - 1] = True
        status = self._api.llama_decode(context, self._batch)
        assert status == 0, status

    def free(self) -> None:
        self._api.llama_batch_free(self._batch)
