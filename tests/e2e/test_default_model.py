"""The shipped models: small, read alike by llama.cpp and by us, near its grammar's entropy, right in its answers."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models"))

from training.documents import ASSISTANT, END, USER, Document, sample_document
from training.reading import load_network, load_tokenizer
from training.tokenizer import BEGIN, END_OF_TEXT

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

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


@pytest.mark.parametrize("text", ["", " ", "Grüße, 世界! 🦆", "a  b\n\n c\t1234 it's _x_", "<|user|> and <|nothing|>"])
def test_llama_cpp_tokenizes_other_text_alike(path: Path, llama: Any, text: str) -> None:
    tokenizer = load_tokenizer(path)
    assert llama.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_writes_what_the_model_was_trained_on(llama: Any) -> None:
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(llama.metadata["tokenizer.chat_template"])
    messages = [
        {"role": "user", "content": "What is 7 + 5?"},
        {"role": "assistant", "content": "7 + 5 = 12."},
        {"role": "user", "content": "Thanks!"},
    ]
    expected = f"{BEGIN}{USER}\nWhat is 7 + 5?{END}\n{ASSISTANT}\n7 + 5 = 12.{END}\n{USER}\nThanks!{END}\n{ASSISTANT}\n"
    assert template.render(messages=messages, bos_token=BEGIN, eos_token=END_OF_TEXT, add_generation_prompt=True) == (
        expected
    )
    answer = llama.create_chat_completion(messages, max_tokens=20, temperature=0.0)["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("You are welcome!", "stop")


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


@trained_to_the_end
@pytest.mark.parametrize(
    ("answer", "least"),
    [
        (r"\d+ [-+] \d+ = \d+\.", 0.95),
        (r"\w+ helped \w+\.|It was the \w+ of \w+\.", 0.9),
        (r"\w+ lived (?:in|on|at) [\w ]+\.", 0.6),
    ],
    ids=["sums", "who", "homes"],
)
def test_answers_questions_in_held_out_documents(path: Path, llama: Any, answer: str, least: float) -> None:
    """Greedy answers, word for word; models/README.md has all kinds of questions, those it fails included."""
    tokenizer = load_tokenizer(path)
    right = asked = 0
    for document in (sample_document(HELD_OUT_SEED, i) for i in range(1000)):
        found = re.search(
            rf"\?(?:{re.escape(END)})?\n(?:{re.escape(ASSISTANT)}\n|Answer:)?( ?(?:{answer}))", document.text
        )
        if found is None:
            continue
        start = 1 + len(tokenizer.encode(document.text[: found.start(1)]))
        tokens = [tokenizer.id_of(BEGIN), *tokenizer.encode(document.text[: found.end(1)])]
        best = logits_of(llama, tokens)[start - 1 : -1].argmax(axis=1)
        right += best.tolist() == tokens[start:]
        asked += 1
        if asked == 25:
            break
    assert asked == 25
    assert right >= least * asked, f"{right} of {asked} answers are right"


@trained_to_the_end
def test_a_requested_story_is_about_what_was_requested(llama: Any) -> None:
    request = "Tell me a story about a fox named Mia."
    reply = llama.create_chat_completion([{"role": "user", "content": request}], max_tokens=300, temperature=0.0)
    text, reason = reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]
    assert "fox named Mia" in text
    assert reason == "stop"
    assert text.count("Mia") >= 4


def test_torch_and_llama_cpp_compute_the_same_logits(path: Path, llama: Any) -> None:
    """Normalised mean squared error against an independent forward pass in F32 with the file's own weights."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra `train`)")
    network, tokenizer = load_network(path), load_tokenizer(path)
    for document in held_out(5):
        tokens = [tokenizer.id_of(BEGIN), *tokenizer.encode(document.text)]
        with torch.no_grad():
            expected = network(torch.tensor([tokens]))[0].double().numpy()
        error = np.mean((logits_of(llama, tokens) - expected) ** 2) / np.mean(expected**2)
        assert error < (1e-6 if path == F16 else 1e-3)


@pytest.mark.parametrize("model", ["stories", "stories-moe"])
def test_interrupted_training_goes_on_as_if_it_had_not_been(model: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra `train`)")
    from training.trainer import Settings, Trainer

    torch.set_num_threads(1)
    settings = Settings(steps=4, seed=5, rows=1, time=64, model=model)
    whole, first, second = (Trainer(settings, load_tokenizer(F16), "f32") for _ in range(3))
    losses = [whole.train_step() for _ in range(4)]
    resumed = [first.train_step(), first.train_step()]
    first.save(tmp_path / "checkpoint.pt")
    second.load(tmp_path / "checkpoint.pt")
    resumed += [second.train_step(), second.train_step()]
    assert resumed == pytest.approx(losses, rel=1e-4)
    for a, b in zip(whole.network.parameters(), second.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="other settings"):
        Trainer(Settings(steps=9, seed=5, rows=1, time=64), load_tokenizer(F16), "f32").load(tmp_path / "checkpoint.pt")
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="no checkpoint"):
        second.load(tmp_path / "checkpoint.pt")
