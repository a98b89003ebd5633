"""A model with every tensor in the split buffer type, embeddings and norms too (`-ot '.*=OALLAMA_Split'`), in a child
process: ggml's scheduler aborts where it finds no way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp

import ggml_bridge
from ggml_bridge.child import child_main

_TOKENS = (1, 5, 9, 3, 2, 7, 4)


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override"""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def handle(request: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """What `decode` returns for a prompt, the last token's logits, and the plan's problems."""
    with ggml_bridge.load().split().plan(request["plan"]) as plan:
        overrides = (_Override * 2)(_Override(request["pattern"].encode(), plan.buft), _Override(None, None))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        model = llama_cpp.llama_model_load_from_file(request["path"].encode(), params)
        context_params = llama_cpp.llama_context_default_params()
        context_params.n_ctx, context_params.n_threads, context_params.n_threads_batch = 64, 1, 1
        context = llama_cpp.llama_init_from_model(model, context_params)
        tokens = (llama_cpp.llama_token * len(_TOKENS))(*_TOKENS)
        status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(_TOKENS)))
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        logits = llama_cpp.llama_get_logits(context)[:n_vocab] if status == 0 else []
        usable, problems = plan.problems()
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    return {"status": status, "logits": logits, "usable": usable, "problems": problems}


if __name__ == "__main__":
    child_main(handle)
