"""Sampling: llama.cpp's sampler chain in llama.cpp's order, and a grammar before it."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oallama.core.errors import UsageError
from oallama.core.keywords import check_fields
from oallama.device.load_params import load_bridge

REPEAT_LAST_N = 64  # tokens that repeat_penalty looks back, llama.cpp's default

_SEED_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the draw; the defaults but temperature and seed are llama.cpp's.

    temperature 0: greedy, and of the others only repeat_penalty and grammar count. top_k 0, top_p 1, min_p 0 and
    repeat_penalty 1: off. grammar: GBNF with a rule `root` (llama.cpp, grammars/README.md). Raises UsageError.
    """

    temperature: float = 0.8
    seed: int = 0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    grammar: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"--temp {self.temperature} is no temperature; give 0 (greedy) to 2")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k} is negative; give a number of tokens, 0 for all")
        for name, share in (("--top-p", self.top_p), ("--min-p", self.min_p)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name} {share} is no probability; give 0 to 1")
        if not (self.repeat_penalty > 0 and math.isfinite(self.repeat_penalty)):
            raise UsageError(f"--repeat-penalty {self.repeat_penalty} cannot be; give 1 (off) to 2")


class Sampler:
    """llama.cpp's sampler chain. vocab: llama_vocab. Raises UsageError for a grammar that llama.cpp cannot parse."""

    def __init__(self, sampling: Sampling, vocab: Any) -> None:
        from llama_cpp import llama_cpp as api

        self._api, self._n_vocab = api, api.llama_vocab_n_tokens(vocab)
        self._penalises = sampling.repeat_penalty != 1
        self._grammar = None
        if sampling.grammar is not None:
            self._grammar = api.llama_sampler_init_grammar(vocab, sampling.grammar.encode("utf-8", "replace"), b"root")
            if not self._grammar:
                raise UsageError("llama.cpp cannot parse the grammar; it must be GBNF with a rule called root")
        self._chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        samplers = []
        if self._penalises:
            samplers = [
                api.llama_sampler_init_penalties(self._n_vocab, REPEAT_LAST_N, sampling.repeat_penalty, 0.0, 0.0)
            ]
        if sampling.temperature == 0:
            samplers += [api.llama_sampler_init_greedy()]
        else:
            samplers += [
                api.llama_sampler_init_top_k(sampling.top_k),
                api.llama_sampler_init_top_p(sampling.top_p, 1),
                api.llama_sampler_init_min_p(sampling.min_p, 1),
                api.llama_sampler_init_temp(sampling.temperature),
                api.llama_sampler_init_dist(sampling.seed & _SEED_BITS),
            ]
        for sampler in samplers:
            api.llama_sampler_chain_add(self._chain, sampler)

    def begin(self, prompt: Sequence[int]) -> None:
        """Count the end of the prompt among what must not be repeated, as llama.cpp does."""
        for token in prompt[-REPEAT_LAST_N:] if self._penalises else ():
            self._api.llama_sampler_accept(self._chain, token)

    def sample(self, context: Any) -> int | None:
        """The next token, from the logits of the last decode; None where the grammar allows none."""
        if self._grammar is None:
            token: int = self._api.llama_sampler_sample(self._chain, context, -1)
            return token
        return self._sample_by_grammar(context)

    def free(self) -> None:
        self._api.llama_sampler_free(self._chain)
        if self._grammar is not None:
            self._api.llama_sampler_free(self._grammar)
            self._grammar = None

    def _sample_by_grammar(self, context: Any) -> int | None:
        """Sample a token that the grammar allows: accepting another would end the process."""
        import numpy as np

        api, n_vocab = self._api, self._n_vocab
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), shape=(n_vocab,))
        candidates = np.zeros(n_vocab, dtype=[("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        candidates["id"], candidates["logit"] = np.arange(n_vocab), logits
        data = ctypes.cast(candidates.ctypes.data, api.llama_token_data_p)
        array = api.llama_token_data_array(data=data, size=n_vocab, selected=-1, sorted=False)
        api.llama_sampler_apply(self._grammar, ctypes.byref(array))
        kept = candidates[np.isfinite(candidates["logit"])]
        if not len(kept):
            return None
        array.data, array.size = ctypes.cast(kept.ctypes.data, api.llama_token_data_p), len(kept)
        api.llama_sampler_apply(self._chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        api.llama_sampler_accept(self._grammar, token)
        api.llama_sampler_accept(self._chain, token)
        return token


def grammar_of_schema(schema: str) -> str:
    """GBNF, as llama-cpp-python makes it. Raises UsageError for what is no JSON, or a schema that it cannot express."""
    load_bridge()  # finds llama.cpp for llama_cpp
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        if not isinstance(json.loads(schema), dict):
            raise UsageError('the JSON schema is no JSON object; give one such as {"type": "object"}')
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    try:
        grammar: str = json_schema_to_gbnf(schema)
    except Exception as error:  # it asserts, and raises what it likes
        why = " ".join(str(error).split()).removesuffix(" (use --allow-fetch for force)")  # an option of its own tool
        raise UsageError(f"the JSON schema cannot be made a grammar: {why or type(error).__name__}") from None
    return grammar
