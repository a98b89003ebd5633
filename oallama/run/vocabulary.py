"""Tokenisation in this process, and without a loaded model, before anything is measured."""

from __future__ import annotations

from typing import Any

from oallama.core.errors import ModelFileError, OallamaError, UsageError
from oallama.device.child import ask_child
from oallama.device.interrupt import held_interrupt
from oallama.device.load_params import load_bridge

MODULE = "oallama.run.vocabulary"
TIMEOUT_S = 300.0


def count_tokens(path: str, text: str) -> int:
    """Number of tokens of a text by the vocabulary of a GGUF, with BOS and EOS as the model wants them; `<|…|>` in it
    is a special token. A child process loads the vocabulary for each call, as native code must not see a file first in
    this one. Raises ModelFileError if llama.cpp cannot load the vocabulary, UsageError if it has none,
    BridgeError."""

    def failed(reason: str) -> OallamaError:
        return ModelFileError(f"cannot load {path}, llama.cpp fails on its vocabulary: {reason}")

    count: int = ask_child(MODULE, {"path": path, "text": text}, TIMEOUT_S, failed)["n_tokens"]
    return count


def tokenize(vocab: Any, text: str, add_special: bool = True) -> list[int]:
    """Token numbers of a text by a llama_vocab. add_special: with BOS and EOS as the model wants them. `<|…|>` in it is
    a special token.

    Raises UsageError for text that is too long, and for a model without a vocabulary, on which llama.cpp aborts.
    """
    from llama_cpp import llama_cpp as api

    if api.llama_vocab_type(vocab) == api.LLAMA_VOCAB_TYPE_NONE:
        raise UsageError("the model has no vocabulary to tokenize text; use a file with a vocabulary")
    data = text.encode("utf-8", "surrogateescape")
    with held_interrupt():  # a second BOS token is logged
        count = -api.llama_tokenize(vocab, data, len(data), None, 0, add_special, True)
        tokens = (api.llama_token * max(count, 0))()
        if api.llama_tokenize(vocab, data, len(data), tokens, count, add_special, True) != count:
            raise UsageError("the prompt cannot be tokenized; it is too long")
    return list(tokens)


#
# the child's side
#


def _handle(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    load_bridge()  # brings the right llama.cpp
    from llama_cpp import llama_cpp as api

    from oallama.device.native_log import native_log
    from oallama.model.memory import load_refusal

    params = api.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    with native_log() as log:
        model = api.llama_model_load_from_file(request["path"].encode(), params)
        if not model:
            raise load_refusal(request["path"], None, log.reason())
        vocab = api.llama_model_get_vocab(model)
        return {"n_tokens": len(tokenize(vocab, request["text"]))}


if __name__ == "__main__":
    from ggml_bridge.child import child_main
    from ggml_bridge.library import import_interface_only

    child_main(_handle, import_interface_only)
