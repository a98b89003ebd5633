"""Models run by llama.cpp itself, with the split back end or without, beneath the engine: any operator may be given to
the back end there, also one that lies whole on one side."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from e2e.batch import Batch
from e2e.forced import N_CTX, N_UBATCH, Share, forced
from e2e.logits import Logits, told_plain

import ggml_bridge
from ggml_bridge.split import SplitStats
from oallama.core.types import Attention, Operator, OperatorPlacement
from oallama.device.load_params import BuftOverride, LoadSettings, apply_context, load_bridge
from oallama.plan.patterns import escape
from oallama.plan.plugin_text import plugin_text
from oallama.run.weight_places import host_shape

api = ggml_bridge.load().libraries.llama_cpp.llama_cpp


@contextlib.contextmanager
def loaded(
    path: Path,
    buft: int = 0,
    names: Sequence[str] = (),
    devices: Sequence[int] = (),
    n_seq: int = 1,
    told: bool = True,
    **params: Any,
) -> Iterator[Any]:
    """A llama_context of the model, weights of these names in this buffer type; one thread, nothing offloaded by
    llama.cpp's own choice. devices: those it may use. told: which weights to keep plain (told_plain). params: fields of
    llama_model_params."""
    model_params = api.llama_model_default_params()
    named = [BuftOverride(f"^(?:{'|'.join(map(escape, names))})$".encode(), buft)] if buft else []
    plain = told_plain(path) if told else (BuftOverride(),)
    overrides = (BuftOverride * (len(named) + len(plain)))(*named, *plain)
    listed = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
    model_params.devices = ctypes.cast(listed, ctypes.c_void_p)
    model_params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    model_params.n_gpu_layers = 0
    for name, value in params.items():
        setattr(model_params, name, value)
    model = api.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, path
    try:
        with context_of(model, n_seq) as context:
            yield context
    finally:
        api.llama_model_free(model)


@contextlib.contextmanager
def context_of(model: Any, n_seq: int = 1, n_threads: int = 1) -> Iterator[Any]:
    params = api.llama_context_default_params()
    settings = LoadSettings(
        "", n_ctx=N_CTX, n_ubatch=N_UBATCH, attention=Attention("on"), n_threads=n_threads, n_outputs=0
    )
    apply_context(settings, params)
    params.n_seq_max, params.op_offload, params.kv_unified = n_seq, False, True
    context = api.llama_init_from_model(model, params)
    assert context
    try:
        yield context
    finally:
        api.llama_free(context)


def logits_of(context: Any, tokens: Sequence[int]) -> Logits:
    """Logits [n_tokens, n_vocab] of one sequence from an empty KV cache, in micro-batches."""
    n_ubatch, out = api.llama_n_ubatch(context), []
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(api.llama_get_model(context)))
    api.llama_memory_clear(api.llama_get_memory(context), True)
    batch = Batch(n_ubatch)
    try:
        for start in range(0, len(tokens), n_ubatch):
            chunk = tokens[start : start + n_ubatch]
            batch.decode(context, chunk, start, "all")
            rows = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(chunk), n_vocab))
            out.append(rows.copy())
    finally:
        batch.free()
    return np.concatenate(out)


def logits_of_sequences(context: Any, sequences: Sequence[Sequence[int]]) -> Logits:
    """Logits [n_sequences, n_tokens, n_vocab] of sequences of one length, one token of each in every batch."""
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(api.llama_get_model(context)))
    n, length = len(sequences), len(sequences[0])
    out = np.empty((n, length, n_vocab), np.float32)
    batch = api.llama_batch_init(n, 0, 1)
    try:
        for position in range(length):
            batch.n_tokens = n
            for i, tokens in enumerate(sequences):
                batch.token[i], batch.pos[i], batch.logits[i] = tokens[position], position, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
            assert api.llama_decode(context, batch) == 0
            for i in range(n):
                out[i, position] = np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), shape=(n_vocab,))
    finally:
        api.llama_batch_free(batch)
    return out


@contextlib.contextmanager
def with_plugin(
    path: Path,
    device: str,
    share: Share,
    *,
    hot: Sequence[int] = (),
    layout: str | None = None,
    sum_bytes: int | None = 0,
    token_assignment: tuple[tuple[int, int], ...] = (),
    **params: Any,
) -> Iterator[Any]:
    """A llama_context whose operators with a share are the split back end's, cut so.

    device: a ggml device that is open. layout: None: the one that llama.cpp would choose. sum_bytes: `sum` of the plan
    text. With 0 the few results of a tiny model's experts are added up too; None: as plans say it. params: of loaded().
    """
    case = forced(path, share=share, hot=hot, layout=layout, token_assignment=token_assignment, probe=False)
    operators = [operator for operator in case.placer.operators if operator.name in case.given]
    by_name = {placement.name: placement for placement in case.plan.operators}
    chosen = tuple(_with_layout(operator, by_name[operator.name]) for operator in operators)
    text = plugin_text(
        replace(case.plan, operators=chosen), operators, case.placer.model.n_layer, [device], every_operator=True
    )
    text += "" if sum_bytes is None else f"sum {sum_bytes}\n"
    with (
        load_bridge().split().plan(text) as plan,
        loaded(path, plan.buft, case.given, load_mode=api.LLAMA_LOAD_MODE_NONE, **params) as context,
    ):
        is_placed, problems = plan.problems()
        unread = [operator.name for operator in operators if operator.input_f32]  # on a device as CUDA is
        assert is_placed and all(any(name in told for name in unread) for told in problems), problems
        assert [slice.name for slice in plan.slices() if slice.loaded] == list(case.given)
        yield context


@contextlib.contextmanager
def counted() -> Iterator[list[SplitStats]]:
    """Yield a list that at the end holds one element: the split back end's statistics of the time between."""
    backend, found = load_bridge().split(), list[SplitStats]()
    before = backend.stats()
    yield found
    found.append(backend.stats() - before)


def _with_layout(operator: Operator, placement: OperatorPlacement) -> OperatorPlacement:
    if placement.cc == 0 or placement.layout is not None:
        return placement
    bridge, shape = load_bridge(), host_shape(operator, placement)
    used = operator.n_expert_used if operator.routed else 0
    layouts = bridge.cpu_layouts()
    return replace(placement, layout=next(x for x in layouts if bridge.layout_supports(x, operator.type, *shape, used)))
