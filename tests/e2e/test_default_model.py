"""The shipped models: small, read alike by llama.cpp and by us, near its grammar's entropy, right in its answers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))

from training.documents import Document, sample_document
from training.reading import load_tokenizer
from training.tokenizer import BEGIN, END_OF_TEXT

pytestmark = pytest.mark.thorough  # the files change when they are trained anew, and not before

MODELS = Path(__file__).resolve().parents[2] / "models"
KINDS = ("f16", "q4_0", "moe-q4_0")
F16, Q4_0, MOE = (MODELS / f"oallama-stories-{kind}.gguf" for kind in KINDS)
HELD_OUT_SEED = 77_000_001  # a stream that neither training nor its validation draws from
N_DOCUMENTS = 60
MARGIN = {F16: 0.045, Q4_0: 0.045, MOE: 0.24}  # nats per token above the grammar's entropy; the card states less

trained_to_the_end = pytest.mark.parametrize("path", [F16, Q4_0], ids=KINDS[:2], indirect=True, scope="module")


@pytest.fixture(scope="module", params=[F16, Q4_0, MOE], ids=KINDS)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def llama(path: Path) -> Iterator[Any]:
    threads = min(2, os.cpu_count() or 1)
    with_model = llama_cpp.Llama(
        str(path), n_ctx=512, n_gpu_layers=0, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
    )
    yield with_model
    with_model.close()


def logits_of(llama: Any, tokens: list[int]) -> np.ndarray:
    """Teacher-forced logits [n_tokens, n_vocab]."""
    llama.reset()
    llama.eval(tokens)
    return np.array(llama.scores[: len(tokens)], np.float64)


def greedy(llama: Any, prompt: str, n: int = 80) -> str:
    """The most likely continuation of a prompt (with the begin mark before it)."""
    return str(llama.create_completion(prompt, max_tokens=n, temperature=0.0)["choices"][0]["text"])


def held_out(n: int) -> list[Document]:
    return [sample_document(HELD_OUT_SEED, i) for i in range(n)]


def test_the_files_are_small() -> None:
    assert F16.stat().st_size + Q4_0.stat().st_size <= 10_000_000
    assert MOE.stat().st_size <= 4_000_000


def test_llama_cpp_tokenizes_as_the_trainer_did(path: Path, llama: Any) -> None:
    tokenizer = load_tokenizer(path)
    for document in held_out(N_DOCUMENTS):
        ours = tokenizer.encode(document.text)
        assert llama.tokenize(document.text.encode(), add_bos=True, special=True) == [tokenizer.id_of(BEGIN), *ours]
        assert llama.detokenize(ours, special=True).decode() == document.text == tokenizer.decode(ours)


def test_cross_entropy_is_near_the_entropy_of_the_grammar(path: Path, llama: Any) -> None:
    """Mean over held-out documents of -log p(model) and -log p(grammar), in nats per token."""
    tokenizer = load_tokenizer(path)
    model = grammar = 0.0
    n_tokens = 0
    for document in held_out(N_DOCUMENTS):
        tokens = [tokenizer.id_of(BEGIN), *tokenizer.encode(document.text), tokenizer.id_of(END_OF_TEXT)]
        scores = logits_of(llama, tokens[:-1])
        top = scores.max(axis=1, keepdims=True)
        log_p = scores - top - np.log(np.exp(scores - top).sum(axis=1, keepdims=True))
        model -= float(log_p[np.arange(len(tokens) - 1), tokens[1:]].sum())
        grammar += document.nats
        n_tokens += len(tokens) - 1
    gap = (model - grammar) / n_tokens
    assert math.isfinite(gap)
    assert -0.005 < gap < MARGIN[path], f"{model / n_tokens:.4f} nats a token, the grammar has {grammar / n_tokens:.4f}"


@trained_to_the_end
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 7 + 5?", "7 + 5 = 12."),
        ("What is 18 - 6?", "18 - 6 = 12."),
        ("What is 3 times 4?", "3 times 4 is 12."),
        ("Mia has 6 apples and gets 5 more. How many apples does Mia have now?", "Mia has 11 apples now."),
    ],
)
def test_answers_sums(llama: Any, question: str, answer: str) -> None:
    assert greedy(llama, f"{question}\n").startswith(answer)
    chat = llama.create_chat_completion([{"role": "user", "content": question}], max_tokens=40, temperature=0.0)
    assert chat["choices"][0]["message"]["content"] == answer
