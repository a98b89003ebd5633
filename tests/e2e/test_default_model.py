"""The shipped models: small, read alike by llama.cpp and by us, near its grammar's entropy, right in its answers."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))

from training.documents import sample_document
from training.reading import load_tokenizer
from training.tokenizer import BEGIN, END_OF_TEXT

import ggml_bridge

llama_cpp = ggml_bridge.load().libraries.llama_cpp
pytestmark = pytest.mark.thorough  # the files change when they are trained anew, and not before

MODELS = Path(__file__).resolve().parents[2] / "models"
MARGIN = {"f16": 0.045, "q4_0": 0.045, "moe-q4_0": 0.24}  # nats a token above the grammar's entropy; the card says less
TRAINED_TO_THE_END = ("f16", "q4_0")
DOCUMENTS = [sample_document(77_000_001, i) for i in range(60)]  # that neither training nor its validation draws


def path_of(kind: str) -> Path:
    return MODELS / f"oallama-stories-{kind}.gguf"


@pytest.fixture(scope="module", params=MARGIN)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llama(kind: str) -> Any:
    with contextlib.closing(
        llama_cpp.Llama(str(path_of(kind)), n_ctx=512, n_threads=2, n_threads_batch=2, logits_all=True, verbose=False)
    ) as made:
        yield made


def test_the_files_are_small() -> None:
    assert sum(path_of(kind).stat().st_size for kind in TRAINED_TO_THE_END) <= 10_000_000
    assert path_of("moe-q4_0").stat().st_size <= 4_000_000


def test_llama_cpp_tokenizes_as_the_trainer_did(kind: str, llama: Any) -> None:
    tokenizer = load_tokenizer(path_of(kind))
    for document in DOCUMENTS:
        ours = tokenizer.encode(document.text)
        assert llama.tokenize(document.text.encode(), add_bos=True, special=True) == [tokenizer.id_of(BEGIN), *ours]
        assert llama.detokenize(ours, special=True).decode() == document.text == tokenizer.decode(ours)


def test_cross_entropy_is_near_the_entropy_of_the_grammar(kind: str, llama: Any) -> None:
    """Mean over held-out documents of -log p(model) and -log p(grammar), in nats per token."""
    tokenizer = load_tokenizer(path_of(kind))
    model, n_tokens = 0.0, 0
    for document in DOCUMENTS:
        tokens = [tokenizer.id_of(BEGIN), *tokenizer.encode(document.text), tokenizer.id_of(END_OF_TEXT)]
        llama.reset()
        llama.eval(tokens[:-1])
        scores = np.array(llama.scores[: len(tokens) - 1], np.float64)
        log_p = scores[np.arange(len(tokens) - 1), tokens[1:]] - np.logaddexp.reduce(scores, axis=1)
        model -= float(log_p.sum())
        n_tokens += len(tokens) - 1
    grammar = sum(document.nats for document in DOCUMENTS)
    assert -0.005 < (model - grammar) / n_tokens < MARGIN[kind]


@pytest.mark.parametrize("kind", TRAINED_TO_THE_END, indirect=True, scope="module")
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
    text = llama.create_completion(f"{question}\n", max_tokens=40, temperature=0.0)["choices"][0]["text"]
    assert text.startswith(answer)
    chat = llama.create_chat_completion([{"role": "user", "content": question}], max_tokens=40, temperature=0.0)
    assert chat["choices"][0]["message"]["content"] == answer
