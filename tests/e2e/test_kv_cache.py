"""The KV cache that is kept from one answer to the next: nothing is evaluated twice, and no answer is another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from e2e.forced import written
from e2e.logits import Logits, nmse
from processes import PATIENCE_S

from oallama.placer import Placer
from oallama.run.answer import Generation
from oallama.run.engine import Engine

pytestmark = pytest.mark.usefixtures("kept_engines")

STORY = "the quick brown fox jumps over the lazy dog, and then it goes back to where it came from. " * 2
LETTERS = "root ::= [a-z ]+"
RECURRENT, WINDOWED = ("lfm2", "mamba2"), ("gemma2", "gemma3", "gpt-oss")
"""Their state cannot go back, or only as far as their window reaches."""


def opened(path: Path) -> Engine:
    placer = Placer.load(path, device="none", threads=1)
    return placer.engine(placer.plan("cpu", workload=placer.workload(512, 128), measure=False))


def reused(engine: Engine, prompt: str | Sequence[int], n: int = 6) -> Generation:
    return engine.stream(prompt, n, temperature=0, reuse=True, grammar=LETTERS).rest()


def logits(engine: Engine, prompt: Sequence[int], reuse: bool) -> Logits:
    """Logits behind a prompt but for a constant, as llama-server's own interface tells them."""
    n_vocab = engine.model.n_vocab
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": n_vocab, "cache_prompt": reuse, "grammar": LETTERS}
    headers = {"Authorization": f"Bearer {engine.api_key}"}
    answer = httpx.post(f"{engine.url}/completion", json=asked, headers=headers, timeout=PATIENCE_S).json()
    found = np.full(n_vocab, np.nan, np.float32)
    for each in answer["completion_probabilities"][0]["top_logprobs"]:
        found[each["id"]] = each["logprob"]
    return found - found.mean()


@pytest.mark.parametrize(
    "arch",
    ["llama", "gemma3", "lfm2",
     *(pytest.param(x, marks=pytest.mark.thorough) for x in ("mamba2", "qwen3moe", "deepseek2", "gemma2", "gpt-oss"))],
)  # fmt: skip
def test_what_the_cache_holds_is_not_evaluated_again_and_changes_no_answer(arch: str, models: Path) -> None:
    with opened(written(models, arch, n_ctx=1024)) as engine:
        first = engine.generate(STORY, 12, temperature=0)
        assert first.n_cached == 0
        tokens = [*engine.tokenize(STORY), *first.tokens]
        longer = [*tokens, *engine.tokenize(" what next?", add_special=False)]
        shorter = [*longer[:-15], *tokens[3:9]]
        other = [*longer[:-4], 7, *longer[-3:]]
        assert reused(engine, longer).n_cached == len(tokens) - (first.end == "limit"), "its last token is not computed"
        again, n_back = reused(engine, shorter), len(longer) - 15
        assert again.n_cached == n_back or (arch in (*RECURRENT, *WINDOWED) and again.n_cached < n_back)
        assert reused(engine, shorter).n_cached == len(shorter) - 1 or arch in RECURRENT
        wanted, texts, errors = {}, {}, []
        for prompt in (longer, shorter):
            wanted[len(prompt)] = logits(engine, prompt, reuse=False)
            texts[len(prompt)] = engine.generate(prompt, 6, temperature=0, grammar=LETTERS).text
        reused(engine, tokens)
        for prompt in (longer, shorter, shorter):
            errors.append(nmse(logits(engine, prompt, reuse=True), wanted[len(prompt)]))
            assert reused(engine, prompt).text == texts[len(prompt)]
        one_token = nmse(logits(engine, other, reuse=True), wanted[len(longer)])
    # batches that are cut elsewhere sum in another order, and the KV cache is F16; one other token is more than that
    assert max(errors) < min(1e-3, one_token / 5)


def test_an_answer_is_the_same_whatever_was_asked_before(models: Path) -> None:
    with opened(written(models, "llama", n_ctx=1024)) as engine:
        tokens = engine.tokenize(STORY)
        wanted = reused(engine, STORY, 12).text
        assert len(wanted) > 3

        def broken_off() -> None:
            stream = engine.stream(STORY + "and on", 50, temperature=1.5, reuse=True, grammar=LETTERS)
            next(stream)
            stream.close()

        for use in (lambda: engine.generate("once"), lambda: engine.embed("once upon a time"), broken_off):
            use()
            assert reused(engine, tokens, 12).text == wanted
        assert reused(engine, tokens, 12).n_cached == len(tokens) - 1
