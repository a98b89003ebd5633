"""The KV cache that is kept from one answer to the next: nothing is evaluated twice, and no answer is another."""

import numpy as np
import pytest
from e2e.logits import nmse
from gguf_factory import write_gguf
from oallama.run.generate import common_length

from oallama.placer import Placer

STORY = "the quick brown fox jumps over the lazy dog, and then it goes back to where it came from. " * 2


def reused(engine, prompt, n=12):
    return engine.stream(prompt, n, temperature=0, reuse=True).rest()


def last_logits(llama):
    from llama_cpp import llama_cpp as api

    return np.ctypeslib.as_array(api.llama_get_logits_ith(llama.ctx, -1), shape=(llama.n_vocab(),)).astype(float)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "gemma2", "gemma3", "gpt-oss", "deepseek2", "lfm2", "mamba2"])
def test_what_the_cache_holds_is_not_evaluated_again_and_changes_no_answer(arch, tmp_path):
    placer = Placer.load(write_gguf(tmp_path / "m.gguf", arch), device="none", threads=1)
    recurrent = arch in ("lfm2", "mamba2")  # their state cannot go back
    with placer.engine(placer.plan("cpu", workload=placer.workload(512, 128), measure=False), progress=False) as engine:
        llama = engine.llama
        first = reused(engine, STORY)
        assert first.n_cached == 0
        tokens = [*engine.tokenize(STORY), *first.tokens]
        longer = [*tokens, *engine.tokenize(" what next?", add_special=False)]
        shorter = [*longer[:-15], *tokens[3:9]]
        wanted, errors = {}, []
        for prompt in (longer, shorter):
            engine.generate(prompt, 1)
            wanted[len(prompt)] = last_logits(llama)
        reused(engine, STORY)
        for prompt, n_cached in (
            (longer, len(tokens) - 1),  # of the last token of an answer nothing was computed
            (shorter, 0 if recurrent else len(longer) - 15),
            (shorter, 0 if recurrent else len(shorter) - 1),
        ):
            assert reused(engine, prompt, 1).n_cached == n_cached
            errors.append(nmse(last_logits(llama), wanted[len(prompt)]))
        reused(engine, [*longer[:-4], 7, *longer[-3:]], 1)
        one_token = nmse(last_logits(llama), wanted[len(longer)])
    # batches that are cut elsewhere sum in another order, and the KV cache is F16; one other token is more than that
    assert max(errors) < min(1e-3, one_token / 5)


def test_nothing_is_reused_of_what_others_left_in_the_cache(tmp_path):
    placer = Placer.load(write_gguf(tmp_path / "m.gguf", "llama"), device="none", threads=1, n_ctx=768)
    with placer.engine(placer.plan("cpu", workload=placer.workload(512, 128), measure=False), progress=False) as engine:
        tokens, llama = engine.tokenize(STORY), engine.llama
        wanted = reused(engine, STORY).tokens
        others = {
            "generate": lambda: engine.generate("once"),
            "logits": lambda: engine.logits([5, 6, 7]),
            "llama": lambda: engine.llama.eval([5, 6, 7]),
            "a llama that was kept": lambda: llama.eval([5, 6, 7]),
            "call": lambda: engine.call(lambda: None),
        }
        for name, use in others.items():
            use()
            found = reused(engine, tokens)
            assert (found.n_cached == 0 or name == "generate") and found.tokens == wanted, name
        assert reused(engine, tokens).n_cached == len(tokens) - 1
        interrupted = engine.stream(STORY + "and on", 50, temperature=1.5, reuse=True)
        next(interrupted)
        interrupted.close()
        assert reused(engine, tokens).tokens == wanted


def test_the_last_token_of_a_prompt_is_always_evaluated():
    assert common_length([1, 2, 3], [1, 2, 3]) == 2
    assert common_length([1, 2, 3], [1, 2, 3, 4]) == 3
    assert common_length([1, 2, 3], [1, 9, 3, 4]) == 1
    assert common_length([1, 2, 3], [9]) == common_length([], [1, 2]) == common_length([1], []) == 0
