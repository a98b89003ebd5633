"""Files and prompts that llama.cpp aborts on: an error of ours, one sentence, and no signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from e2e.forced import forced
from e2e.logits import placed_logits
from gguf_factory import write_gguf
from processes import here

from oallama.core.errors import UsageError
from oallama.device.native_abort import sentence_of


def no_vocabulary(writer: gguf.GGUFWriter, _n_tokens: int) -> None:
    writer.add_tokenizer_model("none")


def letters_only(writer: gguf.GGUFWriter, n_tokens: int) -> None:
    """Of SentencePiece's kind, without the tokens for single bytes that any other character is made of."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"x{i}" for i in range(n_tokens - len(tokens))])
    writer.add_token_scores([0.0] * n_tokens)
    writer.add_token_types([2, 3, 3] + [1] * (n_tokens - 3))


def test_a_model_without_a_vocabulary_is_for_llama_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", tokenizer=no_vocabulary)
    said = here("run", path, "hi", "--device", "none", code=2).stderr.splitlines()
    assert said[-1].startswith("oallama: the model has no vocabulary")
    with pytest.raises(UsageError, match="the model has no vocabulary"):
        forced(path).engine()
    with forced(path).llama() as llama:
        assert placed_logits(llama, [1, 2]).shape[0] == 2


@pytest.mark.parametrize(("prompt", "code"), [pytest.param("hi", 0, marks=pytest.mark.thorough), ("\u00e9", 2)])
def test_an_exception_of_llama_cpp_that_nobody_catches_is_told(prompt: str, code: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", tokenizer=letters_only)
    words = ("run", str(path), prompt, "-n", "2", "--device", "none", "--temp", "0")
    done = subprocess.run([sys.executable, "-m", "oallama", *words], capture_output=True, text=True, timeout=120)
    said = done.stderr.splitlines()
    assert done.returncode == code
    assert not code or said[-1].startswith("oallama: llama-server refuses the request: ")
    assert len(said) < 6, "no backtrace"


ABORTS = """
from oallama.device.native_abort import exit_at_abort
exit_at_abort()
import ggml_bridge
api = ggml_bridge.load().libraries.llama_cpp.llama_cpp
api._lib.ggml_abort(b"/home/someone/ggml.c", 12, b"GGML_ASSERT(%s) failed", b"x > 0")
"""


def test_an_assertion_of_ggml_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", ABORTS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "oallama: llama.cpp failed: ggml.c:12: GGML_ASSERT(x > 0) failed; use another file or other options\n"
    )


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            "/x/ggml-rpc/ggml-rpc.cpp:540: Remote RPC server crashed",
            "the device was lost: its RPC server ended, or did",
        ),
        ("/x/ggml-cuda/ggml-cuda.cu:98: CUDA error", "the device was lost or failed: ggml-cuda.cu:98: CUDA error; run"),
        ("/x/ggml.c:1644: GGML_ASSERT(ctx->mem_buffer != NULL) failed", "out of memory; use a smaller model"),
        ("", "llama.cpp failed; use another file"),
    ],
)
def test_a_lost_device_is_told_from_a_fault(message: str, sentence: str) -> None:
    assert sentence_of(message).startswith(sentence)
