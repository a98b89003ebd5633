"""Teacher-forced logits: what the model expects after every prefix of given tokens, for checks and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from oallama.run.generate import Batch, clear_memory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def teacher_forced_logits(
    context: Any, tokens: Sequence[int], n_vocab: int, n_ubatch: int, beat: Callable[[], None]
) -> npt.NDArray[np.float32]:
    """Logits [n_tokens, n_vocab] from an empty KV cache, in micro-batches of n_ubatch as llama.cpp cuts any batch."""
    import numpy as np
    from llama_cpp import llama_cpp as api

    logits = np.empty((len(tokens), n_vocab), dtype=np.float32)
    batch = Batch(n_ubatch)
    try:
        clear_memory(context)
        for start in range(0, len(tokens), n_ubatch):
            chunk = tokens[start : start + n_ubatch]
            batch.decode(context, chunk, start, "all")
            rows = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(chunk) * n_vocab,))
            logits[start : start + len(chunk)] = rows.reshape(len(chunk), n_vocab)
            beat()
    finally:
        batch.free()
    return logits
