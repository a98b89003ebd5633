"""Tokenisation without a loaded model: a prompt's tokens before anything is measured or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oallama.core.errors import ModelFileError, OallamaError
from oallama.device.child import ask_child
from oallama.device.load_params import load_bridge

MODULE = "oallama.run.vocabulary"
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The vocabulary of the GGUF at `path`. A child process loads it for each call, as native code must not see a file
    first in this one."""

    path: str

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Tokenize as Engine.tokenize does. Raises ModelFileError where llama.cpp cannot load the vocabulary,
        BridgeError."""

        def failed(reason: str) -> OallamaError:
            return ModelFileError(f"{self.path} cannot be loaded, llama.cpp fails on its vocabulary: {reason}")

        request = {"path": self.path, "text": text, "add_special": add_special}
        tokens: list[int] = ask_child(MODULE, request, TIMEOUT_S, failed)["tokens"]
        return tokens


class LongestTokens:
    """At most so many tokens as a text may have: one for each byte, and some that a vocabulary adds by itself."""

    ADDED = 8

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        return [0] * (len(text.encode("utf-8", "surrogateescape")) + self.ADDED)


#
# the child's side
#


def _handle(request: dict[str, Any], _progress: Any) -> dict[str, Any]:
    load_bridge()  # brings the right llama.cpp
    from llama_cpp import llama_cpp as api

    from oallama.device.native_log import native_log
    from oallama.model.memory import load_refusal
    from oallama.run.generate import tokenize

    params = api.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    with native_log() as log:
        model = api.llama_model_load_from_file(request["path"].encode(), params)
        if not model:
            raise load_refusal(request["path"], None, log.reason())
    return {"tokens": tokenize(api.llama_model_get_vocab(model), request["text"], request["add_special"])}


if __name__ == "__main__":
    from ggml_bridge.child import child_main
    from ggml_bridge.library import import_interface_only

    child_main(_handle, import_interface_only)
