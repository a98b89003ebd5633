"""The experts that a model really uses: its own choices, read from the graph as stock llama.cpp computes it.

python -m e2e.recorded_routing '{"model": "moe.gguf", "prompts": ["the end"], "n_gen": 6}'    # rows by layer
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Row = tuple[int, ...]
Phase = Literal["prompt", "decode", "all"]
_NODE = re.compile(rb"ffn_moe_topk-(\d+)")  # llama.cpp's name: view [n_used, n_tokens] of the sorted experts, I32


@dataclass(frozen=True)
class RecordedRun:
    """What is run: each prompt, and as many tokens behind it, drawn at `temperature`. Rows of `phase` are kept.
    on_cpu: regular expressions of weights that stay off the device."""

    model: str
    prompts: tuple[str, ...]
    n_gen: int = 200
    phase: Phase = "all"
    temperature: float = 0.8
    seed: int = 0
    n_ctx: int = 512
    device: str = "none"
    on_cpu: tuple[str, ...] = ()
    n_threads: int = 1


def record(run: RecordedRun) -> dict[int, list[Row]]:
    """Rows by layer in the order of the tokens. Every token's logits are asked for, so that the last layer has as many
    rows as the others."""
    from llama_cpp import llama_cpp as api

    from ggml_bridge.library import library_folder, soname
    from oallama.bench.loaded import context_params, stock_params
    from oallama.bench.readback import check_tensor_layout
    from oallama.bench.records import StockPlacement
    from oallama.core.errors import ModelFileError
    from oallama.device.load_params import LoadSettings
    from oallama.device.native_log import native_log
    from oallama.device.opening import NO_DEVICE, open_device
    from oallama.device.spec import parse_device
    from oallama.model.gguf_reader import read_gguf
    from oallama.profile.emulate import resolved

    path = read_gguf(run.model).path
    ggml = ctypes.CDLL(str(library_folder() / soname("ggml-base")))
    check_tensor_layout(ggml)
    reader = _Reader(ggml)
    spec, n_threads = resolved(parse_device(run.device), run.n_threads)
    settings = LoadSettings(
        path, device=str(spec), n_ctx=run.n_ctx, n_batch=run.n_ctx, n_ubatch=run.n_ctx, n_threads=n_threads
    )
    with open_device(spec) as device:
        overrides = tuple((pattern, "CPU") for pattern in run.on_cpu)
        placement = StockPlacement(0 if device.name == NO_DEVICE else 999, overrides)
        model_params, _owner = stock_params(placement.load(settings), device.name)
        params = context_params(settings)
        params.n_seq_max = 1
        params.cb_eval = api.ggml_backend_sched_eval_callback(reader.on_node)
        with native_log() as log:
            model = api.llama_model_load_from_file(path.encode(), model_params)
            context = api.llama_init_from_model(model, params) if model else None
        if not context:
            if model:
                api.llama_model_free(model)
            raise ModelFileError(f"{path} cannot be loaded: {log.reason() or 'llama.cpp gives no reason'}")
        try:
            for number in range(len(run.prompts)):
                _generate(api, context, run, number, reader)
        finally:
            api.llama_free(context)
            api.llama_model_free(model)
    return reader.rows


class _Reader:
    """Notes the result of every node that says which experts are used, while `wanted`."""

    def __init__(self, ggml: Any) -> None:
        self.rows: dict[int, list[Row]] = {}
        self.wanted = True
        self._get = ggml.ggml_backend_tensor_get
        self._get.restype = None
        self._get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def on_node(self, node: int, ask: bool, _user_data: int) -> bool:
        """ggml_backend_sched_eval_callback: asks for those nodes, and reads them when they are computed."""
        from oallama.bench.readback import tensor_at

        tensor = tensor_at(node)
        found = _NODE.fullmatch(tensor.name)
        if found is None:
            return not ask  # true afterwards: go on
        if not ask and self.wanted:
            n_used, n_tokens = tensor.ne[0], tensor.ne[1]
            row = (ctypes.c_int32 * n_used)()
            rows = self.rows.setdefault(int(found[1]), [])
            for token in range(n_tokens):
                self._get(node, row, token * tensor.nb[1], n_used * 4)
                rows.append(tuple(row))
        return True


def _generate(api: Any, context: Any, run: RecordedRun, number: int, reader: _Reader) -> None:
    """One prompt and what follows it, in an empty cache; ends where the model does."""
    from oallama.run.generate import tokenize

    model = api.llama_get_model(context)
    vocab = api.llama_model_get_vocab(model)
    n_vocab = api.llama_vocab_n_tokens(vocab)
    random = np.random.default_rng((run.seed, number))
    tokens = tokenize(vocab, run.prompts[number])
    api.llama_memory_clear(api.llama_get_memory(context), True)
    made: list[int] = []
    _decode(api, context, tokens, 0, reader, run.phase in ("prompt", "all"))
    while len(made) < run.n_gen:
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), shape=(n_vocab,)).astype(np.float64)
        p = np.exp((logits - logits.max()) / max(run.temperature, 1e-3))
        token = int(random.choice(n_vocab, p=p / p.sum()))
        if api.llama_vocab_is_eog(vocab, token):
            break
        _decode(api, context, [token], len(tokens) + len(made), reader, run.phase in ("decode", "all"))
        made.append(token)


def _decode(api: Any, context: Any, tokens: Sequence[int], first: int, reader: _Reader, wanted: bool) -> None:
    batch = api.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        reader.wanted = wanted
        status = api.llama_decode(context, batch)
        if status != 0:
            raise ValueError(f"llama.cpp cannot evaluate {len(tokens)} tokens at {first}: status {status}")
    finally:
        api.llama_batch_free(batch)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(record(RecordedRun(**{k: tuple(v) if isinstance(v, list) else v for k, v in asked.items()}))))
